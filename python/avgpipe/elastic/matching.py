"""Decides which tensors are averaged, and matches a replica's tensors with the reference's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # that the operators support
WAY_OUT = "pass parameters=replica.parameters(), in the order in which the Reference was built"


def list_tensors(name: str, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, all different; TypeError or ValueError if they are something else."""
    if isinstance(values, torch.Tensor):
        raise TypeError(
            f"{name} must be a list of tensors, such as model.parameters(), not one tensor; pass [tensor]"
        )
    tensors = list(values)
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}[{i}] must be a tensor, not {type(t).__name__}; pass model.parameters()")
    if not tensors:
        raise ValueError(f"{name} is empty; pass model.parameters() (a generator gives its values only once)")
    if len({id(t) for t in tensors}) < len(tensors):
        twice = next(i for i, t in enumerate(tensors) if any(t is u for u in tensors[:i]))
        raise ValueError(f"{name}[{twice}] is there twice; model.parameters() gives tied weights once")
    return tensors


def averaged(parameters: list[torch.Tensor]) -> list[int]:
    """Return the indices of tensors that are averaged: all but frozen ``nn.Parameter``s and integers.

    A plain tensor does: it is a flat buffer whose views are the parameters, or a weight of functional code.
    """
    found = []
    for i, p in enumerate(parameters):
        if p.layout != torch.strided:
            raise ValueError(f"parameters[{i}] has layout {p.layout}; only gradients may be sparse")
        frozen = isinstance(p, nn.Parameter) and not p.requires_grad
        if frozen or not (p.is_floating_point() or p.is_complex()):
            continue
        if p.dtype.to_real() not in DTYPES:
            raise TypeError(
                f"parameters[{i}] has dtype {p.dtype}; cast it to float32, float64, bfloat16 or float16"
            )
        found.append(i)
    return found


def check_shapes(
    name: str,
    values: Sequence[torch.Tensor],
    mine: Sequence[torch.Tensor],
    hint: str = "it is of another model",
) -> None:
    """Raise ValueError unless ``values`` have the number and shapes of the reference's."""
    if len(values) != len(mine):
        raise ValueError(f"{name} are {len(values)} tensors, the reference has {len(mine)}: {hint}")
    for i, (value, z) in enumerate(zip(values, mine)):
        if value.shape != z.shape or value.layout != z.layout:
            raise ValueError(
                f"{name}[{i}] has shape {tuple(value.shape)} and layout {value.layout}, the reference's "
                f"{tuple(z.shape)} and {z.layout}: {hint}"
            )


def replica_tensors(
    inner: torch.optim.Optimizer,
    everything: Sequence[torch.Tensor],
    averaged: Sequence[int],
    given: Iterable[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Return the replica's tensors, one for each ``averaged`` one of ``everything``, the reference's.

    They are ``given``, or else those that ``inner`` optimizes: all parameters, or the trainable ones.
    ValueError if they do not correspond, for example because parameter groups have changed the order.
    """
    own = optimized(inner)
    tensors = own if given is None else list_tensors("parameters", given)
    for p in own:
        if p.requires_grad and not holds(tensors, p):
            raise ValueError(
                f"the optimizer steps a parameter of shape {tuple(p.shape)} that is not among parameters, "
                f"so it would not be averaged; {WAY_OUT}"
            )
    if len(tensors) == len(everything):
        tensors = [tensors[i] for i in averaged]
    mine = [everything[i] for i in averaged]
    name = "the optimizer's parameters" if given is None else "parameters"
    check_shapes(name, tensors, mine, f"groups may have changed the order; {WAY_OUT}")
    if given is None:
        _refuse_permuted(tensors, mine)
    return tensors


def optimized(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [p for group in inner.param_groups for p in group["params"]]


def holds(tensors: Sequence[torch.Tensor], p: torch.Tensor) -> bool:
    """Whether ``p`` is one of ``tensors`` or shares its memory with one (a view of a flat buffer)."""
    if any(p is t for t in tensors):
        return True
    memory = p.untyped_storage().data_ptr()
    return memory != 0 and any(t.untyped_storage().data_ptr() == memory for t in tensors)


def starting_alike(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``tensors`` whose memory begins at the same address as one of ``others``."""
    places = {t.data_ptr() for t in others if t.numel()} - {0}
    return [t for t in tensors if t.numel() and t.data_ptr() in places]


@torch.no_grad()
def _refuse_permuted(tensors: list[torch.Tensor], zs: list[torch.Tensor]) -> None:
    """Refuse tensors that fit in shape, but have z's values in another order, as parameter groups cause."""
    astray = [j for j, (t, z) in enumerate(zip(tensors, zs)) if not _equal(t, z)]
    # lazily: if all weights differ, the first one without a match ends the search
    if astray and all(_home(j, astray, tensors, zs) is not None for j in astray):
        j = astray[0]
        raise ValueError(
            f"the optimizer's groups list the parameters in another order than the reference: its parameter "
            f"{j} has the values of the reference's {_home(j, astray, tensors, zs)}; {WAY_OUT}"
        )


def _home(j: int, astray: list[int], tensors: list[torch.Tensor], zs: list[torch.Tensor]) -> int | None:
    return next((k for k in astray if k != j and _equal(tensors[j], zs[k])), None)


def _equal(t: torch.Tensor, z: torch.Tensor) -> bool:
    return t.shape == z.shape and torch.equal(t.to(device=z.device, dtype=z.dtype), z)
