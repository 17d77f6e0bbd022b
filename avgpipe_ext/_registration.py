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
    "reference_apply_": (2, (0, 1)),
}


def _fake(tensor_arguments: int) -> Callable[..., Tensor]:
    """Checks shapes and gives the result's shape, dtype and device; writes nothing."""

    def fake(*arguments: Any, check_finite: bool = False) -> Tensor:
        lists: list[Sequence[Tensor]] = [
            [argument] if isinstance(argument, Tensor) else argument
            for argument in arguments[:tensor_arguments]
        ]
        first = lists[0]
        for other in lists[1:]:
            if len(other) != len(first):
                raise ValueError(
                    f"got lists of {len(first)} and {len(other)} tensors; pass lists of one length"
                )
            for a, b in zip(first, other):
                if a.shape != b.shape:
                    raise ValueError(
                        f"got shapes {tuple(a.shape)} and {tuple(b.shape)}; pass tensors of one shape"
                    )
        shape = () if check_finite else (0,)
        device = first[0].device if first else torch.device("cpu")
        return torch.empty(shape, dtype=torch.int64, device=device)

    return fake


def _move_versions(overload: Any, written: tuple[int, ...]) -> Callable[..., Tensor]:
    """A kernel that runs the operator and then moves the version counters of what it wrote.

    Without it, autograd would not notice that a tensor saved for a backward pass has changed.
    """

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Tensor:
        result: Tensor = overload.redispatch(
            keys & torch._C._after_ADInplaceOrView_keyset, *arguments, **options
        )
        for index in written:
            increment_version(arguments[index])
        return result

    return kernel


_library = torch.library.Library("avgpipe", "IMPL")  # type: ignore[no-untyped-call]


def _register() -> None:
    for name, (tensor_arguments, written) in WRITTEN.items():
        packet = getattr(torch.ops.avgpipe, name)
        for suffix, overload in (("", packet.default), (".list", packet.list)):
            torch.library.register_fake(f"avgpipe::{name}{suffix}", _fake(tensor_arguments), lib=_library)
            _library.impl(  # type: ignore[no-untyped-call]
                name + suffix, _move_versions(overload, written), "ADInplaceOrView", with_keyset=True
            )


_register()
