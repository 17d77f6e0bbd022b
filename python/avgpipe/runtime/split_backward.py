"""A backward in two parts: gradients of a stage's inputs first, those of its weights later.

Zero-bubble schedules (Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2) call them B and
W, here I and W: the stage before waits for I alone, so W can fill what would be a bubble.

How a graph is split. A node is *upstream* if it leads to an input. Without the edges between upstream nodes the graph
falls apart into *bundles*: some weights, what was computed from weights alone (casts, transposes, norms of weights),
and the upstream nodes that pass gradients to these, the bundle's *feeders*.

    I   runs the upstream nodes, and a hook on each feeder keeps the gradient that reached it
    W   runs each bundle from those gradients, and no upstream node but its feeders

A feeder thus runs twice, and autograd computes each time only what is requested: of a Linear or a convolution
one product in I and one in W. Bundles whose feeders have the same depth share one run of the engine.

What is not split, and runs as a whole in I:
- a bundle in which one feeder leads to another, as when a weight is used twice in a chain (a recurrence in Python, a
  layer applied again): W of the one would run through the gradients of activations to the other;
- a bundle with a feeder whose kernel gives all gradients together: BatchNorm, fused recurrent layers, PReLU, attention
  on a learned query, and every custom autograd.Function;
- a bundle whose tensors were saved through hooks, as ``torch.utils.checkpoint`` does: each run would recompute them.
If nothing is left for W, I is one ordinary backward, and so it is with ``checkpoint(use_reentrant=True)``
somewhere, which refuses to run for some leaves only. If no input requires a gradient, W is the ordinary
backward.

Memory. What nodes outside of waiting bundles had saved is free after I. Feeders keep all they saved until W,
as well as the gradients that reached them; after W nothing is left.

Not promised: a hook on the output of a feeder runs in both parts (its effect on the gradient counts once), and so does
``retain_grad`` of such a tensor, which then adds up twice.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

_Grads = tuple[torch.Tensor | None, ...]

# Nodes whose kernels compute the gradients of activations and of weights together.
_JOINT = re.compile("BatchNorm|Rnn|Lstm|Gru|Prelu|Attention")


def input_backward(
    roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Deferred:
    """Run I: add to ``.grad`` of ``inputs`` as ``run_backward(roots, grads)``; W is the result's ``run``.

    ``inputs``: the leaves whose gradients are needed now; ValueError for any other tensor. Together, I and W
    call each leaf's hooks once, and leave the ``.grad`` that a whole backward leaves. The graph is consumed:
    another backward through it fails, or gives wrong gradients.
    """
    for x in inputs:
        if not (x.is_leaf and x.requires_grad):
            raise ValueError(
                "inputs must be leaves that require a gradient, got one of shape "
                f"{list(x.shape)} with requires_grad={x.requires_grad} and grad_fn={x.grad_fn}; "
                "pass x.detach().requires_grad_() through the layers"
            )
    found = _planned(roots, {id(x) for x in inputs}) if inputs and roots else None
    if found is None:
        return Deferred([_SplitPart(list(roots), list(grads), [], [])] if roots else [])
    plan, nodes = found
    if not plan.runs:
        _run(roots, grads, [])
        return Deferred([])
    parts = plan.parts(nodes, roots, grads)
    shelf: list[torch.Tensor] = []
    try:
        for n, node in enumerate(nodes):
            if n not in plan.kept:
                _shelve(node, shelf)
        now = [_variable(nodes[n]) for n in plan.now]
        del nodes, found, node
        _run(roots, grads, [*inputs, *now], keep_graph=True)
    finally:
        shelf.clear()
    return Deferred(parts)


class Deferred:
    """The rest of a backward that :func:`input_backward` left: W."""

    def __init__(self, parts: list[_SplitPart]) -> None:
        self._parts = parts

    def run(self) -> None:
        """Add to the weights' ``.grad`` what is still missing. A second call does nothing."""
        while self._parts:
            # Removed from the list first, so that its memory is freed when it is done.
            self._parts.pop(0).run()


