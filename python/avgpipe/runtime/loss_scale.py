"""The scale of float16 losses, on the host and in a device's memory."""

from __future__ import annotations

from typing import Any

import torch

# As in torch.amp.GradScaler.
INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
KEPT = 256  # versions of the weights, more than are ever in flight


class LossScale:
    """Scales float16 losses, by the rule and defaults of torch.amp.GradScaler, to keep small gradients.

    The last stage multiplies the loss; all stages divide their gradients again before anything reads them,
    and all skip an update if a gradient on any of them overflowed. Each pipeline has its own scale.

    Args:
        scale: one that never changes, or "dynamic".
        versioned: whether batches run on weights that are not the newest. A batch's scale is then the one at
            the time its weights were made; otherwise it would depend on timing.
    """

    _scale: float
    _first: float  # for weights older than this run
    _tracker: int
    _updates: int
    _scales: dict[int, float]  # by the number of updates that the weights include

    def __init__(self, scale: float | str, versioned: bool) -> None:
        self._fixed = None if scale == "dynamic" else float(scale)
        self._versioned = versioned
        self.load_state_dict({"scale": INITIAL, "growth_tracker": 0})

    def at(self, version: int) -> float | torch.Tensor:
        """Return the scale for a batch that runs on this version of the weights, counted in updates."""
        return self._scales.get(version, self._first) if self._versioned else self._scale

    def update(self, overflowed: bool | torch.Tensor) -> None:
        """Adapt the scale after a batch. ``overflowed``: whether its gradient on any stage was not finite."""
        if self._fixed is None:
            self._tracker = 0 if overflowed else self._tracker + 1
            if overflowed:
                self._scale *= BACKOFF
            elif self._tracker == GROWTH_INTERVAL:
                self._scale, self._tracker = self._scale * GROWTH, 0
        self._updates += 1
        self._scales[self._updates] = self._scale
        self._scales.pop(self._updates - KEPT, None)

    def resume(self, updates: int) -> None:
        """Continue with weights that were replaced by those after ``updates`` updates."""
        self._updates, self._first = updates, self._scale
        self._scales = {updates: self._scale}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "growth_tracker": self._tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = float(state["scale"]) if self._fixed is None else self._fixed
        self._tracker = int(state["growth_tracker"])
        self.resume(0)


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
        torch._amp_update_scale_(*(self._here, self._successes, overflowed, GROWTH, BACKOFF, GROWTH_INTERVAL))
        self._updates += 1
        if self._versioned:
            self._versions[self._updates] = self._here.clone()
            self._versions.pop(self._updates - KEPT, None)

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
