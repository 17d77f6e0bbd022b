"""Pieces of a graph that must stay together: a value changed in place that shares memory with another.

On one device ``left = x[:, :4]; left.mul_(2)`` changes ``x``; after a cut they would be two tensors with
separate memory. A changed value itself may cross: the pieces that change it pass it on in its changed state.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch._ops import OpOverload

# Functions that may return their first argument, or a part of its memory.
_VIEW_NAMES = """
T mT H mH real imag data getattr getitem view view_as view_as_real view_as_complex reshape
reshape_as transpose permute t flatten unflatten ravel squeeze unsqueeze expand expand_as
broadcast_to narrow select split chunk tensor_split hsplit vsplit dsplit split_with_sizes unbind
unfold diagonal detach contiguous to type type_as cpu cuda float double half bfloat16 movedim
moveaxis swapaxes swapdims as_strided positive dropout dropout1d dropout2d dropout3d alpha_dropout
feature_dropout feature_alpha_dropout
"""
_IN_PLACE_NAMES = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor"
_VIEWS, _IN_PLACE = frozenset(_VIEW_NAMES.split()), frozenset(_IN_PLACE_NAMES.split())
_VIEW_MODULES = nn.Flatten | nn.Unflatten | nn.Identity | nn.modules.dropout._DropoutNd


def joined(pieces: Sequence[list[fx.Node]], model: nn.Module) -> list[list[fx.Node]]:
    """Join ``pieces`` of the traced graph of ``model`` where a cut would change a result."""
    order = {node: n for n, node in enumerate(node for piece in pieces for node in piece)}
    piece_of = {node: s for s, piece in enumerate(pieces) for node in piece}
    sharing = _sharing(order, model)
    first = list(range(len(pieces)))  # by piece, the piece that it must stay with
    for node in order:
        changed = _changed(node, model)
        if changed is None:
            continue
        if any(
            member.op == "get_attr" for member in sharing[changed]
        ):  # a buffer, of which each stage has a copy
            users = {user for member in sharing[changed] for user in member.users if user in piece_of}
            places = [piece_of[user] for user in users]
            first[max(places)] = min(first[max(places)], *places)
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
    """Return, by value, all values that may share its memory, with itself."""
    groups = {node: [node] for node in order}
    for node in order:
        source = _changed(node, model) or _viewed(node, model)
        if source is not None and groups[source] is not groups[node]:
            groups[source].extend(groups[node])
            for member in groups[node]:
                groups[member] = groups[source]
    return groups


def _viewed(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the value that a node's result may share memory with, if any."""
    source = node.args[0] if node.args else None
    if isinstance(node.target, OpOverload):
        aliased = _argument(node, writes=False)
        if aliased is not None:
            return aliased
    if not isinstance(source, fx.Node):
        return None
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        # Third-party modules are unknown; stochastic depth, for example, returns its input in evaluation.
        is_view = isinstance(module, _VIEW_MODULES) or not type(module).__module__.startswith("torch.nn.")
    else:
        is_view = node.op in ("call_method", "call_function") and _name(node) in _VIEWS
        is_view |= hasattr(node.target, "function")  # a custom function is unknown, too
    return source if is_view else None


def _changed(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the value that a node changes in place, if any."""
    if isinstance(node.target, OpOverload):
        return _argument(node, writes=True)
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


def _argument(node: fx.Node, writes: bool) -> fx.Node | None:
    """Return the first value that an operator, by its schema, writes to, or else only shares memory with."""
    target: Any = node.target
    for n, declared in enumerate(target._schema.arguments):
        alias = declared.alias_info
        value = node.args[n] if n < len(node.args) else node.kwargs.get(declared.name)
        if alias is not None and alias.is_write == writes and isinstance(value, fx.Node):
            return value
    return None


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket.__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_asked_to(node: fx.Node) -> bool:
    """Return whether a function's argument ``inplace`` is true."""
    if not callable(node.target):
        return False
    try:
        arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # C functions have no signature
        return False
    return bool(arguments.get("inplace", False))
