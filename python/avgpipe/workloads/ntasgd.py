"""Non-monotonically triggered averaged SGD (Merity, Keskar, Socher, ICLR 2018, section 3, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class NonMonotonicTrigger:
    """Says when a validation loss has stopped falling.

    A loss triggers when it is worse than the best one that is at least ``window`` losses older. The history
    is ``losses``, so a state is a list of numbers.
    """

    def __init__(self, window: int = 5, losses: Iterable[float] = ()) -> None:
        if window < 0:
            raise ValueError(f"window must not be negative, got {window}")
        self.window = window
        self.losses = list(losses)

    def observe(self, loss: float) -> bool:
        """Add a validation loss; whether it triggers."""
        old = self.losses[: max(0, len(self.losses) - self.window)]
        self.losses.append(loss)
        return bool(old) and loss > min(old)


class NTASGD(torch.optim.SGD):
    """SGD that, once triggered, keeps the running mean of its weights in ``state[p]["ax"]``.

    The mean counts the weights at the trigger and after every later step, ``param_groups[...]["averaged"]``
    in all (0 before the trigger). Training goes on with the plain weights; :meth:`averaged` puts the means in
    their place. torch's ASGD with ``t0`` computes nearly this, but it applies a change of the learning rate
    one step late, which spoils learning rates that follow the length of a segment.

    Losses seen by :meth:`observe` are in ``param_groups[0]``, so ``state_dict`` holds all there is.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, weight_decay: float = 0.0, window: int = 5
    ) -> None:
        if window < 0:
            raise ValueError(f"window must not be negative, got {window}")
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.update(averaged=0, window=window, validation_losses=[])
        self.register_step_post_hook(_average)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not self._optimizer_step_post_hooks:  # a copy comes without its hooks
            self.register_step_post_hook(_average)

    @property
    def triggered(self) -> bool:
        return bool(self.param_groups[0]["averaged"] > 0)

    @torch.no_grad()
    def trigger(self) -> None:
        """Begin to average, with the weights as they are; nothing happens the second time."""
        if self.triggered:
            return
        for group in self.param_groups:
            group["averaged"] = 1
            for p in group["params"]:
                if p.requires_grad:
                    self.state[p]["ax"] = p.detach().clone()

    def observe(self, validation_loss: float) -> bool:
        """Note a validation loss and trigger when it says so; whether it did."""
        group = self.param_groups[0]
        trigger = NonMonotonicTrigger(group["window"], group["validation_losses"])
        due = trigger.observe(validation_loss) and not self.triggered
        group["validation_losses"] = trigger.losses
        if due:
            self.trigger()
        return due

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters hold their means; after, their own values. Before the trigger: no change."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state.get(p, {}).get("ax")
                if mean is not None:
                    own = p.clone()
                    p.copy_(mean)
                    mean.copy_(own)


@torch.no_grad()
def _average(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group["averaged"] == 0:
            continue
        group["averaged"] += 1
        for p in group["params"]:
            mean = optimizer.state.get(p, {}).get("ax")
            if mean is not None:
                mean.lerp_(p, 1 / group["averaged"])
