"""Arrays of other libraries (CuPy, NumPy, JAX) as tensors that share their memory, by DLPack."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_CUDA = 2  # a type of device of DLPack


def is_array(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "__dlpack__")


def shared(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], error: TypeError
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with tensors in the place of arrays, alone or in lists.

    Raises:
        TypeError: ``error``, if there is no array.
        ValueError: An array cannot be shared: it is read-only, or of a dtype that DLPack does not have.
    """
    given = [*args, *options.values()]
    if not any(is_array(each) for value in given for each in (value if _is_list(value) else [value])):
        raise error
    call = inspect.signature(function).bind(*args, **options)
    for label, value in call.arguments.items():
        if _is_list(value):
            call.arguments[label] = [
                _tensor(item, f"{function.__name__}: {label}[{i}]") for i, item in enumerate(value)
            ]
        else:
            call.arguments[label] = _tensor(value, f"{function.__name__}: {label}")
    return call.args, call.kwargs


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _tensor(value: Any, place: str) -> Any:
    """Return an array as a tensor, after what its library has enqueued, and anything else as it is."""
    if not is_array(value):
        return value
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):
        # torch.from_dlpack would end the process.
        raise ValueError(f"avgpipe::{place} has negative strides; pass a copy")
    device, index = value.__dlpack_device__()
    options = {}
    if device == _CUDA:
        options["stream"] = torch.cuda.current_stream(index).cuda_stream or 1  # the default stream
    try:
        # Not torch.from_dlpack(value): it accepts read-only arrays, and would write to them. The older version of
        # DLPack, without an option, refuses them.
        return from_dlpack(value.__dlpack__(**options))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"avgpipe::{place}, of type {type(value).__name__}, cannot be shared ({error}); pass a writable array of "
            "float32, float64, float16 or bfloat16"
        ) from None
