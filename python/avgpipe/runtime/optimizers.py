"""The optimizer of a stage: what the caller's function returns, with several optimizers joined into one."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from avgpipe.runtime.options import OptimizerFn, SchedulerFn, with_names
from avgpipe.runtime.requirements import check_lr_scheduler, checked_optimizer
from avgpipe.runtime.together import Groups, check_groups, check_whose, groups_of

_log = logging.getLogger("avgpipe")
Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


def maker_of(function: OptimizerFn, names: Sequence[str], of_whole: Groups | None = None) -> Maker:
    """Return a function that makes the optimizer of parameters with these names; several become one.

    ``of_whole``: the options that the parameters must have; by default any.
    """
    function, has_warned = with_names(function, names), False

    def make(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        try:
            made = function(parameters)
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise ValueError(
                f"optimizer makes one of no parameters on a stage that has {_listed(names)}: a stage may lack a kind. "
                'Give each optimizer a group, [{"params": parameters}], which may be empty'
            ) from error
        if isinstance(made, list | tuple) and not made:
            raise TypeError("optimizer returned no optimizer: a list must have one at least")
        members = [checked_optimizer(one) for one in (made if isinstance(made, list | tuple) else [made])]
        named = dict(zip(names, parameters))
        check_whose(members, named)
        check_groups(groups_of(members, named), of_whole or {})
        if isinstance(made, list | tuple):
            _check_shared_out(members, named)
            return Optimizers(members)
        nonlocal has_warned
        left = [] if has_warned else _left_out(members[0], named)
        has_warned = has_warned or bool(left)
        if left:
            _log.warning(
                "optimizer leaves out %s, which require gradients and so stay unchanged: freeze them by "
                "requires_grad_(False), or give them to it",
                _listed(left),
            )
        return members[0]

    return make


def _left_out(made: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that an optimizer leaves out, if it has nothing but parameters."""
    stepped = {id(p) for group in made.param_groups for p in group["params"]}
    known = {id(p) for p in parameters.values()}
    return [name for name, p in parameters.items() if id(p) not in stepped] if stepped <= known else []


def _check_shared_out(made: Sequence[torch.optim.Optimizer], parameters: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless each parameter is in exactly one optimizer."""
    counts = Counter(id(p) for one in made for group in one.param_groups for p in group["params"])
    for found, what in (
        ([name for name, p in parameters.items() if not counts[id(p)]], "none has"),
        ([name for name, p in parameters.items() if counts[id(p)] > 1], "several have"),
    ):
        if found:
            raise ValueError(
                f"of the {len(made)} optimizers, {what} {_listed(found)}: put every trainable parameter into exactly "
                "one, and freeze parameters that must not change"
            )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


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


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that this one steps in turn."""
    return optimizer.members if isinstance(optimizer, Optimizers) else [optimizer]


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizers with other weights for evaluation: their ``train()`` and ``eval()`` swap them."""

    def has_both(one: torch.optim.Optimizer) -> bool:
        return all(callable(getattr(one, name, None)) for name in ("train", "eval"))

    return [one for one in members_of(optimizer) if has_both(one)]


class Schedules:
    """The schedules of several optimizers' learning rates, stepped together."""

    def __init__(self, function: SchedulerFn, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers: Sequence[Any] = optimizers
        self._schedules = [_checked(function(optimizer)) for optimizer in optimizers]

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


def schedule_of(function: SchedulerFn, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule of ``optimizer``, whose steps are those of ``inner``."""
    if isinstance(inner, Optimizers):
        return Schedules(function, inner.members)
    return _checked(function(optimizer))


def _checked(schedule: Any) -> Any:
    check_lr_scheduler(schedule)
    return schedule
