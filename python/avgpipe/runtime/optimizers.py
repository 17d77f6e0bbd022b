"""The optimizer of a stage, as the caller's function makes it, and its learning-rate schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from avgpipe.ranks.environment import named as by_name
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
                f"optimizer makes one of no parameters on a stage that has {listed(names)}: a stage may lack a kind. "
                'Give each optimizer a group, [{"params": parameters}], which may be empty'
            ) from error
        if isinstance(made, list | tuple) and not made:
            raise TypeError("optimizer returned no optimizer: a list must have one at least")
        members = [checked_optimizer(one) for one in (made if isinstance(made, list | tuple) else [made])]
        named = dict(zip(names, parameters))
        check_whose(members, named)
        check_groups(groups_of(members, named), of_whole or {})
        if isinstance(made, list | tuple):
            joined: torch.optim.Optimizer = by_name("avgpipe.runtime.several:joined")(members, named)
            return joined
        nonlocal has_warned
        left = [] if has_warned else _left_out(members[0], named)
        has_warned = has_warned or bool(left)
        if left:
            _log.warning(
                "optimizer leaves out %s, which require gradients and so stay unchanged: freeze them by "
                "requires_grad_(False), or give them to it",
                listed(left),
            )
        return members[0]

    return make


def _left_out(made: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters that an optimizer leaves out, if it has nothing but parameters."""
    stepped = {id(p) for group in made.param_groups for p in group["params"]}
    known = {id(p) for p in parameters.values()}
    return [name for name, p in parameters.items() if id(p) not in stepped] if stepped <= known else []


def listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that this one steps in turn."""
    return getattr(optimizer, "members", [optimizer])


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizers with other weights for evaluation: their ``train()`` and ``eval()`` swap them."""

    def has_both(one: torch.optim.Optimizer) -> bool:
        return all(callable(getattr(one, name, None)) for name in ("train", "eval"))

    return [one for one in members_of(optimizer) if has_both(one)]


def schedule_of(function: SchedulerFn, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule of ``optimizer``, whose steps are those of ``inner``."""
    members = members_of(inner)
    if members != [inner]:
        return by_name("avgpipe.runtime.several:Schedules")(function, members)
    return checked_schedule(function(optimizer))


def checked_schedule(schedule: Any) -> Any:
    check_lr_scheduler(schedule)
    return schedule
