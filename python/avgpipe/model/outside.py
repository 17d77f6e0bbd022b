"""The values that a forward or a loss function reads besides its arguments: outside variables, and the environment.

A recorded graph keeps their values at the time of recording, and never reads them again.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

_log = logging.getLogger("avgpipe")

_OF_GRAPHS = frozenset(("is_leaf", "grad_fn"))
_LETTERS = 2000  # most letters of a value that is compared in every batch
_ENVIRONMENT = frozenset(("environ", "getenv"))


def warn_of_graphs(modules: Iterable[nn.Module]) -> None:
    """Warn of code that asks for a tensor's origin, which changes if a cut is before it."""
    for module in modules:
        for _, code in functions_of(module):
            if asked := _OF_GRAPHS & set(code.co_names):
                _log.warning(
                    "the forward of a %s asks for %s of a tensor: a tensor that crosses a cut is a leaf, unlike on "
                    "one device. Use requires_grad instead, or nothing",
                    *(type(module).__name__, min(asked)),
                )
                return


def recorded_modules(model: nn.Module, graphs: Iterable[fx.GraphModule]) -> list[nn.Module]:
    """Return the modules whose forwards graphs have recorded; the others are called unchanged, by their names."""
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_module"}
    every = dict(model.named_modules(remove_duplicate=False))
    called = {id(inside) for name in names & every.keys() for inside in every[name].modules()}
    return [module for module in model.modules() if id(module) not in called]


UNKNOWN = object()


def plain(value: Any) -> Any:
    """Return the current numbers, strings and collections of them, for comparison; UNKNOWN for all else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, list | tuple | dict | set):
        items = [*value.items()] if isinstance(value, dict) else list(value)
        known = [plain(item) for item in items]
        return UNKNOWN if any(item is UNKNOWN for item in known) else (type(value).__name__, known)
    return UNKNOWN


_Variable = tuple[str, Callable[[], Any]]  # a name, and a function that returns the value


def variables_of(those: Iterable[Callable[..., Any]]) -> dict[tuple[Any, ...], _Variable]:
    """Return the variables that the code of modules' forwards and of functions reads, by what identifies them.

    Among them are the attributes that the code names of an object whose method or call it is, but not of a module that
    is called.
    """
    found: dict[tuple[Any, ...], _Variable] = {}
    for one in those:
        owner = _begin(one)[1]
        inside = set() if isinstance(one, nn.Module) else _attributes(owner)
        for function, code in functions_of(one):
            variables = function.__globals__
            for name in code.co_names:
                if name in inside:
                    found[id(owner), name] = name, partial(getattr, owner, name, None)
                if name in variables:
                    found[id(variables), name] = name, partial(variables.get, name)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                found[(id(cell),)] = name, partial(_content, cell)
            if _ENVIRONMENT & set(code.co_names):
                found[("environ",)] = "os.environ", lambda: hash(frozenset(os.environ.items()))
    return found


class Outside:
    """Remembers the values of variables around forwards, to detect changes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._read = variables_of(modules)
        self._known = {key: plain(read()) for key, (_, read) in self._read.items()}
        self._read = {key: read for key, read in self._read.items() if _is_handy(self._known[key])}

    @property
    def reads(self) -> bool:
        """Return whether there is any variable."""
        return bool(self._read)

    def changed(self) -> str | None:
        """Name the first variable whose value has changed; None if there is none."""
        for key, (name, read) in self._read.items():
            if plain(read()) != self._known[key]:
                return name
        return None


def _is_handy(value: Any) -> bool:
    """Return whether a value is small enough to compare in every batch, unlike a vocabulary."""
    return value is not UNKNOWN and len(repr(value)) <= _LETTERS


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return UNKNOWN


def _attributes(owner: Any) -> set[str]:
    inside = getattr(owner, "__dict__", {})
    return {*inside, *inside.get("_buffers", ()), *inside.get("_modules", ())}


def _begin(one: Any) -> tuple[Any, Any]:
    """Return the function that a call of a module, function, method or other object runs, and the object."""
    while isinstance(one, partial):
        one = one.func
    called: Any
    if isinstance(one, FunctionType | MethodType):
        owner, called = getattr(one, "__self__", None), one
    else:
        owner, called = one, one.forward if isinstance(one, nn.Module) else type(one).__call__
    called = inspect.unwrap(called)
    return getattr(called, "__func__", called), owner


def functions_of(one: Callable[..., Any]) -> Iterator[tuple[FunctionType, CodeType]]:
    """Yield the code that a call runs, its own and that of functions in the same file, with the function."""
    first, owner = _begin(one)
    found, left = set[int](), list[Any]([first])
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or id(function) in found or _is_library(function):
            continue
        found.add(id(function))
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            yield function, code
            codes += [value for value in code.co_consts if isinstance(value, CodeType)]
            for name in code.co_names:
                left += [getattr(type(owner), name, None), getattr(owner, "__dict__", {}).get(name)]
                called = function.__globals__.get(name)
                if getattr(called, "__module__", None) == function.__module__:
                    left.append(called)
        left += [_content(cell) for cell in function.__closure__ or ()]


def _is_library(function: FunctionType) -> bool:
    module = function.__module__ or "torch"  # None: it was made from a graph
    return module.split(".")[0] in ("torch", "transformers")


def leaves_of(roots: Iterable[torch.Tensor], ends: Iterable[Any] = ()) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graphs of tensors, except for those behind ``ends``, nodes of their graph."""
    seen, left = {None, *ends}, [root.grad_fn for root in roots]
    while left:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        left += [of for of, _ in node.next_functions]
