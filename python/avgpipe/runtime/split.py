"""A model as a chain of layers, each of which receives what the one before returned, and its cut into stages.

The chain does not depend on the number of stages, so random numbers keyed by layer do not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from avgpipe.errors import reason
from avgpipe.planning import balance
from avgpipe.runtime.aliases import joined
from avgpipe.runtime.compiled import is_compiled, original, unwrapped
from avgpipe.runtime.skips import Values


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The chain that computes ``model``: its children if it is sequential, the adapter's layers if its forward is
    one of the transformers library, else segments of its traced graph.
    """
    model = original(model)
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
        return _of_transformers(model) if _forward_module(model) == "transformers" else list(_traced(model))
    layers = list(model)
    for n, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {n} of the model is a {type(layer).__name__}, not a torch.nn.Module")
    if not layers:
        raise ValueError("the model has no layers")
    memo: dict[int, nn.Module] = {}
    return [unwrapped(layer, memo) for layer in layers]


def stage_bounds(layers: Sequence[nn.Module], stages: int, partition: Sequence[Any] | None) -> list[int]:
    """First layer of every stage, then the number of layers. ``partition``: as in ``Plan``."""
    count = len(layers)
    if stages > count:
        raise ValueError(
            f"{stages} stages need at least as many layers, and the model has {count}: use fewer stages"
        )
    if partition is None:
        return [0, *balance([_cost(layer) for layer in layers], stages), count]
    first = [p if isinstance(p, int) else _named(layers, p) for p in partition]
    bounds = [0, *first, count]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"partition {list(partition)} leaves a stage without layers: the first layers {first} "
            "of stages 1.. must rise "
            f"and stay below {count}"
        )
    return bounds


def _named(layers: Sequence[nn.Module], name: str) -> int:
    """The first layer that calls the module ``name`` or one inside of it; a layer's ``calls`` says which it calls."""
    stated = [getattr(layer, "calls", None) for layer in layers]
    called = [calls if isinstance(calls, str) else str(n) for n, calls in enumerate(stated)]
    for n, target in enumerate(called):
        if (target + ".").startswith(name + "."):
            return n
    raise ValueError(f"split point {name!r} is no module that the model calls; it calls {', '.join(called)}")


def _cost(layer: nn.Module) -> float:
    """A rough estimate of a layer's compute before anything is measured: its weights, each used once per sample.

    An embedding only looks up; a layer may state its own ``compute_cost``.
    """
    stated = getattr(layer, "compute_cost", None)
    if isinstance(stated, int | float):
        return float(stated)
    tables = [m for m in layer.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    looked_up = {id(p) for m in tables for p in m.parameters()}
    return 1.0 + sum(p.numel() for p in layer.parameters() if id(p) not in looked_up)


def _forward_module(model: nn.Module) -> str:
    """The package whose code ``model.forward`` is."""
    owner = next(c for c in type(model).__mro__ if "forward" in vars(c))
    return owner.__module__.split(".")[0]


def _of_transformers(model: nn.Module) -> list[nn.Module]:
    from avgpipe.interop import transformers  # only now: it imports the library, which takes seconds

    return transformers.layers(model)


# ---- traced models -------------------------------------------------------------------------------------------------


class Segment(nn.Module):
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
        """Compiled modules are called as they are: torch.compile cannot be traced through."""
        return is_compiled(m) or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module) -> list[Segment]:
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
    return [_segment(traced, pieces, s, result) for s in range(len(pieces))]


def _segment(traced: fx.GraphModule, pieces: list[list[fx.Node]], s: int, result: fx.Node) -> Segment:
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
    return Segment(fx.GraphModule(traced, graph), called, values, s == 0)


def _users_in(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> set[fx.Node]:
    """Nodes of piece ``s``, and the output if it is the last."""
    return set(pieces[s]) | ({result} if s == len(pieces) - 1 else set())


def _users(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> set[fx.Node]:
    """Nodes of pieces ``s`` and later, and the output."""
    return {node for piece in pieces[s:] for node in piece} | {result}


def _crossing(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> list[fx.Node]:
    """Values made before piece ``s`` that it or a later one needs. Parameters are fetched where they are used
    instead.
    """
    later = _users(pieces, s, result)
    return [n for piece in pieces[:s] for n in piece if n.op != "get_attr" and later.intersection(n.users)]


def _fetched_here(pieces: list[list[fx.Node]], s: int, result: fx.Node) -> list[fx.Node]:
    """Parameters and buffers of the model that piece ``s`` uses itself."""
    users = _users_in(pieces, s, result)
    return [n for piece in pieces for n in piece if n.op == "get_attr" and users.intersection(n.users)]


def named_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The ``state_dict`` of the unsplit model, with the very tensors (tied ones stand there under each name)."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state = whole.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
