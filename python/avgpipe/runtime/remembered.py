"""What code of layers and of the loss function reads beside its arguments: the values of which a graph keeps the first.

Values are numbers, strings, small arrays of numpy and the identities of tensors: a graph reads a tensor's memory each
time, so its elements may change. They are found in the attributes of modules, in variables that code names, and in what
these refer to: collections, random generators of the host, and objects of classes that are not of the standard library.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from avgpipe.model.context import Carry
from avgpipe.model.outside import UNKNOWN, variables_of

State = dict[str, Any]
"""Values by where they are."""

_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device
_OPAQUE = type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Carry
_OF_TORCH = frozenset(vars(nn.Module()))  # what each module keeps for itself
_LIBRARIES = sys.stdlib_module_names | {"avgpipe"}  # whose objects keep what is theirs
_DEPTH, _ITEMS = 4, 1000  # of objects in each other, and of a collection that is looked through


class Remembered:
    """Finds the values.

    Args:
        modules: whose forwards run, by name.
        called: further code, such as a loss function, by name.
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], called: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._modules, self._called = list(modules), called
        variables = variables_of([*(m for _, m in self._modules), *called.values()])
        names = Counter[str]()
        self._variables: dict[str, Callable[[], Any]] = {}
        for name, read in variables.values():
            names[name] += 1
            self._variables[name if names[name] == 1 else f"{name} ({names[name]})"] = read

    def outside(self) -> State:
        """Return what the caller may change at any time: variables, and what the further code refers to."""
        found, seen = State(), set[Any]()
        for name, read in self._variables.items():
            found.update(_reached(name, read(), seen))
        for name, one in self._called.items():
            while isinstance(one, partial):
                for n, given in enumerate((*one.args, one.keywords)):
                    found.update(_reached(f"{name} ({n})", given, seen))
                one = one.func
            found.update(_reached(name, one, seen))
        return found

    def all(self) -> State:
        """Return this and what the modules keep, which changes only while they run."""
        found, seen = self.outside(), set[Any]()
        for name, module in self._modules:
            found.update(_inside(name, module, seen, 0))
        return found


def first_changed(now: State, before: State) -> str | None:
    """Name the first value that is not as it was; None if all are."""
    return next((n for n, value in now.items() if not _is_same(value, before.get(n, UNKNOWN))), None)


def _is_same(value: Any, before: Any) -> bool:
    has_tensor = isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor)
    return value is before or (not has_tensor and bool(value == before))


def _reached(name: str, value: Any, seen: set[Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values that one refers to, each object once."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is None:  # else it is of a forward that has been
            yield name, value
    elif isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, _OPAQUE):
        if not depth:  # a variable, which may get another one
            yield name, value
    elif id(value) in seen or depth > _DEPTH:
        return
    elif isinstance(value, nn.Module):
        for place, module in value.named_modules(seen, name):
            yield from _inside(place, module, seen, depth)
    else:
        seen.add(id(value))
        yield from _inside(name, value, seen, depth)


def _inside(name: str, value: Any, seen: set[Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values in a collection, an object, or a module without those inside of it; the state of a generator."""
    library, _, part_of = type(value).__module__.partition(".")
    if isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, torch.Generator):
        yield name, value.get_state().tolist() if value.device.type == "cpu" else value
    elif library == "numpy" and part_of.startswith("random"):
        yield name, repr(getattr(value, "_bit_generator", value).state)
    elif library == "numpy":
        if hasattr(value, "tobytes") and value.size <= _ITEMS:
            yield name, (value.dtype.str, value.shape, value.tobytes())
    elif isinstance(value, set | frozenset):
        if len(value) <= _ITEMS:
            yield name, frozenset(value)
    elif isinstance(value, dict | list | tuple | deque):
        if len(value) <= _ITEMS:
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _reached(f"{name}[{key!r}]", part, seen, depth + 1)
    elif isinstance(value, SimpleNamespace | nn.Module) or library not in _LIBRARIES:
        for key, part in getattr(value, "__dict__", {}).items():
            if not isinstance(value, nn.Module) or key not in _OF_TORCH:
                yield from _reached(f"{name}.{key}", part, seen, depth + 1)
        if isinstance(value, nn.Module):
            for key, buffer in value._buffers.items():
                yield from _reached(f"{name}.{key}", buffer, seen, depth)