class _SplitPart(NamedTuple):
    """One run of the engine in W, from ``roots`` and ``feeders`` to ``leaves``; [] means all."""

    roots: list[GradientEdge]
    grads: list[torch.Tensor]
    feeders: list[_Feeder]
    leaves: list[torch.Tensor]

    def run(self) -> None:
        roots, grads = self.roots, self.grads
        for feeder in self.feeders:
            for n, grad in enumerate(feeder.arrived.grads or ()):
                if grad is not None:
                    roots.append(GradientEdge(feeder.node, n))
                    grads.append(grad)
        if roots:
            _run(roots, grads, self.leaves)


class _ArrivedGradients:
    """A hook that keeps the gradients that reach a node in I, and passes the same on to it in W.

    In W the hooks of the node's outputs run first once more; their changes of the gradients are dropped here.
    It must not refer to its node: the garbage collector does not find a cycle through autograd.
    """

    __slots__ = ("grads",)

    def __init__(self) -> None:
        self.grads: _Grads | None = None

    def __call__(self, grads: _Grads) -> _Grads | None:
        if self.grads is None:
            self.grads = grads
            return None
        again, self.grads = self.grads, None
        return again


class _Feeder(NamedTuple):
    node: Node
    arrived: _ArrivedGradients


class _Graph(NamedTuple):
    """A backward graph. ``nexts``: where a node's gradients go. ``depth``: longest path to an input, or 0."""

    nexts: dict[Node, list[Node]]
    depth: dict[Node, int]


def _explore(roots: Sequence[GradientEdge], wanted: set[int]) -> _Graph:
    """Walk the graph behind ``roots``. ``wanted``: identities of the input leaves."""
    nexts: dict[Node, list[Node]] = {}
    depth: dict[Node, int] = {}
    # Without recursion: a graph may be deeper than Python's stack.
    stack = [edge.node for edge in roots]
    while stack:
        node = stack[-1]
        found = nexts.get(node)
        if found is None:
            found = nexts[node] = [n for n, _ in node.next_functions if n is not None]
            if found:
                stack += found
                continue
            depth[node] = int(_is_leaf(node) and id(_variable(node)) in wanted)
        stack.pop()
        if node not in depth:
            farthest = max([depth[n] for n in found])
            depth[node] = farthest + 1 if farthest else 0
    return _Graph(nexts, depth)


def _plan(graph: _Graph, roots: Sequence[GradientEdge], wanted: set[int]) -> _SplitPlan:
    number = {node: n for n, node in enumerate(graph.nexts)}
    leaves = {number[node]: id(_variable(node)) in wanted for node in number if _is_leaf(node)}
    shape = _Shape(
        [type(node) for node in number],
        [tuple(-1 if n is None else number[n] for n, _ in node.next_functions) for node in number],
        [number[edge.node] for edge in roots],
        leaves,
    )
    # A reentrant checkpoint, torch's or one like it, asks the engine whether all leaves are needed.
    if any("Checkpoint" in kind.__name__ for kind in shape.kinds):
        return _SplitPlan(shape, [], [], frozenset(), [])
    runs: dict[int, _Run] = {}
    run_of: dict[Node, int] = {}
    now: list[Node] = []
    for bundle in _bundles(graph):
        mine = [node for node in bundle if _is_leaf(node)]
        feeders = [node for node in bundle if graph.depth[node]]
        if not mine or not _can_wait(bundle, feeders, graph):
            now += mine
            continue
        depths = {graph.depth[node] for node in feeders}
        # Feeders at one depth cannot lead to each other; those at several have a run of their own.
        key = -len(runs) - 1 if len(depths) > 1 else max(depths, default=0)
        run = runs.setdefault(key, _Run([], []))
        run.leaves.extend(number[node] for node in mine)
        run.feeders.extend(number[node] for node in feeders)
        run_of.update(dict.fromkeys(bundle, key))
    places = {key: place for place, key in enumerate(runs)}
    of_roots = [
        places[run_of[edge.node]] if edge.node in run_of and not graph.depth[edge.node] else -1
        for edge in roots
    ]
    kept = frozenset(number[node] for node in run_of)
    return _SplitPlan(shape, list(runs.values()), of_roots, kept, [number[node] for node in now])


