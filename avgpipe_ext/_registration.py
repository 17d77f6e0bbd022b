"""What torch needs to know of the operators beside their kernels: fake results and version counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import avgpipe_ext._library  # noqa: F401 (loads the library)

OPERATORS = (
    "elastic_pull_", "elastic_step_", "easgd_step_", "elastic_sgd_", "elastic_adamw_", "elastic_round_",
    "reference_apply_",
)  # fmt: skip


def _fake(name: str, overload: Any) -> Callable[..., Tensor]:
    """Checks shapes and devices and gives the result's shape, dtype and device; writes nothing."""
    types = [str(argument.type) for argument in overload._schema.arguments]
    count = next(i for i, kind in enumerate(types) if "Tensor" not in kind)
    leading = 1 if name == "reference_apply_" else 0  # the argument of which no other one has more tensors

    def fake(*values: Any, check_finite: bool = False, **options: Any) -> Tensor:
        lists = [[v] if isinstance(v, Tensor) else v or [] for v in values[:count]]
        whole = lists[leading]
        for tensors in lists if whole else ():
            for i, tensor in enumerate(tensors):
                shape = whole[i % len(whole)].shape
                if tensor.shape != shape:
                    raise ValueError(
                        f"got shapes {tuple(shape)} and {tuple(tensor.shape)}; pass tensors of one shape"
                    )
                _check_device(whole[0], tensor, "a tensor")
        for label, option in options.items() if whole else ():
            may_differ = label == "step" and isinstance(option, Tensor) and option.device.type == "cpu"
            if isinstance(option, Tensor) and not may_differ:
                _check_device(whole[0], option, label)
        shape, device = () if check_finite else (0,), whole[0].device if whole else torch.device("cpu")
        return torch.empty(shape, dtype=torch.int64, device=device)

    return fake


def _check_device(tensor: Tensor, other: Tensor, name: str) -> None:
    """One meta tensor is enough to call the fake, which would silently do nothing."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {other.device} but another tensor is on {tensor.device}; move all to one device"
        )


def _fake_pack(tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    if not tensors:
        raise ValueError("there are no tensors; pass at least one")
    for t in tensors:
        _check_device(tensors[0], t, "a tensor")
    return tensors[0].new_empty([sum(t.numel() for t in tensors)], dtype=dtype or tensors[0].dtype)


def _fake_pack_out(tensors: Sequence[Tensor], *, out: Tensor) -> None:
    _fake_unpack(out, tensors)


def _fake_unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        _check_device(buffer, t, "a tensor")
    total = sum(t.numel() for t in tensors)
    if buffer.dim() != 1 or buffer.numel() != total:
        raise ValueError(f"buffer has {buffer.numel()} elements, the tensors together {total}")


# Keys of tensors whose memory is not their value: torch would call the operator with copies of them, having
# negated, or conjugated, what is written in place for the time of the call. What tells such a tensor, its name, and
# the way out.
_LAZY = {
    "Negative": (torch.Tensor.is_neg, "the negative bit", "resolve_neg"),
    "Conjugate": (torch.Tensor.is_conj, "the conjugate bit", "resolve_conj"),
    "ZeroTensor": (torch.Tensor._is_zerotensor, "no memory, being zero throughout", "clone"),
}


def _refuse_lazy(name: str, overload: Any, key: str) -> Callable[..., Any]:
    """A kernel for tensors with this key: ValueError, before anything is written."""
    is_lazy, what, way_out = _LAZY[key]
    names = [argument.name for argument in overload._schema.arguments]

    def kernel(*arguments: Any, **options: Any) -> Any:
        for label, value in (*zip(names, arguments), *options.items()):
            is_list = isinstance(value, list | tuple)
            for i, tensor in enumerate(value if is_list else [value]):
                if isinstance(tensor, Tensor) and is_lazy(tensor):
                    place = f"{label}[{i}]" if is_list else label
                    raise ValueError(
                        f"avgpipe::{name}: {place} has {what}: its memory is not its value; pass a .{way_out}()"
                    )
        raise AssertionError(f"{name} was called for {key} without such a tensor")

    return kernel


def _move_versions(overload: Any) -> Callable[..., Any]:
    """A kernel that runs the operator and then moves the version counters of what it wrote.

    Without it, autograd would not notice that a tensor saved for a backward pass has changed.
    """
    arguments = overload._schema.arguments
    written = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        result = overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments, **options)
        for key in written:
            value = options[key] if isinstance(key, str) else arguments[key]
            if value is not None:
                increment_version(value)
        return result

    return kernel


_library = torch.library.Library("avgpipe", "IMPL")  # type: ignore[no-untyped-call]


def _register(name: str, fake: Callable[..., Any] | None = None) -> None:
    operator, _, overload_name = name.partition(".")
    overload = getattr(getattr(torch.ops.avgpipe, operator), overload_name or "default")
    torch.library.register_fake(f"avgpipe::{name}", fake or _fake(operator, overload), lib=_library)
    for key in _LAZY:
        _library.impl(name, _refuse_lazy(operator, overload, key), key)  # type: ignore[no-untyped-call]
    if overload._schema.is_mutable:
        kernel = _move_versions(overload)
        _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


for _name in OPERATORS:
    _register(_name)
    _register(f"{_name}.list")
_register("pack", _fake_pack)
_register("pack.out", _fake_pack_out)
_register("unpack_", _fake_unpack)
