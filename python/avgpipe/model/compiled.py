"""Layers that run through torch.compile: compiled on request, or compiled already when passed in.

Each layer is compiled separately, since a stage seeds the random generators before each. A copy of a compiled
module is not compiled, so modules that were passed in compiled are compiled again in the stage, with their
own options.

torch.compile stores compiled variants, a limited number, with a function's code, and runs further variants
uncompiled. So every layer is called through a separate function, and layers that look alike share its code:
the replicas of a layer, and the blocks of a transformer, are compiled once.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from avgpipe.errors import nearest, reason
from avgpipe.model.context import Carry
from avgpipe.model.copies import copied

# Makes a compiled function from a function, with the options that it was made with.
_Context: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class Compiler:
    """Copies layers and compiles the copies, for all stages of a process.

    Args:
        options: Arguments of torch.compile for every layer without options of its own; None: compile only
            layers that were passed in compiled.
        model: The model passed in; if it is compiled as a whole, and there are no ``options``, all its layers
            are compiled.

    Attributes:
        is_asked: Whether there are ``options``.
        description: A text that is equal on all ranks with the same ``options``.
    """

    def __init__(self, options: dict[str, Any] | None = None, model: Any = None) -> None:
        self.description = described(options)
        self._context = _context_of(model) if options is None else _compiling(options)
        self.is_asked = options is not None
        self._codes: dict[Any, CodeType] = {}  # by the look of a layer, and whether it is compiled on request

    def copied(self, layers: Sequence[nn.Module]) -> nn.ModuleList:
        originals = nn.ModuleList(layers)
        # A copy of torch.compile(module) would lose some of its options: keep the original context instead.
        kept = {id(c): c for c in (_context_of(m) for m in originals.modules() if _is_wrapper(m))}
        copies = copied(originals, kept)
        chain = {id(part) for layer in originals for part in _parts(layer)}
        compiled = bool(kept)
        for original, mine in zip(originals.modules(), copies.modules()):
            if _is_wrapper(original):
                continue  # its copy is compiled as well
            _refuse_compiled_forward(original)
            context = _context_of(original)
            if context is None and id(original) in chain:
                context = self._context
            if context is not None:
                mine._compiled_call_impl = context(self._function(mine, context is self._context))
                compiled = True
        if compiled:
            for module in copies.modules():
                if isinstance(module, Carry):
                    module.hide_from_compiler()
        return copies

    def refuse_cuda_graphs(self, layers: Sequence[nn.Module]) -> None:
        """Refuse, with ValueError, layers or options with which torch.compile makes its own CUDA graphs.

        Their output memory is overwritten by their next run, and they end a run with the backward, or with
        the next call of another compiled function. Here a layer passes its output to the next one, and
        several micro-batches, each with weights at different addresses, are in flight before the first
        backward.
        """
        contexts = [self._context, *map(_context_of, nn.ModuleList(layers).modules())]
        probes = (context(_probe()) for context in contexts if context is not None)
        if any(_makes_cuda_graphs(_context_in(probe)) for probe in probes):
            raise ValueError(
                "torch.compile with its own CUDA graphs (mode 'reduce-overhead' or 'max-autotune') cannot keep "
                "several layers and micro-batches: use mode 'max-autotune-no-cudagraphs' or none, and "
                "cuda_graphs=True to launch a stage as one graph"
            )

    def _function(self, layer: Any, is_asked_for: bool) -> Callable[..., Any]:
        """Return a function that calls ``layer``. Modules passed in compiled share nothing with those compiled here."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return layer._call_impl(*args, **kwargs)

        run.__code__ = self._codes.setdefault((_looks(layer), is_asked_for), run.__code__.replace())
        return run


def _parts(layer: Any) -> Sequence[nn.Module]:
    """Return the parts of a layer that are compiled separately."""
    parts: Sequence[nn.Module] = layer.compiled_parts() if hasattr(layer, "compiled_parts") else [layer]
    return parts


def _looks(layer: nn.Module) -> Any:
    """Return a key that is equal for layers likely to compile to the same code, which traced graphs never do."""
    if any(isinstance(m, fx.GraphModule) for m in layer.modules()):
        return object()
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return repr(layer), tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


# ---- options -------------------------------------------------------------------------------------------------------


def compile_options(given: Any, recompute: str = "never") -> dict[str, Any] | None:
    """Return the arguments of torch.compile for ``Pipeline(compile=given)``; None for no compilation.

    With recomputation, compiled code has fixed sizes (``dynamic=False``) unless ``given`` sets it: code for
    all sizes may save other tensors than the code for one size that ran the first forward.
    """
    if isinstance(given, bool):
        options: dict[str, Any] | None = {} if given else None
    elif isinstance(given, dict):
        options = dict(given)
    else:
        raise TypeError(
            f"compile={given!r}: it is False, True, or a dict of keyword arguments of torch.compile, such as "
            "{'backend': 'aot_eager'}"
        )
    if options is None:
        return None
    valid = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in valid:
            raise ValueError(f"compile: torch.compile takes no {name!r}: {nearest(str(name), valid)}")
    backend = options.get("backend", "inductor")
    if not isinstance(backend, str) and not callable(backend):
        raise TypeError(f"compile: backend={backend!r} is neither a name nor a function")
    if recompute != "never":
        options.setdefault("dynamic", False)
    try:
        _compiling(options)(_probe())
    except Exception as error:  # RuntimeError, AssertionError or TypeError
        raise ValueError(f"compile={given!r}: torch.compile refuses it: {reason_of(error)}") from error
    return options