class _Run(NamedTuple):
    """One run of W, by numbers of nodes."""

    feeders: list[int]
    leaves: list[int]


class _Shape(NamedTuple):
    """What a plan depends on, beside hooks: all nodes and edges of a graph, and which leaves are inputs.

    Nodes are numbered in the order of the walk, so that each but the roots follows one that leads to it.
    """

    kinds: list[type]
    nexts: list[tuple[int, ...]]  # -1 for an edge that leads nowhere
    roots: list[int]
    leaves: dict[int, bool]

    def match(self, roots: Sequence[GradientEdge], wanted: set[int]) -> list[Node] | None:
        """Return the nodes of a graph that has this shape, by their numbers; None if it has another."""
        nodes: list[Any] = [None] * len(self.kinds)
        if len(roots) != len(self.roots):
            return None
        for edge, n in zip(roots, self.roots):
            if nodes[n] is not None and nodes[n] is not edge.node:
                return None
            nodes[n] = edge.node
        for n, kind in enumerate(self.kinds):
            expected = self.nexts[n]
            if type(nodes[n]) is not kind:
                return None
            found = nodes[n].next_functions
            if len(found) != len(expected):
                return None
            for (after, _), place in zip(found, expected):
                if place < 0:
                    if after is not None:
                        return None
                elif nodes[place] is None:
                    nodes[place] = after
                elif nodes[place] is not after:
                    return None
        if len(set(nodes)) < len(nodes):  # two different nodes of the shape are one here
            return None
        for n, is_input in self.leaves.items():
            if (id(_variable(nodes[n])) in wanted) is not is_input:
                return None
        return nodes


class _SplitPlan(NamedTuple):
    """How a backward is split, by numbers of nodes.

    Attributes:
        runs: of W; none if nothing can wait.
        of_roots: the run that a root's gradient enters, or -1.
        kept: the nodes that the runs need; none of them has saved tensors through hooks.
        now: leaves that cannot wait.
    """

    shape: _Shape
    runs: list[_Run]
    of_roots: list[int]
    kept: frozenset[int]
    now: list[int]

    def parts(
        self, nodes: list[Node], roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
    ) -> list[_SplitPart]:
        """Return the runs of W for a graph of these nodes; from now on, hooks keep the feeders' gradients."""
        parts = []
        for run in self.runs:
            feeders = [_Feeder(nodes[n], _ArrivedGradients()) for n in run.feeders]
            for feeder in feeders:
                feeder.node.register_prehook(feeder.arrived)
            parts.append(_SplitPart([], [], feeders, [_variable(nodes[n]) for n in run.leaves]))
        for edge, grad, place in zip(roots, grads, self.of_roots):
            if place >= 0:
                parts[place].roots.append(edge)
                parts[place].grads.append(grad)
        return parts


_KEPT_PLANS = 16  # stages of a worker, and shapes of their graphs


class _Plans(threading.local):
    """Plans of this thread's latest graphs, the most recently used first."""

    def __init__(self) -> None:
        self.newest: deque[_SplitPlan] = deque(maxlen=_KEPT_PLANS)


_plans = _Plans()


def _planned(roots: Sequence[GradientEdge], wanted: set[int]) -> tuple[_SplitPlan, list[Node]] | None:
    """Return the plan and the nodes of the graph behind ``roots``; None if it leads to no input.

    Most graphs equal an earlier one, node by node and edge by edge, and use its plan.
    """
    plans = _plans.newest
    for place, plan in enumerate(plans):
        nodes = plan.shape.match(roots, wanted)
        if nodes is not None and not any(_has_saved_through_hooks(nodes[n]) for n in plan.kept):
            if place:
                del plans[place]
                plans.appendleft(plan)
            return plan, nodes
    graph = _explore(roots, wanted)
    if not any(graph.depth.values()):
        return None
    plan = _plan(graph, roots, wanted)
    plans.appendleft(plan)
    return plan, list(graph.nexts)


