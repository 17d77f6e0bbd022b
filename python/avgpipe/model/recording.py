"""The recording of a model's forward as a graph: keeps the caller's model unchanged, and detects lost behaviour.

A recording runs the model's own code once. A graph would not repeat effects other than computing: a random
choice is the same in every batch, a counter stays constant, a random number is a constant. And a custom
``autograd.Function`` would lose its own backward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._functorch import utils as functorch
from torch.utils import _pytree as pytree

from avgpipe.model.outside import UNKNOWN, plain


class Lost(ValueError):
    """A forward has an effect that a graph of it would lose; the message says what, and where."""


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Let forwards inside write to buffers; afterwards the buffers have their former values."""
    kept = [
        (module, name, t, t.detach().clone()) for module in model.modules() for name, t in _buffers_of(module)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, t, value in kept:
                if not t.is_meta:
                    t.copy_(value)
                module._buffers[name] = t


def _buffers_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, t) for name, t in module._buffers.items() if t is not None]


# ---- state of modules ------------------------------------------------------------------------------------------------

_OWN = ("_parameters", "_buffers", "_modules", "training")


class Knowledge:
    """The attributes of modules besides tensors, and the number of writes to each tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = self._known()
        self._tensors = [
            (f"{name}.{key}" if name else key, module, key, value, value._version)
            for name, module in model.named_modules()
            for key, value in (*module._buffers.items(), *vars(module).items())
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def _known(self) -> dict[str, Any]:
        return {
            f"{name}.{key}" if name else key: plain(value)
            for name, module in self._model.named_modules()
            for key, value in vars(module).items()
            if key not in _OWN
        }

    def changed(self) -> str | None:
        """Name the first attribute or tensor that has changed; None if there is none.

        Activations that a forward stores in an attribute, for example for logging, do not count: the graph
        never reads them.
        """
        for name, module, key, tensor, version in self._tensors:
            if tensor._version != version or (key in module._buffers and module._buffers[key] is not tensor):
                return name
        for name, value in self._known().items():
            before = self._values.get(name, UNKNOWN)
            if value is not UNKNOWN and before is not UNKNOWN and value != before:
                return name
        return None


# ---- custom functions ------------------------------------------------------------------------------------------------

Instead = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def functions_called(by: Instead, is_recorded: Callable[[Any], bool]) -> Iterator[None]:
    """Replace ``function.apply`` by ``by(function, args, kwargs)`` inside, for recorded values.

    An alias of ``apply`` that was made before cannot be replaced, and is refused by Lost.
    """
    function: Any = torch.autograd.Function
    # apply calls the latter, and so does an alias of apply.
    own, unwrap = vars(function)["apply"], functorch.unwrap_dead_wrappers

    def has_recorded(args: Any) -> bool:
        return any(map(is_recorded, pytree.tree_leaves(args)))

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if has_recorded((args, kwargs)):
            return by(cls, args, kwargs)
        return own.__get__(None, cls)(*args, **kwargs)

    def unwrap_or_refuse(args: Any) -> Any:
        if has_recorded(args):
            cls = sys._getframe(1).f_locals.get("cls", function)
            raise Lost(
                f"{cls.__name__}, an autograd.Function, is called by another name than {cls.__name__}.apply, so that "
                f"its backward would be lost: write {cls.__name__}.apply(...) where it is called"
            )
        return unwrap(args)

    function.apply, functorch.unwrap_dead_wrappers = classmethod(apply), unwrap_or_refuse
    try:
        yield
    finally:
        function.apply, functorch.unwrap_dead_wrappers = own, unwrap


@lru_cache(maxsize=1024)
def applying(function: Any) -> Callable[..., Any]:
    """Return a function that applies an ``autograd.Function``, for a graph to call."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = re.sub(r"\W", "_", f"apply_{function.__qualname__}")
    apply.function = function  # type: ignore[attr-defined]
    return apply
