"""Traced models: the graph of a module, cut into pieces that run one after another.

Pieces take and give tuples of all values that they or later pieces need. Some must stay together: where a value is
changed in place that shares memory with another. On one device ``left = x[:, :4]; left.mul_(2)`` changes ``x``;
behind a cut they would be two tensors, each with memory of its own. A changed value itself may cross: the pieces that
change it hand it on as it then is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from avgpipe.errors import reason
from avgpipe.runtime.compiled import is_compiled


class Values(NamedTuple):
    """A piece of a model's values, by name.

    The first piece takes the model's input, which has no names, and the last gives the model's output, so neither is
    listed.

    Attributes:
        takes: In the order of its tuple.
        gives: In the order of its tuple.
        uses: Of what it takes, what it computes with.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    uses: frozenset[str]


class TracedLayer(nn.Module):
    """A piece of a traced graph. Takes and returns the values that it or later pieces need, as a tuple.

    The first takes the model's input: a tuple spreads over positional arguments and a dict over keywords, unless the
    model's forward has one argument and means the whole. The last returns the model's output. A value that the piece
    only passes on may be anything. ``calls`` is the name of the module that begins the piece.
    """

    def __init__(self, graph: fx.GraphModule, calls: str, values: Values, is_first: bool) -> None:
        super().__init__()
        self.graph, self.calls, self.values, self._is_first = graph, calls, values, is_first
        self._arguments = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]

    def forward(self, value: Any) -> Any:
        if self._is_first and self._is_whole(value):
            return self.graph(value)
        if self._is_first and isinstance(value, dict):
            return self.graph(**value)
        return self.graph(*value) if isinstance(value, tuple) else self.graph(value)

    def _is_whole(self, value: Any) -> bool:
        """Whether the model's input is its only argument, rather than a collection of arguments."""
        if len(self._arguments) != 1 or self._arguments[0].startswith("*"):
            return False
        if isinstance(value, dict):
            return self._arguments != list(value)
        return isinstance(value, tuple) and len(value) != 1


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Call compiled modules as they are: torch.compile cannot be traced through."""
        return is_compiled(m) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module) -> list[TracedLayer]:
    """Cut the graph of ``model`` before every module call but the first."""
    try:
        tracer = _Tracer()
        traced = fx.GraphModule(model, tracer.trace(model), type(model).__name__)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be traced ({reason(error)}): pass nn.Sequential or a list of layers instead"
        ) from error
    pieces: list[list[fx.Node]] = [[]]
    for node in traced.graph.nodes:
        if node.op == "call_module" and any(n.op == "call_module" for n in pieces[-1]):
            pieces.append([])
        if node.op != "output":
            pieces[-1].append(node)
    pieces = joined(pieces, traced)
    result = next(n for n in traced.graph.nodes if n.op == "output")
    return [_traced_layer(traced, pieces, s, result) for s in range(len(pieces))]


def _traced_layer(
    traced: fx.GraphModule, pieces: list[list[fx.Node]], s: int, result: fx.Node
) -> TracedLayer:
    graph = fx.Graph()
    is_last = s == len(pieces) - 1
    taken = [] if s == 0 else _crossing(pieces, s, result)
    given = [] if is_last else _crossing(pieces, s + 1, result)
    copies = {node: graph.placeholder(node.name) for node in taken}
    for node in _fetched_here(pieces, s, result):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in pieces[s]:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if is_last:
        graph.output(fx.map_arg(result.args[0], copies.__getitem__))
    else:
        graph.output(tuple(copies[node] for node in given))
    called = next((str(n.target) for n in pieces[s] if n.op == "call_module"), "")
    here = _users_in(pieces, s, result)
    used = frozenset(n.name for n in taken if here.intersection(n.users))
    values = Values(tuple(n.name for n in taken), tuple(n.name for n in given), used)
    return TracedLayer(fx.GraphModule(traced, graph), called, values, s == 0)


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


# ---- pieces that must stay together ------------------------------------------------------------

# What may return its first argument, or a part of its memory.
_VIEW_NAMES = """
T mT H mH real imag data getattr getitem view view_as view_as_real view_as_complex reshape
reshape_as transpose permute t flatten unflatten ravel squeeze unsqueeze expand expand_as
broadcast_to narrow select split chunk tensor_split hsplit vsplit dsplit split_with_sizes unbind
unfold diagonal detach contiguous to type type_as cpu cuda float double half bfloat16 movedim
moveaxis swapaxes swapdims as_strided positive dropout dropout1d dropout2d dropout3d alpha_dropout
feature_alpha_dropout
"""
_IN_PLACE_NAMES = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor"
_VIEWS, _IN_PLACE = frozenset(_VIEW_NAMES.split()), frozenset(_IN_PLACE_NAMES.split())
_VIEW_MODULES = nn.Flatten | nn.Unflatten | nn.Identity | nn.modules.dropout._DropoutNd


def joined(pieces: Sequence[list[fx.Node]], model: nn.Module) -> list[list[fx.Node]]:
    """Put ``pieces`` of the traced graph of ``model`` together where a cut would change a result."""
    order = {node: n for n, node in enumerate(node for piece in pieces for node in piece)}
    piece_of = {node: s for s, piece in enumerate(pieces) for node in piece}
    sharing = _sharing(order, model)
    first = list(range(len(pieces)))  # by piece, the one that it must stay with
    for node in order:
        changed = _changed(node, model)
        if changed is None:
            continue
        group = [other for other in sharing[changed] if order[other] < order[node]]
        if any(
            order.get(user, len(order)) > order[node] for n in group if n is not changed for user in n.users
        ):
            first[piece_of[node]] = min(piece_of[n] for n in group)
    result: list[list[fx.Node]] = []
    for s, piece in enumerate(pieces):
        if any(first[later] < s for later in range(s, len(pieces))):
            result[-1].extend(piece)
        else:
            result.append(list(piece))
    return result


def _sharing(order: dict[fx.Node, int], model: nn.Module) -> dict[fx.Node, list[fx.Node]]:
    """Return, by value, all that may lie in its memory, itself among them."""
    groups = {node: [node] for node in order}
    for node in order:
        source = _changed(node, model)
        if source is None and node.args and isinstance(node.args[0], fx.Node) and _is_view(node, model):
            source = node.args[0]
        if source is not None and groups[source] is not groups[node]:
            groups[source].extend(groups[node])
            for member in groups[node]:
                groups[member] = groups[source]
    return groups


def _is_view(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _VIEW_MODULES)
    return node.op in ("call_method", "call_function") and _name(node) in _VIEWS


def _changed(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the value that a node changes in place, if any."""
    value = node.kwargs.get("out") or (node.args[0] if node.args else node.kwargs.get("input"))
    if not isinstance(value, fx.Node):
        return None
    if node.op == "call_module":
        changes = bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    elif node.op in ("call_method", "call_function"):
        name = _name(node)
        changes = (
            name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs
        )
        changes = changes or _is_asked_to(node)
    else:
        changes = False
    return value if changes else None


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_asked_to(node: fx.Node) -> bool:
    """Whether a function's argument ``inplace`` is true."""
    if not callable(node.target):
        return False
    try:
        arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # functions of C have no signature
        return False
    return bool(arguments.get("inplace", False))