def _bundles(graph: _Graph) -> Iterable[list[Node]]:
    of: dict[Node, list[Node]] = {}
    for node, nexts in graph.nexts.items():
        apart = [n for n in nexts if not graph.depth[n]]
        if apart or not graph.depth[node]:
            bundle = of.setdefault(node, [node])
            for n in apart:
                bundle = _join(of, bundle, n)
    return {id(bundle): bundle for bundle in of.values()}.values()


def _join(of: dict[Node, list[Node]], bundle: list[Node], node: Node) -> list[Node]:
    """Return ``bundle`` with ``node`` and everything connected to it."""
    other = of.get(node)
    if other is bundle:
        return bundle
    if other is None:
        other = [node]
    if len(other) > len(bundle):
        bundle, other = other, bundle
    bundle += other
    for n in other:
        of[n] = bundle
    return bundle


def _can_wait(bundle: list[Node], feeders: list[Node], graph: _Graph) -> bool:
    for node in feeders:
        if _is_joint(type(node)):
            return False
    if len(feeders) > 1 and _is_chain(feeders, graph):
        return False
    return not any(map(_has_saved_through_hooks, bundle))


def _is_chain(feeders: list[Node], graph: _Graph) -> bool:
    """Whether one of the feeders leads to another."""
    members = set(feeders)
    lowest = min(graph.depth[node] for node in feeders)
    stack, seen = list(feeders), set()
    while stack:
        for node in graph.nexts[stack.pop()]:
            if node in members:
                return True
            if graph.depth[node] > lowest and node not in seen:
                seen.add(node)
                stack.append(node)
    return False


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _variable(leaf: Any) -> torch.Tensor:
    variable: torch.Tensor = leaf.variable
    return variable


@lru_cache(maxsize=1024)
def _is_joint(kind: type) -> bool:
    return issubclass(kind, BackwardCFunction) or _JOINT.search(kind.__name__) is not None


# ---- what nodes have saved -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[tuple[str, str], ...]:
    """Return a node type's attributes: of each saved tensor (or tuple), the raw one and the unpacked one."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    custom = issubclass(kind, BackwardCFunction)
    return tuple((name, "saved_tensors" if custom else name[len("_raw") :]) for name in raw)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _has_saved_through_hooks(node: Node) -> bool:
    # Loops instead of generators: this runs for each node of each backward.
    for name, _ in _saved_names(type(node)):
        kept = getattr(node, name)
        if isinstance(kept, tuple):
            for one in kept:
                if one.unpack_hook is not None:
                    return True
        elif kept.unpack_hook is not None:
            return True
    return False


def _shelve(node: Node, shelf: list[torch.Tensor]) -> None:
    """Move what ``node`` has saved to ``shelf``, where it finds it until the shelf is cleared.

    I must retain the graph for W, and the engine has no other way to free a part of it.
    """

    def put(tensor: torch.Tensor) -> int:
        shelf.append(tensor)
        return len(shelf) - 1

    if _has_saved_through_hooks(node):
        return
    for name, given in _saved_names(type(node)):
        # Unpacking refuses a tensor that was overwritten since, as the engine does unless there are hooks.
        for kept, tensor in zip(_several(getattr(node, name)), _several(getattr(node, given))):
            # scalars may be Python's numbers, and free nothing
            if tensor is not None and tensor.dim():
                kept.register_hooks(put, shelf.__getitem__)


def _run(
    roots: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    keep_graph: bool = False,
) -> None:
    """Run a backward only through nodes that lead to ``leaves``; [] means all."""
    _engine_run_backward(
        tuple(roots),
        tuple(grads),
        keep_graph,
        False,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )
