"""A backward in two parts: gradients of a stage's inputs first, those of its weights later.

Zero-bubble schedules (Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2) call them B and
W, here I and W: the stage before waits for I alone, so W can fill what would be a bubble.

How a graph is split. A node is *upstream* if it leads to an input. Without the edges between upstream nodes the graph
falls apart into *bundles*: some weights, what was computed from weights alone (casts, transposes, norms of weights),
and the upstream nodes that pass gradients to these, the bundle's *feeders*.

    I   runs the upstream nodes, and a hook on each feeder keeps the gradient that reached it
    W   runs each bundle from those gradients, and no upstream node but its feeders

A feeder thus runs twice, and autograd computes each time only what is asked for: of a Linear or a convolution one
product in I and one in W. Bundles whose feeders stand at the same depth share one run of the engine.

What is not split, and runs as a whole in I:
- a bundle in which one feeder leads to another, as when a weight is used twice in a chain (a recurrence in Python, a
  layer applied again): W of the one would run through the gradients of activations to the other;
- a bundle with a feeder whose kernel gives all gradients together: BatchNorm, fused recurrent layers, PReLU, attention
  on a learned query, and every custom autograd.Function;
- a bundle whose tensors were saved through hooks, as ``torch.utils.checkpoint`` does: each run would recompute them.
If nothing is left to wait, I is one ordinary backward, and so it is with ``checkpoint(use_reentrant=True)`` somewhere,
which refuses to run for some leaves only. If no input wants a gradient, W is the ordinary backward.

Memory. What nodes outside of waiting bundles had saved is free after I. Feeders keep all they saved until W, besides
the gradients that reached them; after W nothing is left.

Not promised: a hook on the output of a feeder runs in both parts (its effect on the gradient counts once), and so does
``retain_grad`` of such a tensor, which then adds up twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

_Grads = tuple[torch.Tensor | None, ...]

# Nodes whose kernels compute the gradients of activations and of weights in one go.
_JOINT = re.compile("BatchNorm|Rnn|Lstm|Gru|Prelu|Attention")


def input_backward(
    roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Deferred:
    """I: add to ``.grad`` of ``inputs`` what ``run_backward(roots, grads)`` would; W is the result's ``run``.

    ``inputs``: the leaves whose gradients are wanted now; ValueError for any other tensor. Together, I and W call each
    leaf's hooks once, and leave the ``.grad`` that a whole backward leaves. The graph is used up: another backward
    through it fails, or gives wrong gradients.
    """
    for x in inputs:
        if not (x.is_leaf and x.requires_grad):
            raise ValueError(
                "inputs must be leaves that require a gradient, got one of shape "
                f"{list(x.shape)} with requires_grad={x.requires_grad} and grad_fn={x.grad_fn}; "
                "pass x.detach().requires_grad_() through the layers"
            )
    graph = _explore(roots, {id(x) for x in inputs}) if inputs and roots else None
    if graph is None or not any(graph.depth.values()):
        return Deferred([_Part(list(roots), list(grads), [], [])] if roots else [])
    # A reentrant checkpoint, of torch or written after it, asks the engine whether all leaves are wanted.
    whole = any("Checkpoint" in type(node).__name__ for node in graph.nexts)
    parts, kept, now = ([], set(), []) if whole else _plan(graph, roots, grads)
    if not parts:
        run_backward(roots, grads)
        return Deferred([])
    shelf: list[torch.Tensor] = []
    try:
        for node in graph.nexts:
            if node not in kept:
                _shelve(node, shelf)
        _run(roots, grads, [*inputs, *now], keep_graph=True)
    finally:
        shelf.clear()
    return Deferred(parts)


class Deferred:
    """What :func:`input_backward` left to do: W of one backward."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def run(self) -> None:
        """Add to the weights' ``.grad`` what is still missing. Once: a second call does nothing."""
        while self._parts:
            # Taken off the list, so that it is free when it is done.
            self._parts.pop(0).run()