def described(options: dict[str, Any] | None) -> str:
    """Describe options by a text that is equal on all ranks with the same options."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in sorted(value.items())) + "}"
        return f"{value.__module__}.{value.__qualname__}" if inspect.isroutine(value) else repr(value)

    return "compile=" + ("False" if options is None else text(options))


def _compiling(options: dict[str, Any]) -> _Context:
    def context(function: Callable[..., Any]) -> Callable[..., Any]:
        # torch removes entries from the inner dict
        own: Any = {k: dict(v) if isinstance(v, dict) else v for k, v in options.items()}
        compiled: Callable[..., Any] = torch.compile(function, **own)
        return compiled

    return context


def _probe() -> Callable[[Any], Any]:
    return lambda x: x


# ---- modules passed in compiled ------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is ``torch.compile(module)``, or its ``compile()`` was called."""
    return _is_wrapper(module) or _context_of(module) is not None


def unwrapped(module: Any, memo: dict[int, nn.Module]) -> Any:
    """Return the module inside ``torch.compile(module)``, compiled as if by its own ``compile()``; others unchanged.

    The wrapped module is unchanged: it is copied, without its parameters and children. ``memo``: results so
    far, so that a module used in several places stays one module.
    """
    if not _is_wrapper(module):
        return module
    if id(module) not in memo:
        mine = copy.copy(module._orig_mod)
        mine._compiled_call_impl = module.dynamo_ctx(mine._call_impl)
        memo[id(module)] = mine
    return memo[id(module)]


def original(model: Any) -> Any:
    """Return the module inside ``torch.compile(model)``; anything else unchanged."""
    return model._orig_mod if _is_wrapper(model) else model


def _is_wrapper(module: Any) -> bool:
    # If its code was never imported, torch.compile was never called, and the import takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _context_of(module: Any) -> _Context | None:
    """Return how a module was compiled; None if it was not."""
    if _is_wrapper(module):
        context: _Context = module.dynamo_ctx
        return context
    return _context_in(getattr(module, "_compiled_call_impl", None))


def _context_in(function: Any) -> _Context | None:
    """Return how a function was compiled; None if it was not.

    torch has no API for it. Its wrapper of a function is a closure over the context; if a release changes
    that, the default options are used.
    """
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    if getattr(function, "_torchdynamo_disable", False):
        disable: _Context = torch.compiler.disable
        return disable
    context = inspect.getclosurevars(function).nonlocals.get("self")
    return context if callable(context) else _compiling({})


def _makes_cuda_graphs(context: Any) -> bool:
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    config = getattr(backend, "config", None) or {}
    return bool(config.get("triton.cudagraphs")) or getattr(backend, "compiler_name", "") == "cudagraphs"


def _refuse_compiled_forward(module: nn.Module) -> None:
    if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError(
            f"{type(module).__name__}.forward was replaced by torch.compile(module.forward), which still computes "
            "with the weights of the model that was passed in: call module.compile() instead"
        )


# ---- errors --------------------------------------------------------------------------------------------------------


def compiler_error() -> type[Exception]:
    """Return the error of torch.compile that is no RuntimeError: code that needs one graph has too many variants."""
    found: type[Exception] = getattr(
        sys.modules.get("torch._dynamo.exc"), "FailOnRecompileLimitHit", RuntimeError
    )
    return found


def reason_of(error: BaseException) -> str:
    """Summarize an error in one line; for a compiler's error, the inner cause."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):  # the text "backend='inductor' raised:" comes before it
        return f"torch.compile: {type(inner).__name__}: {reason_of(inner)}"
    first = reason(error)
    if not type(error).__module__.startswith("torch._dynamo"):
        return first
    lines = map(str.strip, str(error).splitlines())
    explanation = next((line for line in lines if line.startswith("Explanation: ")), "")
    # A long description of the call comes before ": got ".
    why = explanation.removeprefix("Explanation: ").rpartition("): got ")[2]
    return f"torch.compile: {first}" + (f": {why}" if why else "")


def sharing_copy(model: nn.Module) -> nn.Module:
    """Copy modules and their attributes, except for parameters, buffers and compiled code, which both then share."""
    memo: dict[int, Any] = {id(m): m for m in model.modules() if m is not model and is_compiled(m)}
    memo |= {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copied(model, memo)
