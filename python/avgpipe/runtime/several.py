"""Several optimizers of a stage as one, and their learning-rate schedules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from avgpipe.runtime.optimizers import listed, members_of
from avgpipe.runtime.options import SchedulerFn
from avgpipe.runtime.requirements import checked_schedule


def joined(members: Sequence[torch.optim.Optimizer], parameters: dict[str, torch.Tensor]) -> Optimizers:
    """Join optimizers, of which each parameter must have exactly one; ValueError otherwise."""
    counts = Counter(id(p) for one in members for group in one.param_groups for p in group["params"])
    for found, what in (
        ([name for name, p in parameters.items() if not counts[id(p)]], "none has"),
        ([name for name, p in parameters.items() if counts[id(p)] > 1], "several have"),
    ):
        if found:
            raise ValueError(
                f"of the {len(members)} optimizers, {what} {listed(found)}: put every trainable parameter into exactly "
                "one, and freeze parameters that must not change"
            )
    return Optimizers(members)


class Optimizers(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, stepped in turn.

    Its groups are all groups of its members, in order, and are so numbered in ``state_dict``. All share one
    ``state``.
    """

    def __init__(self, members: Iterable[torch.optim.Optimizer]) -> None:
        self.members = list(members)
        self.defaults = {}
        self._share_state()
        super().__setstate__({})  # the base class's __init__ would build its own groups and state

    def _share_state(self) -> None:
        whole: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for member in self.members:
            whole.update(member.state)
        self.state = whole

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        return self.members[0].state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        for member in self.members:
            member.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read-only: the members' own
        return [group for member in self.members for group in member.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all; gradients must exist."""
        for member in self.members:
            member.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TypeError("several optimizers take no group together: add it to one of .members")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every member its part; ValueError if the number of groups differs."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups and these {len(self.members)} optimizers "
                f"{len(self.param_groups)}: make them like those that were saved"
            )
        rest = iter(groups)
        for member in self.members:
            own = [next(rest) for _ in member.param_groups]
            numbers = set(chain.from_iterable(group["params"] for group in own))
            member.load_state_dict(
                {"state": {n: value for n, value in state.items() if n in numbers}, "param_groups": own}
            )
        self._share_state()

    def __repr__(self) -> str:
        return f"Optimizers({self.members!r})"


class Schedules:
    """The schedules of several optimizers' learning rates, stepped together."""

    def __init__(self, function: SchedulerFn, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers: Sequence[Any] = optimizers
        self._schedules = [checked_schedule(function(optimizer)) for optimizer in optimizers]

    def step(self) -> None:
        for optimizer, schedule in zip(self._optimizers, self._schedules):
            # Prevents torch's warning of schedules before steps: the reference's optimizer may have made the
            # step.
            optimizer._opt_called = True
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [schedule.state_dict() for schedule in self._schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["schedules"]) != len(self._schedules):
            raise ValueError(
                f"the state is of {len(state['schedules'])} schedules, and there are {len(self._schedules)}"
            )
        for schedule, of_one in zip(self._schedules, state["schedules"]):
            schedule.load_state_dict(of_one)


def rescheduled(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a stage's schedule for another stage, whose ``optimizer`` has different groups.

    Its rates are those of these groups, which a schedule stored in them when it was made.
    """
    if "schedules" in state:
        pairs = zip(state["schedules"], members_of(optimizer))
        return {"schedules": [rescheduled(of_one, member) for of_one, member in pairs]}
    groups = optimizer.param_groups
    rates = {
        "base_lrs": [group.get("initial_lr", group["lr"]) for group in groups],
        "_last_lr": [group["lr"] for group in groups],
    }
    fitting = {name: rates.get(name, value) for name, value in state.items()}
    if "_schedulers" in state:  # of a SequentialLR or ChainedScheduler
        fitting["_schedulers"] = [rescheduled(of_one, optimizer) for of_one in state["_schedulers"]]
    return fitting
