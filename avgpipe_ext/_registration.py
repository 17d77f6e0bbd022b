"""What torch needs to know of the operators beside their kernels: fake results and version counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import avgpipe_ext._library  # noqa: F401 (loads the library)

# Number of leading tensor arguments, and which of them are written.
WRITTEN = {
    "elastic_pull_": (2, (0,)),
    "elastic_step_": (4, (0, 3)),
    "easgd_step_": (3, (0, 2)),
    "elastic_sgd_": (5, (0, 2, 4)),
    "elastic_adamw_": (6, (0, 2, 3, 5)),
    "elastic_round_": (4, (0, 2, 3)),
    "reference_apply_": (2, (0, 1)),
}


def _listed(argument: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return [] if argument is None else [argument] if isinstance(argument, Tensor) else argument


def _fake(tensor_arguments: int) -> Callable[..., Tensor]:
    """Checks shapes and gives the result's shape, dtype and device; writes nothing."""

    def fake(*arguments: Any, check_finite: bool = False, **options: Any) -> Tensor:
        lists = [_listed(argument) for argument in arguments[:tensor_arguments]]
        first = min((tensors for tensors in lists if tensors), key=len, default=[])
        for other in lists:
            if first and len(other) % len(first):
                raise ValueError(
                    f"got lists of {len(first)} and {len(other)} tensors; pass lists of one length"
                )
            for i, b in enumerate(other):
                a = first[i % len(first)]
                if a.shape != b.shape:
                    raise ValueError(
                        f"got shapes {tuple(a.shape)} and {tuple(b.shape)}; pass tensors of one shape"
                    )
        shape = () if check_finite else (0,)
        device = first[0].device if first else torch.device("cpu")
        return torch.empty(shape, dtype=torch.int64, device=device)

    return fake


def _fake_pack(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    if not tensors:
        raise ValueError("there are no tensors; pass at least one")
    return tensors[0].new_empty([sum(t.numel() for t in tensors)], dtype=dtype or tensors[0].dtype)


def _fake_unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    total = sum(t.numel() for t in tensors)
    if buffer.dim() != 1 or buffer.numel() != total:
        raise ValueError(f"buffer has {buffer.numel()} elements, the tensors together {total}")


def _move_versions(overload: Any, written: tuple[int, ...]) -> Callable[..., Any]:
    """A kernel that runs the operator and then moves the version counters of what it wrote.

    Without it, autograd would not notice that a tensor saved for a backward pass has changed.
    """

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        result = overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments, **options)
        for index in written:
            if arguments[index] is not None:
                increment_version(arguments[index])
        return result

    return kernel


_library = torch.library.Library("avgpipe", "IMPL")  # type: ignore[no-untyped-call]


def _register(name: str, overload: Any, fake: Callable[..., Any], written: tuple[int, ...]) -> None:
    torch.library.register_fake(f"avgpipe::{name}", fake, lib=_library)
    if written:
        _library.impl(  # type: ignore[no-untyped-call]
            name, _move_versions(overload, written), "ADInplaceOrView", with_keyset=True
        )


def _register_all() -> None:
    for name, (tensor_arguments, written) in WRITTEN.items():
        packet = getattr(torch.ops.avgpipe, name)
        _register(name, packet.default, _fake(tensor_arguments), written)
        _register(f"{name}.list", packet.list, _fake(tensor_arguments), written)
    _register("pack", torch.ops.avgpipe.pack.default, _fake_pack, ())
    _register("unpack_", torch.ops.avgpipe.unpack_.default, _fake_unpack, (1,))


_register_all()
