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
# Of the leading tensor arguments, by position, which may be fewer because replicas share them, and which may be any
# multiple of the others: an optimizer's states.
_SHARED = {"elastic_round_": 3, "reference_apply_": 0}
_STATES = {"elastic_sgd_": 2, "elastic_round_": 2}


def _listed(argument: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return [] if argument is None else [argument] if isinstance(argument, Tensor) else argument


def _fake(name: str, overload: Any) -> Callable[..., Tensor]:
    """Checks lengths, shapes and devices and gives the result's shape, dtype and device; writes nothing."""
    shared, states = _SHARED.get(name), _STATES.get(name)
    types = [str(argument.type) for argument in overload._schema.arguments]
    count = next(i for i, kind in enumerate(types) if "Tensor" not in kind)

    def fake(*values: Any, check_finite: bool = False, **options: Any) -> Tensor:
        lists = [_listed(value) for value in values[:count]]
        whole = next(tensors for i, tensors in enumerate(lists) if i != shared)
        for i, tensors in enumerate(lists):
            fits = len(tensors) == len(whole)
            if i == shared:
                fits = fits or (len(tensors) > 0 and len(whole) % len(tensors) == 0)
            elif i == states:
                fits = len(whole) == 0 or len(tensors) % len(whole) == 0
            if not fits:
                raise ValueError(
                    f"got lists of {len(whole)} and {len(tensors)} tensors; pass lists of one length"
                )
            _check_alike(whole, tensors)
        if whole:
            for name in ("grad_scale", "found_inf", "step"):
                option = options.get(name)
                may_differ = name == "step" and isinstance(option, Tensor) and option.device.type == "cpu"
                if isinstance(option, Tensor) and not may_differ:
                    _check_device(whole[0], option, name)
        shape = () if check_finite else (0,)
        device = whole[0].device if whole else torch.device("cpu")
        return torch.empty(shape, dtype=torch.int64, device=device)

    return fake


def _check_alike(whole: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        other = whole[i % len(whole)]
        if tensor.shape != other.shape:
            raise ValueError(
                f"got shapes {tuple(other.shape)} and {tuple(tensor.shape)}; pass tensors of one shape"
            )
        _check_device(whole[0], tensor, "a tensor")


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


def _register(name: str, overload: Any, fake: Callable[..., Any]) -> None:
    torch.library.register_fake(f"avgpipe::{name}", fake, lib=_library)
    for key in _LAZY:
        refusal = _refuse_lazy(name.partition(".")[0], overload, key)
        _library.impl(name, refusal, key)  # type: ignore[no-untyped-call]
    if overload._schema.is_mutable:
        kernel = _move_versions(overload)
        _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


def _register_all() -> None:
    for name in OPERATORS:
        packet = getattr(torch.ops.avgpipe, name)
        _register(name, packet.default, _fake(name, packet.default))
        _register(f"{name}.list", packet.list, _fake(name, packet.list))
    _register("pack", torch.ops.avgpipe.pack.default, _fake_pack)
    _register("pack.out", torch.ops.avgpipe.pack.out, _fake_pack_out)
    _register("unpack_", torch.ops.avgpipe.unpack_.default, _fake_unpack)


_register_all()