class _Part(NamedTuple):
    """One run of the engine in W: from ``roots``, and from what reached ``feeders``, to ``leaves``; [] is to all."""

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
    """A hook that keeps the gradients that reach a node in I, and lets the same reach it in W.

    In W the hooks of the node's outputs come first once more; what they make of the gradients is dropped here.
    It must not know its node: the collector does not see a cycle through autograd.
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
    """A backward graph. ``nexts``: where each node's gradients go. ``depth``: the longest way to an input, or 0."""

    nexts: dict[Node, list[Node]]
    depth: dict[Node, int]


def _explore(roots: Sequence[GradientEdge], wanted: set[int]) -> _Graph:
    """Walk through the graph behind ``roots``. ``wanted``: identities of the input leaves."""
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


def _plan(
    graph: _Graph, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor]
) -> tuple[list[_Part], set[Node], list[torch.Tensor]]:
    """Return the runs of W, the nodes that they need, and the weights that cannot wait for them."""
    parts: dict[int, _Part] = {}
    part_of: dict[Node, _Part] = {}
    now: list[torch.Tensor] = []
    for bundle in _bundles(graph):
        leaves = [_variable(node) for node in bundle if _is_leaf(node)]
        feeders = [node for node in bundle if graph.depth[node]]
        if not leaves or not _can_wait(bundle, feeders, graph):
            now += leaves
            continue
        depths = {graph.depth[node] for node in feeders}
        # Feeders at one depth cannot lead to each other; those at several have a run to themselves.
        key = -len(parts) - 1 if len(depths) > 1 else max(depths, default=0)
        part = parts.setdefault(key, _Part([], [], [], []))
        part.leaves.extend(leaves)
        part_of.update(dict.fromkeys(bundle, part))
        for node in feeders:
            arrived = _ArrivedGradients()
            node.register_prehook(arrived)
            part.feeders.append(_Feeder(node, arrived))
    for edge, grad in zip(roots, grads):
        if edge.node in part_of and not graph.depth[edge.node]:
            part_of[edge.node].roots.append(edge)
            part_of[edge.node].grads.append(grad)
    return list(parts.values()), set(part_of), now


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
    """Return ``bundle`` with ``node`` and all that hangs together with it."""
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
    return (
        not any(_is_joint(type(node)) for node in feeders)
        and not (len(feeders) > 1 and _is_chain(feeders, graph))
        and not any(_has_saved_through_hooks(node) for node in bundle)
    )


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
    """Return a kind of node's attributes: each saved tensor (or tuple) as it is kept, and as it is given out."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    custom = issubclass(kind, BackwardCFunction)
    return tuple((name, "saved_tensors" if custom else name[len("_raw") :]) for name in raw)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _has_saved_through_hooks(node: Node) -> bool:
    return any(
        kept.unpack_hook is not None
        for name, _ in _saved_names(type(node))
        for kept in _several(getattr(node, name))
    )


def _shelve(node: Node, shelf: list[torch.Tensor]) -> None:
    """Move what ``node`` has saved to ``shelf``, where it finds it until the shelf is cleared.

    I must retain the graph for W's sake, and the engine knows no other way to let go of a part of it.
    """

    def put(tensor: torch.Tensor) -> int:
        shelf.append(tensor)
        return len(shelf) - 1

    if _has_saved_through_hooks(node):
        return
    for name, given in _saved_names(type(node)):
        # Giving out refuses a tensor that was overwritten since, as the engine does unless there are hooks.
        for kept, tensor in zip(_several(getattr(node, name)), _several(getattr(node, given))):
            if (
                tensor is not None and tensor.dim()
            ):  # scalars may stand for Python's numbers, and free nothing
                kept.register_hooks(put, shelf.__getitem__)


def _run(
    roots: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    keep_graph: bool = False,
) -> None:
    """Run a backward through what leads to ``leaves`` alone; [] is all."""
    _engine_run_backward(
        tuple(roots),
        tuple(grads),
        keep_graph,
        False,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def run_backward(edges: Sequence[GradientEdge], grads: Sequence[torch.Tensor]) -> None:
    """Do as ``torch.autograd.backward`` without its checks of shapes, which take as long as a small layer's backward.

    The gradients were made by autograd itself for these very outputs, so they fit. ``_engine_run_backward`` is torch's
    own entry for this, and private: the tests run it under the oldest and the newest torch that we support.
    """
    _engine_run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
