"""Modules that were compiled by torch.compile before they were passed in."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from avgpipe.errors import reason

# Makes a compiled function from a function, with the options that it was made with.
Context: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


# ---- modules passed in compiled --------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is ``torch.compile(module)``, or its ``compile()`` was called."""
    return is_wrapper(module) or context_of(module) is not None


def comes_compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether any module was compiled, or has a compiled forward."""
    forwards = (vars(module).get("forward") for module in modules)
    return any(map(is_compiled, modules)) or any(hasattr(f, "_torchdynamo_orig_callable") for f in forwards)


def unwrapped(module: Any, memo: dict[int, nn.Module]) -> Any:
    """Return the module inside ``torch.compile(module)``, compiled as if by its own ``compile()``; others unchanged.

    The wrapped module is unchanged: it is copied, without its parameters and children. ``memo``: results so
    far, so that a module used in several places stays one module.
    """
    if not is_wrapper(module):
        return module
    if id(module) not in memo:
        mine = copy.copy(module._orig_mod)
        mine._compiled_call_impl = module.dynamo_ctx(mine._call_impl)
        memo[id(module)] = mine
    return memo[id(module)]


def original(model: Any) -> Any:
    """Return the module inside ``torch.compile(model)``; anything else unchanged."""
    return model._orig_mod if is_wrapper(model) else model


def is_wrapper(module: Any) -> bool:
    # If its code was never imported, torch.compile was never called, and the import takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def context_of(module: Any) -> Context | None:
    """Return how a module was compiled; None if it was not."""
    if is_wrapper(module):
        context: Context = module.dynamo_ctx
        return context
    return context_in(getattr(module, "_compiled_call_impl", None))


def context_in(function: Any) -> Context | None:
    """Return how a function was compiled; None if it was not.

    torch has no API for it. Its wrapper of a function is a closure over the context; if a release changes
    that, the default options are used.
    """
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    if getattr(function, "_torchdynamo_disable", False):
        disable: Context = torch.compiler.disable
        return disable
    context = inspect.getclosurevars(function).nonlocals.get("self")
    return context if callable(context) else torch.compile


def compiler_error() -> type[Exception]:
    """Return the error of torch.compile that is no RuntimeError: code that needs one graph has too many variants."""
    found: type[Exception] = getattr(
        sys.modules.get("torch._dynamo.exc"), "FailOnRecompileLimitHit", RuntimeError
    )
    return found


def sharing_copy(model: nn.Module) -> nn.Module:
    """Copy modules and their attributes, except for parameters, buffers and compiled code, which both then share."""
    memo: dict[int, Any] = {id(m): m for m in model.modules() if m is not model and is_compiled(m)}
    memo |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copied(model, memo)


# ---- copies ----------------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any]) -> M:
    """Return a deep copy. ``memo``: by identity, the replacement of an object in the copy.

    A tensor with a graph that a forward has left in an attribute is copied without the graph. ValueError
    names the module and the attribute that cannot be copied.
    """
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    known = dict(memo)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # of any kind: objects define how they are copied
        raise ValueError(_why(model, known) or f"the model cannot be copied: {reason(error)}") from error


def _why(model: nn.Module, memo: dict[int, Any]) -> str | None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                where = f"module {name!r}" if name else "the model"
                return (
                    f"{where} ({type(module).__name__}) cannot be copied, as its attribute {key!r} is a "
                    f"{type(value).__name__} ({reason(error)}), and a Pipeline trains a copy: make it in forward, or "
                    "give the module a __deepcopy__"
                )
    return None
