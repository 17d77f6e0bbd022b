"""Merges the graph of a module in training and its graph in evaluation into one.

A recording of a forward has a fixed ``self.training``, and keeps its consequences: a probability of dropout,
or ``training=True``. So a module is recorded twice. Where the graphs differ in such constants only, every
forward chooses the constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

# Recorded where contiguous() copies, which depends on the operators before.
_SAME_VALUES = torch.ops.aten.contiguous.default


class Choice(nn.Module):
    """Returns its first argument in training, its second in evaluation. Graphs call it by the name ``CHOICE``."""

    def forward(self, training: Any, evaluation: Any) -> Any:
        return training if self.training else evaluation


CHOICE = "_by_mode"


class Differs(ValueError):
    """A module differs between training and evaluation by more than constants; the message says where."""


Value = Callable[[str], Any]  # returns the value of a name in a graph


def merged(training: fx.Graph, evaluation: fx.Graph, value: Value, value_of_other: Value) -> bool:
    """Make ``training`` choose constants by the mode where ``evaluation`` has others; return whether there are any.

    Args:
        training: The graph recorded in training, which is changed.
        evaluation: The graph recorded in evaluation.
        value, value_of_other: Return the value of a name that the first, or the other, graph reads.

    Raises:
        Differs: The graphs differ in more.
    """
    twins: dict[fx.Node, fx.Node] = {}  # by node of the evaluation graph
    trained, evaluated = list(training.nodes), list(evaluation.nodes)
    chosen, i = False, 0
    for node in evaluated:
        while node.target is not _SAME_VALUES and i < len(trained) and trained[i].target is _SAME_VALUES:
            i += 1
        mine = trained[i] if i < len(trained) else None
        if node.target is _SAME_VALUES and (mine is None or mine.target is not _SAME_VALUES):
            twins[node] = _copied(training, twins[node.all_input_nodes[0]])
            continue
        if mine is None or not _alike(mine, node, value, value_of_other):
            raise Differs(f"{_said(mine)} in training and {_said(node)} in evaluation")
        chosen |= _choose(mine, node, twins)
        twins[node] = mine
        i += 1
    if i < len(trained):
        raise Differs(f"{_said(trained[i])} in training and nothing in evaluation")
    return chosen


def _copied(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Insert a copy with the same values between ``value`` and its users."""
    with graph.inserting_after(value):
        copied = graph.call_function(_SAME_VALUES, (value,))
    value.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    return copied


def _alike(a: fx.Node, b: fx.Node, value: Value, value_of_other: Value) -> bool:
    if not a.op == b.op == "get_attr":
        return a.op == b.op and a.target == b.target
    x, y = value(str(a.target)), value_of_other(str(b.target))
    if isinstance(x, fx.GraphModule) and isinstance(y, fx.GraphModule):
        return x.code == y.code  # a region under no_grad, or the like
    return x is y or (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and torch.equal(x, y))


def _choose(mine: fx.Node, other: fx.Node, twins: dict[fx.Node, fx.Node]) -> bool:
    """Replace constants of ``mine`` where ``other`` has others; return whether there are any."""
    (args, kwargs), (args_of_other, kwargs_of_other) = _arguments(mine), _arguments(other)
    found = False

    def either(a: Any, b: Any) -> Any:
        nonlocal found
        if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
            return type(a)(either(x, y) for x, y in zip(a, b))
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return {name: either(a[name], b[name]) for name in a}
        if isinstance(a, slice) and isinstance(b, slice):
            return slice(*(either(x, y) for x, y in zip(_ends(a), _ends(b))))
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and _source(twins[b]) is _source(a):
            return a
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            raise Differs(f"{_said(mine)} in training, and in evaluation on another value")
        if type(a) is type(b) and a == b:
            return a
        found = True
        with mine.graph.inserting_before(mine):
            choice = mine.graph.call_module(CHOICE, (a, b))
        choice.meta = dict(mine.meta)  # it belongs to the same module, so to the same piece
        return choice

    args, kwargs = either(args, args_of_other), either(kwargs, kwargs_of_other)
    if found:
        mine.args, mine.kwargs = args, kwargs
    return found


def _ends(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _source(node: fx.Node) -> fx.Node:
    """Return the source of a node before copies with the same values."""
    while node.target is _SAME_VALUES:
        node = node.all_input_nodes[0]
    return node


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments; for an operator all of them, with defaults."""
    if not isinstance(node.target, OpOverload):
        return node.args, dict(node.kwargs)
    args, kwargs = list(node.args), dict(node.kwargs)
    for n, declared in enumerate(node.target._schema.arguments):
        if n < len(node.args) or declared.name in kwargs or not declared.has_default_value():
            continue
        if declared.kwarg_only or n > len(args):
            kwargs[declared.name] = declared.default_value
        else:
            args.append(declared.default_value)
    return tuple(args), {name: kwargs[name] for name in sorted(kwargs)}


def _said(node: fx.Node | None) -> str:
    """Describe a node in words: the function or module that it calls."""
    if node is None:
        return "nothing"
    if node.op == "output":
        return "its end"
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    is_inside = node.op != "call_module" and stack
    where = stack[-1][0] if is_inside and isinstance(stack[-1][0], str) else ""
    return name + (f" of {where!r}" if where else "")
