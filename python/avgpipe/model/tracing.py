"""Traced models: the graph of a module, cut into pieces that run one after another.

Pieces take and give tuples of all values that they or later pieces need. ``torch.fx`` makes the graph of a
module here; :mod:`avgpipe.model.exported` makes one with ``torch.export``.
"""

from __future__ import annotations

import dis
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from types import CodeType
from typing import Any

from torch import fx, nn

from avgpipe.errors import reason
from avgpipe.model.choice import CHOICE, Choice, Differs, merged
from avgpipe.model.compiled import is_compiled
from avgpipe.model.context import generators, has_hooks, in_mode, moved, reads_mode
from avgpipe.model.in_place import joined
from avgpipe.model.outside import functions_of
from avgpipe.model.parts import PartLayer, Values
from avgpipe.model.recording import Knowledge, Lost, applying, functions_called

# Functions that read or set the gradient mode, or attach something to a gradient. A graph has none of them.
_OF_GRADIENTS = frozenset(
    (
        *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "is_grad_enabled"),
        *("register_hook", "register_multi_grad_hook"),
    )
)


class TracedLayer(PartLayer):
    """A piece of a traced graph. Takes and returns the values that it or later pieces need, as a tuple.

    The first takes the model's input, see :func:`arguments`. The last returns the model's output. A value
    that the piece only passes on may be anything. ``calls`` is the name of the first module of the piece.
    """

    def __init__(self, graph: fx.GraphModule, calls: str, values: Values, is_first: bool) -> None:
        super().__init__()
        self.graph, self.calls, self.values, self._is_first = graph, calls, values, is_first
        self._arguments = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        self._absent: frozenset[str] = frozenset()

    @property
    def recorded(self) -> fx.GraphModule:
        return self.graph

    def forward(self, value: Any) -> Any:
        if self._is_first:
            args, kwargs = arguments(value, self._arguments)
            if self._absent:
                args, kwargs = self._without_absent(args, kwargs)
            return self.graph.forward(*args, **kwargs)
        # Not by a call, where torch.fx prints additional text for an error.
        return self.graph.forward(*value) if isinstance(value, tuple) else self.graph.forward(value)

    def leave_out(self, names: Sequence[str], absent: frozenset[str]) -> None:
        """Make the first layer take arguments of these ``names``; those in ``absent`` are None."""
        self._arguments, self._absent = list(names), absent

    def _without_absent(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = [*zip(self._arguments, args), *kwargs.items()]
        given = [name for name, value in named if name in self._absent and value is not None]
        if given:
            raise ValueError(
                f"the forward was recorded without {given[0]!r}, which is None by default and which it tests for "
                "None, but a batch has it: pass Pipeline(example_inputs=...), the inputs of such a batch"
            )
        left = tuple(value for name, value in zip(self._arguments, args) if name not in self._absent)
        return left, {name: value for name, value in kwargs.items() if name not in self._absent}


def arguments(value: Any, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model's call on ``value``, one batch's inputs.

    A tuple becomes positional arguments and a dict keywords, unless the model has one argument, which then
    gets the whole. ``names``: names of the arguments, with their stars.
    """
    is_collection = len(names) != 1 or names[0].startswith("*")
    if isinstance(value, dict) and (is_collection or list(names) == list(value)):
        return (), value
    # Torch's default collation makes lists of tuples.
    if isinstance(value, tuple | list) and (is_collection or (isinstance(value, tuple) and len(value) == 1)):
        return tuple(value), {}
    return (value,), {}


class CannotTrace(ValueError):
    """torch.fx cannot trace a module; the message says why and where."""


class _Tracer(fx.Tracer):
    """Calls some modules untraced: compiled modules, which cannot be traced through, ``leaves``, and custom functions.

    Args:
        reads_buffers: Whether the graph reads buffers in each forward. If so, the model's code cannot branch
            on their values; if not, they are constants of the graph.
        absent: Arguments of the model that are None.

    Attributes:
        drawn: The generators that were used, and the innermost module whose code used them.
    """

    def __init__(
        self,
        leaves: frozenset[nn.Module] = frozenset(),
        reads_buffers: bool = True,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._absent = absent
        self._leaves, self.proxy_buffer_attributes = leaves, reads_buffers
        self.drawn: tuple[list[str], str] | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_compiled(m) or m in self._leaves or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with self._watching(self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)

    def _proxy_placeholder(self, name: str, *others: Any) -> Any:
        # With concrete_args, torch would leave a placeholder of another name there.
        return None if name in self._absent else super()._proxy_placeholder(name, *others)

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        def instead(function: type, args: Any, kwargs: Any) -> Any:
            return self.create_proxy("call_function", applying(function), args, kwargs)

        with functions_called(instead, lambda value: isinstance(value, fx.Proxy)), self._watching(""):
            return super().trace(root, concrete_args)

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        before = generators()
        yield
        if self.drawn is None and (found := moved(before, generators())):
            self.drawn = found, name


def traced(model: nn.Module, given: Mapping[str, Any] | None = None) -> list[TracedLayer]:
    """Cut the graph of ``model`` where its forward enters modules; CannotTrace if it cannot be traced.

    These are the modules that the graph calls, and the user's modules that hold parameters themselves, whose
    code is in the graph.

    Args:
        model: It is unchanged.
        given: Arguments that batches have, by name; None: unknown. Then arguments with default None are left
            out, if some forward tests whether a variable is None: a graph has no such branch.
    """
    signature = inspect.signature(model.forward)
    optional = {name for name, p in signature.parameters.items() if p.default is None}
    if given is not None:
        absent = {
            n for n in signature.parameters if given.get(n, None) is None and (n in given or n in optional)
        }
    else:
        absent = optional if any(map(_asks_for_none, model.modules())) else set()
    kept = frozenset(m for m in model.modules() if m is not model and _is_called_as_it_is(m))
    whole = _graph(model, kept, frozenset(absent))
    calls = _entered(whole.graph, model)
    if kept and len(calls) < 2:  # there is nothing else to cut than these modules
        whole = _graph(model, frozenset(), frozenset(absent))
        calls = _entered(whole.graph, model)
    pieces: list[list[fx.Node]] = [[]]
    for node in whole.graph.nodes:
        if node in calls and any(n in calls for n in pieces[-1]):
            pieces.append([])
        if node.op != "output":
            pieces[-1].append(node)
    layers = layers_of_graph(whole, pieces, calls)
    layers[0].leave_out(names_in(signature), frozenset(absent))
    return layers


def names_in(signature: inspect.Signature) -> list[str]:
    """Return the names of a function's arguments, with their stars."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(p.kind, "") + p.name for p in signature.parameters.values()]


def _is_called_as_it_is(module: nn.Module) -> bool:
    """Return whether a graph of a module's inside would leave out something that its call does."""
    return has_hooks(module) or _sees_to_gradients(module)


def _entered(graph: fx.Graph, model: nn.Module) -> dict[fx.Node, str]:
    """Return by node, for each call of a module that begins a layer, the first one, and the module's name."""
    found, seen = dict[fx.Node, str](), set[Any]()
    for node in graph.nodes:
        if node.op == "call_module":
            if node.target != CHOICE:
                found[node] = str(node.target)
        elif node.op in ("call_function", "call_method"):
            # For a second call of a module, the key has a number.
            key, (name, _) = next(reversed((node.meta.get("nn_module_stack") or {"": ("", None)}).items()))
            if name and key not in seen and attribute(model, name)._parameters:
                found[node] = name
            seen.add(key)
    return found


def layers_of_graph(
    whole: fx.GraphModule, pieces: Sequence[list[fx.Node]], calls: Mapping[fx.Node, str]
) -> list[TracedLayer]:
    """Make layers of the pieces of a graph: all nodes but its output, in order.

    Pieces that must stay together make one layer. ``calls``: by node, the module that it belongs to, if any.
    """
    pieces = joined(pieces, whole)
    result = next(n for n in whole.graph.nodes if n.op == "output")
    names = [next((calls[n] for n in piece if calls.get(n)), "") for piece in pieces]
    return [_traced_layer(whole, pieces, s, result, names[s]) for s in range(len(pieces))]


# ---- the graph of a module -----------------------------------------------------------------------------------------


def _graph(model: nn.Module, kept: frozenset[nn.Module], absent: frozenset[str]) -> fx.GraphModule:
    """Trace in both modes. Modules whose own code depends on the mode are called untraced, if needed.

    ``kept``: modules that are called untraced in any case. ``absent``: arguments that are None.
    """
    aware = [m for m in model.modules() if m is not model and reads_mode(m)]
    leaves = frozenset(m for m in aware if not any(True for _ in m.children()))
    try:
        try:
            return _in_both_modes(model, kept | leaves, absent)
        except Differs:
            if leaves == frozenset(aware):
                raise
        return _in_both_modes(model, kept | frozenset(aware), absent)
    except Lost as error:
        raise CannotTrace(f"{type(model).__name__} cannot be traced: {error}") from None
    except Differs as error:
        raise ValueError(
            f"{type(model).__name__} differs between training and evaluation ({error}), and a cut model does "
            "the same in both: build it without the difference (such as aux_logits=False), move it into a separate "
            "module, or pass a list of layers"
        ) from None
    except Exception as error:
        raise CannotTrace(
            f"{type(model).__name__} cannot be traced ({reason(error)}; {_place(error)})"
        ) from None


def _in_both_modes(model: nn.Module, leaves: frozenset[nn.Module], absent: frozenset[str]) -> fx.GraphModule:
    """Trace in both modes; buffers are constants only if code reads their values, and then none may change."""
    try:
        return _with(model, leaves, absent, reads_buffers=True)
    except (Lost, Differs):
        raise
    except Exception as error:  # of any kind: this runs the model's code
        try:
            return _with(model, leaves, absent, reads_buffers=False)
        except (Lost, Differs):
            raise
        except Exception:
            raise error from None


def _with(
    model: nn.Module, leaves: frozenset[nn.Module], absent: frozenset[str], reads_buffers: bool
) -> fx.GraphModule:
    graphs = []
    for training in (True, False):
        with in_mode(model, training):
            tracer, knowledge = _Tracer(leaves, reads_buffers, absent), Knowledge(model)
            graphs.append(tracer.trace(model))
            _refuse_losses(model, tracer, knowledge)
    value = partial(attribute, tracer.root)  # includes constants of the trace
    chosen = merged(graphs[0], graphs[1], value, value)
    if not chosen:
        return fx.GraphModule(model, graphs[0], type(model).__name__)
    return fx.GraphModule(with_choice(model, graphs[0]), graphs[0], type(model).__name__)


def _refuse_losses(model: nn.Module, tracer: _Tracer, knowledge: Knowledge) -> None:
    """Raise Lost for effects of the recording that a graph would not repeat."""
    if tracer.drawn is not None:
        generators, name = tracer.drawn
        where = f"module {name!r}" if name else f"the forward of {type(model).__name__}"
        raise Lost(
            f"{where} draws from {' and '.join(generators)} while it is recorded, and would get the same numbers in "
            "every batch; draw with the shape of an input (torch.rand_like, or F.dropout), in a layer of a list, or"
        )
    if (changed := knowledge.changed()) is not None:
        raise Lost(
            f"its forward changes {changed!r}, which a recorded graph would do only once; make it a buffer "
            "that is changed in place (self.count.add_(1)), a layer of a list, or"
        )


def with_choice(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> dict[str, Any]:
    """Return the objects that ``graph`` names, from ``root``, and the choice by mode."""
    found = {CHOICE: Choice()}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target != CHOICE:
            found[node.target] = (
                root[node.target] if isinstance(root, Mapping) else attribute(root, node.target)
            )
    return found


def attribute(root: nn.Module, name: str) -> Any:
    """Return the object at the dotted ``name`` in a module."""
    value: Any = root
    for atom in name.split("."):
        value = getattr(value, atom)
    return value


def _place(error: BaseException) -> str:
    """Return the place in the user's code where torch.fx failed."""
    own = PurePath(fx.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if own not in PurePath(f.filename).parents]
    return f"in {frames[-1].name}, {PurePath(frames[-1].filename).name}, line {frames[-1].lineno}"


# ---- pieces --------------------------------------------------------------------------------------------------------


def _traced_layer(
    traced: fx.GraphModule, pieces: list[list[fx.Node]], s: int, result: fx.Node, calls: str
) -> TracedLayer:
    graph = fx.Graph()
    is_last = s == len(pieces) - 1
    taken = [] if s == 0 else _crossing(pieces, s, result)
    given = [] if is_last else _crossing(pieces, s + 1, result)
    copies = {node: graph.placeholder(node.name) for node in taken}
    for node in _fetched_here(pieces, s, result):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in pieces[s]:
        if node.op != "get_attr" and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if is_last:
        graph.output(fx.map_arg(result.args[0], copies.__getitem__))
    else:
        graph.output(tuple(copies[node] for node in given))
    here = _users_in(pieces, s, result)
    used = frozenset(n.name for n in taken if here.intersection(n.users))
    values = Values(tuple(n.name for n in taken), tuple(n.name for n in given), used)
    return TracedLayer(fx.GraphModule(traced, graph), calls, values, s == 0)


def _users_in(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> set[fx.Node]:
    """Return the nodes of piece ``s``, and the output if it is the last."""
    return set(pieces[s]) | ({result} if s == len(pieces) - 1 else set())


def _users(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> set[fx.Node]:
    """Return the nodes of pieces ``s`` and later, and the output."""
    return {node for piece in pieces[s:] for node in piece} | {result}


def _crossing(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> list[fx.Node]:
    """Return the values made before piece ``s`` that it or a later one needs.

    Parameters are fetched where they are used instead.
    """
    later = _users(pieces, s, result)
    return [n for piece in pieces[:s] for n in piece if n.op != "get_attr" and later.intersection(n.users)]


def _fetched_here(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> list[fx.Node]:
    """Return the model's parameters and buffers that piece ``s`` uses itself."""
    users = _users_in(pieces, s, result)
    return [n for piece in pieces for n in piece if n.op == "get_attr" and users.intersection(n.users)]


def _sees_to_gradients(module: nn.Module) -> bool:
    """Return whether the code of a module's own forward handles gradients in ways that a graph leaves out."""
    return any(_OF_GRADIENTS & set(code.co_names) for _, code in functions_of(module))


def _asks_for_none(module: nn.Module) -> bool:
    """Return whether the code of a module's own forward tests whether a variable of it is None."""
    return any(_tests_for_none(code) for _, code in functions_of(module))


def _tests_for_none(code: CodeType) -> bool:
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    for n, (name, _) in enumerate(steps):
        is_jump = name.endswith(("IF_NONE", "IF_NOT_NONE"))
        is_compared = name == "IS_OP" and steps[n - 1] == ("LOAD_CONST", None)
        of = steps[n - 1 - is_compared][0]
        if (is_jump or is_compared) and of.startswith("LOAD_FAST"):
            return True
    return False
