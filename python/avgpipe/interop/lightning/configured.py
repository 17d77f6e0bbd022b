"""Conversion of the result of a LightningModule's ``configure_optimizers`` to the options of a Pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_FORMS = (
    "an optimizer, a list of optimizers, two lists of optimizers and schedules, or a dict with 'optimizer' and "
    "'lr_scheduler'"
)


class Configured:
    """Optimizers and schedules of stages, made by one function, for a Pipeline that requests one after the other.

    Args:
        configure: Maps a stage's named parameters to the result of ``configure_optimizers`` for them.
    """

    def __init__(self, configure: Callable[[Sequence[tuple[str, torch.Tensor]]], Any]) -> None:
        self._configure = configure
        self._schedules: dict[int, Any] = {}  # by the first parameter of their optimizer

    def optimizer(self, named_params: Sequence[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
        """Return a stage's optimizers."""
        pairs = _pairs(self._configure(named_params))
        own = {id(p) for _, p in named_params}
        for optimizer, schedule in pairs:
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise ValueError(
                    "configure_optimizers gave an optimizer other parameters than its stage's: take them from "
                    "self.parameters() or self.named_parameters(), not from self.model"
                )
            if schedule is not None:
                self._schedules[_first(optimizer)] = _of_steps(schedule)
        return [optimizer for optimizer, _ in pairs]

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the schedule that was made with an optimizer."""
        return self._schedules.pop(_first(optimizer), None) or _Constant()


class _Constant:
    """A schedule that keeps learning rates constant."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _first(optimizer: torch.optim.Optimizer) -> int:
    return id(next(p for group in optimizer.param_groups for p in group["params"]))


def _pairs(found: Any) -> list[tuple[torch.optim.Optimizer, Any]]:
    """Return each optimizer with its schedule or None."""
    if isinstance(found, torch.optim.Optimizer):
        return [(found, None)]
    if isinstance(found, Mapping) and isinstance(found.get("optimizer"), torch.optim.Optimizer):
        return [(found["optimizer"], found.get("lr_scheduler"))]
    if isinstance(found, list | tuple) and found:
        if len(found) == 2 and all(isinstance(part, list | tuple) for part in found):
            optimizers, schedules = found
            if len(schedules) in (0, len(optimizers)):
                return [*zip(optimizers, schedules or [None] * len(optimizers))]
        elif all(isinstance(one, torch.optim.Optimizer | Mapping) for one in found):
            return [pair for one in found for pair in _pairs(one)]
    raise TypeError(f"configure_optimizers must return {_FORMS}, not {type(found).__name__}")


def _of_steps(schedule: Any) -> Any:
    """Return a schedule, which must have a step after every batch."""
    settings = schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}
    interval, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    if interval != "step" or frequency != 1:
        raise ValueError(
            f"a schedule with interval {interval!r} and frequency {frequency} is not possible, as stages step theirs "
            'after every batch: return {"scheduler": schedule, "interval": "step"}'
        )
    return settings["scheduler"]
