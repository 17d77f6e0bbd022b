"""Updates left out without the host's knowledge: a device decides by itself whether a batch's gradients are finite.

    norm of all gradients ── found_inf, float32: 1 if it is not finite ──┬── optimizer: as torch.amp.GradScaler asks it
                                                                         ├── running statistics, kept as they were
                                                                         └── the scale of the next losses

The host reads the norm with the batch's loss, and counts then. What is decided, and when, is the same as on
the CPU, so no scale lags behind. Where something else must know, such as an optimizer without ``found_inf``,
the host waits for the norm instead; :func:`decides` lists these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from avgpipe.runtime import loss
from avgpipe.runtime.loss import LossScale

if TYPE_CHECKING:
    from avgpipe.runtime.trained_stage import TrainedStage

_FUSED = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def found_inf(norm: torch.Tensor) -> torch.Tensor:
    """Return 1 if a norm is not finite, else 0; float32 []."""
    return norm.lt(torch.inf).logical_not_().float()  # no norm is less than 0, and NaN is not less


def decides(trained: TrainedStage, forgets: bool) -> bool:
    """Whether the device can leave out the next step of a stage. ``forgets``: whether a batch's statistics count.

    Not with an average of a lone pipeline's weights, corrections of late gradients, or carried state that a
    batch may have spoiled; nor with an optimizer that does not take ``found_inf``, or one of a prepared stage.
    """
    if trained.compares_steps or trained.prepared is not None or (forgets and trained.stage.carries):
        return False
    if trained.elastic is not None:
        return trained.elastic.skips_on_device
    return trained.optimizer is None or _takes_found_inf(trained.optimizer)


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of torch leaves a step out by itself, with all of its state as before."""
    if type(optimizer) not in _FUSED or not all(group["fused"] for group in optimizer.param_groups):
        return False
    # The first step of a momentum makes its memory, and would leave it without values.
    return not isinstance(optimizer, torch.optim.SGD) or all(
        not group["momentum"] or p.grad is None or optimizer.state[p].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
    )


@contextmanager
def skipping(optimizer: Any, found: torch.Tensor) -> Iterator[None]:
    """Have an optimizer leave out its step inside if ``found`` is 1, by the protocol of torch.amp.GradScaler."""
    optimizer.grad_scale, optimizer.found_inf = None, found
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class DeviceLossScale(LossScale):
    """A dynamic scale in the memory of ``device``, float32 []: losses are multiplied there."""

    def __init__(self, versioned: bool, device: torch.device) -> None:
        self._here = torch.zeros((), device=device)
        self._successes = torch.zeros((), dtype=torch.int32, device=device)
        super().__init__("dynamic", versioned)

    def at(self, version: int) -> torch.Tensor:
        return self._versions.get(version, self._oldest) if self._versioned else self._here

    def update(self, overflowed: bool | torch.Tensor) -> None:
        if not isinstance(overflowed, torch.Tensor):
            overflowed = torch.full_like(self._here, float(overflowed))
        # Private: GradScaler's own, in one launch. The tests run it under each torch that is supported.
        torch._amp_update_scale_(
            *(self._here, self._successes, overflowed, loss.GROWTH, loss.BACKOFF, loss.GROWTH_INTERVAL)
        )
        self._updates += 1
        if self._versioned:
            self._versions[self._updates] = self._here.clone()
            self._versions.pop(self._updates - loss.KEPT, None)

    def resume(self, updates: int) -> None:
        self._updates, self._oldest = updates, self._here.clone()
        self._versions = {updates: self._oldest}

    def state_dict(self) -> dict[str, Any]:
        """Return scale and tracker as numbers; waits for the device."""
        return {"scale": float(self._here), "growth_tracker": int(self._successes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._here.fill_(float(state["scale"]))
        self._successes.fill_(int(state["growth_tracker"]))
        self.resume(0)
