"""Which of a replica's tensors is which of the reference's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from avgpipe.elastic.reference import Reference

WAY_OUT = "pass parameters=replica.parameters(), in the order in which the Reference was built"


def replica_tensors(
    inner: torch.optim.Optimizer, reference: Reference, given: Iterable[torch.Tensor] | None
) -> list[torch.Tensor]:
    """The replica's tensors, one for each that ``reference`` averages and in its order.

    They are ``given``, or else what ``inner`` optimizes: all parameters, or the trainable ones. ValueError if
    they do not correspond, as when parameter groups have changed the order.
    """
    own = optimized(inner)
    if given is None:
        tensors = _pick("the optimizer", own, reference)
        _refuse_permuted(tensors, [reference.parameters[i] for i in reference.averaged])
        return tensors
    tensors = list(given)
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"parameters[{i}] must be a tensor, not {type(t).__name__}; {WAY_OUT}")
    for p in own:
        if p.requires_grad and not holds(tensors, p):
            raise ValueError(
                f"the optimizer steps a parameter of shape {tuple(p.shape)} that is not among parameters, "
                f"so it would not be averaged; {WAY_OUT}"
            )
    return _pick("parameters", tensors, reference)


def optimized(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    return [p for group in inner.param_groups for p in group["params"]]


def holds(tensors: Sequence[torch.Tensor], p: torch.Tensor) -> bool:
    """Whether ``p`` is one of ``tensors`` or shares its memory with one (a view of a flat buffer)."""
    if any(p is t for t in tensors):
        return True
    if p.layout != torch.strided:
        return False
    memory = p.untyped_storage().data_ptr()
    return memory != 0 and any(
        t.layout == torch.strided and t.untyped_storage().data_ptr() == memory for t in tensors
    )


def _pick(whose: str, tensors: list[torch.Tensor], reference: Reference) -> list[torch.Tensor]:
    everything, averaged = reference.parameters, reference.averaged
    if len(tensors) == len(everything):
        tensors = [tensors[i] for i in averaged]
    elif len(tensors) != len(averaged):
        verb = "has" if whose == "the optimizer" else "are"
        raise ValueError(
            f"{whose} {verb} {len(tensors)} tensors, the reference has {len(everything)} "
            f"({len(averaged)} of them trainable); {WAY_OUT}"
        )
    for t, i in zip(tensors, averaged):
        if t.shape != everything[i].shape:
            raise ValueError(
                f"{whose}: a tensor of shape {tuple(t.shape)} stands where the reference has parameter "
                f"{i} of shape {tuple(everything[i].shape)} (groups may have changed the order); {WAY_OUT}"
            )
    return tensors


@torch.no_grad()
def _refuse_permuted(tensors: list[torch.Tensor], zs: list[torch.Tensor]) -> None:
    """Shapes agree.

    But weights that equal z, only elsewhere, were put into another order by parameter groups.
    """
    astray = [j for j, (t, z) in enumerate(zip(tensors, zs)) if not _equal(t, z)]
    # lazily: with other weights altogether, the first one without a match ends the search
    if astray and all(_home(j, astray, tensors, zs) is not None for j in astray):
        j = astray[0]
        raise ValueError(
            f"the optimizer's groups list the parameters in another order than the reference: its parameter "
            f"{j} has the values of the reference's {_home(j, astray, tensors, zs)}; {WAY_OUT}"
        )


def _home(j: int, astray: list[int], tensors: list[torch.Tensor], zs: list[torch.Tensor]) -> int | None:
    return next((k for k in astray if k != j and _equal(tensors[j], zs[k])), None)


def _equal(t: torch.Tensor, z: torch.Tensor) -> bool:
    if t.shape != z.shape:
        return False
    t = t.detach().to_dense() if t.is_sparse else t.detach()
    return torch.equal(t.to(device=z.device, dtype=z.dtype), z)
