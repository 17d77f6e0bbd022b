"""The optimizer of a stage, as the caller's function makes it, and its learning-rate schedule.

A pipeline has an optimizer for each stage, of copies of the stage's parameters. One device has a single one,
of all parameters, and the caller's function may rely on that: it may choose groups by a parameter's position
in the list, or by identity with its own model's parameters; and a step may depend on all gradients, as by
their norm. So what the function does with all of a model's parameters is compared with each stage's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from avgpipe.device import generators_of
from avgpipe.model.context import generators, set_generators
from avgpipe.ranks.environment import named as by_name
from avgpipe.runtime.options import OptimizerFn, SchedulerFn, with_names
from avgpipe.runtime.requirements import checked_optimizer, checked_schedule

_log = logging.getLogger("avgpipe")
Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
Groups = Mapping[str, Mapping[str, Any]]  # by name of a parameter, the options of its group
_SIDE = 3  # elements of a substitute along each dimension, at most
_STEPS = 2
_TOLERANCE = 1e-2  # of a step: operators that process several tensors at once round differently


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


# ---- an optimizer of all parameters, and one of each stage's ---------------------------------------------------------


def groups_of_whole(function: OptimizerFn, parameters: Mapping[str, torch.Tensor]) -> Groups:
    """Return the groups of one optimizer of all the caller's parameters; empty if the function fails on them.

    ValueError if it has other tensors beside them.
    """
    try:
        with _generators_kept(parameters.values()):
            made = _made(function, list(parameters), list(parameters.values()))
            found = groups_of(made, parameters)
    except Exception:  # of any kind, from the caller's code: each stage raises it in training
        return {}
    check_whose(made, parameters)
    return found


def groups_of(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> Groups:
    """Return the options of each parameter's group that can be compared."""
    names = {id(p): name for name, p in parameters.items()}
    return {
        names[id(p)]: {"optimizer": type(one).__name__} | _plain(group)
        for one in optimizers
        for group in one.param_groups
        for p in group["params"]
        if id(p) in names
    }


def _made(
    function: OptimizerFn, names: Sequence[str], given: Sequence[Any]
) -> Sequence[torch.optim.Optimizer]:
    made: Any = with_names(function, names)(given)
    return made if isinstance(made, list | tuple) else [made]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in group.items()}
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {n: v for n, v in found.items() if isinstance(v, kinds) and n not in ("params", "param_names")}


def check_whose(made: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for an optimizer of other tensors than these: nothing would be trained."""
    known = {id(p) for p in parameters.values()}
    memory = {_address(p) for p in parameters.values()}
    for one in made:
        of_others = [
            p
            for g in one.param_groups
            for p in g["params"]
            if id(p) not in known and _address(p) not in memory
        ]
        if of_others:
            raise ValueError(
                f"optimizer returned a {type(one).__name__} over {len(of_others)} tensors that it was not given, such "
                f"as one of shape {list(of_others[0].shape)}, which a Pipeline would never train: it trains a copy of "
                "the model, so write optimizer=lambda params: "
                f"{type(one).__name__}(params, ...), not over model.parameters()"
            )


def _address(p: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory, None without one; views of a parameter may represent it."""
    if type(p) not in (torch.Tensor, nn.Parameter) or p.layout != torch.strided:
        return None
    return p.untyped_storage().data_ptr() or None


def check_groups(found: Groups, of_whole: Groups) -> None:
    """Raise ValueError for a parameter with other options on its stage than in the whole model."""
    for name, own in found.items():
        expected = of_whole.get(name, own)
        different = [key for key in own if key in expected and own[key] != expected[key]]
        if different:
            here, there = (", ".join(f"{k}={of[k]!r}" for k in different) for of in (own, expected))
            raise ValueError(
                f"optimizer gives {name!r} {here} among the parameters of its stage, and {there} among those of the "
                "whole model. It is called for each stage, with the stage's own copies of its parameters, so neither "
                "a parameter's place in the list nor what it is in the script's model says which one it is. Choose by "
                "its name, as `def optimizer(named_params)` is given pairs (name, parameter), or by its shape. "
                'Audit("off") leaves this out'
            )


def warn_of_steps(
    function: OptimizerFn, stages: Sequence[Sequence[str]], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Warn of an optimizer whose step of a parameter depends on its other parameters.

    It steps small substitutes for the parameters, all together and stage by stage. Torch's own optimizers are
    known not to depend on others, unless they have hooks.

    Args:
        function: of the caller.
        stages: names of each stage's parameters.
        parameters: by name.
    """
    own = [[name for name in names if name in parameters] for names in stages]
    whole = list(dict.fromkeys(name for names in own for name in names))
    kept = {name: parameters[name] for name in whole}
    try:
        with _generators_kept(kept.values()):
            together = _stepped(function, whole, kept)
            apart: dict[str, torch.Tensor] = {}
            for names in own:
                if names:
                    apart |= _stepped(function, names, kept)
    except Exception:  # of any kind, from the caller's code: an optimizer may need more than a few elements
        return
    for name, moved in together.items():
        if not torch.allclose(moved, apart[name], rtol=_TOLERANCE, atol=1e-12, equal_nan=True):
            _log.warning(
                "a step of %r depends on which other parameters its optimizer has, as where it limits a norm over all "
                "of them, draws random numbers, or counts its steps outside: each stage has an optimizer of its own, "
                "so training differs from that with one for all. For a limit of the whole gradient's norm, give "
                "clip_grad_norm",
                name,
            )
            return


def _stepped(
    function: OptimizerFn, names: Sequence[str], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return, by name, the change of each substitute by the steps of one optimizer, float64."""
    numbers = {name: n for n, name in enumerate(parameters)}
    given = [_stand_in(numbers[name], parameters[name]) for name in names]
    before = [p.detach().clone() for p in given]
    for device in {p.device for p in given}:
        for generator in generators_of(device):
            generator.manual_seed(0)
    made = _made(function, names, given)
    if all(map(_is_known, made)):
        return {name: torch.zeros(0) for name in names}
    for step in range(_STEPS):
        for name, p in zip(names, given):  # above the usual limits of clipping
            p.grad = torch.full_like(p, float((1 + step) * (1 + numbers[name] % 3)))
        for one in made:
            one.step()
    return {name: (p.detach() - b).double().cpu() for name, p, b in zip(names, given, before)}


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.") and "step" not in vars(optimizer)
    return is_torchs and not any(hooks)


def _stand_in(number: int, parameter: torch.Tensor) -> nn.Parameter:
    """Return a small substitute for a parameter, the same for the same number."""
    draw = torch.Generator().manual_seed(number)
    shape = [min(size, _SIDE) for size in parameter.shape]
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    return nn.Parameter(torch.randn(shape, generator=draw).to(device, parameter.dtype))


@contextmanager
def _generators_kept(tensors: Any) -> Iterator[None]:
    before = generators(*{t.device for t in tensors if not t.is_meta})
    try:
        yield
    finally:
        set_generators(before)
