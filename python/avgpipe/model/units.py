"""The places where the graph of an exported model is cut: between the modules that recorded its operators.

A unit is a module that is not cut inside: an entry of a list of blocks, such as the layers of a transformer,
or else a module that holds no such list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn


def units_of(graph: fx.Graph, model: nn.Module) -> dict[fx.Node, str]:
    """Return by node the name of its unit; "" for nodes between units."""
    lists = _lists_of_blocks(model)
    return {node: _unit(node, model, lists) for node in graph.nodes}


def pieces_of(graph: fx.Graph, units: Mapping[fx.Node, str]) -> list[list[fx.Node]]:
    """Cut before the first operator of every unit but the first."""
    pieces: list[list[fx.Node]] = [[]]
    last = ""
    for node in graph.nodes:
        if node.op == "output":
            break
        if units[node] and last and units[node] != last:
            pieces.append([])
        last = units[node] or last
        pieces[-1].append(node)
    return pieces


def _lists_of_blocks(model: nn.Module) -> set[str]:
    """Return the names of lists of at least two entries, all of one class."""
    lists = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    return {name for name, found in lists if len(found) > 1 and len(set(map(type, found.children()))) == 1}


def _unit(node: fx.Node, model: nn.Module, lists: set[str]) -> str:
    """Return the name of the unit of a node; "" for nodes between units."""
    for name in stack_of(node):
        if not name:
            continue
        module = submodule(model, name)
        if module is None:
            break
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            continue
        if name.rpartition(".")[0] in lists or not any(inside.startswith(name + ".") for inside in lists):
            return name
    return ""


def stack_of(node: fx.Node) -> list[str]:
    """Return the names of the modules that a node was recorded in, from the outermost on."""
    entries = (node.meta.get("nn_module_stack") or {}).values()
    # The empty entry is one of torch's own making; a second call of a module has a number after its name.
    return [name.partition("@")[0] for name, kind in entries if isinstance(name, str) and name != str(kind)]


def module_of(node: fx.Node) -> str:
    return next(reversed(stack_of(node)), "")


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# ---- sizes ---------------------------------------------------------------------------------------------------------


def take_sizes_from_near(graph: fx.Graph, pieces: Sequence[list[fx.Node]]) -> None:
    """Make pieces compute sizes from tensors that they get anyway, as the model's code does, so that none are sent."""
    piece_of = {node: s for s, piece in enumerate(pieces) for node in piece}
    for s, piece in enumerate(pieces[1:], 1):
        tensors = [
            node
            for earlier in pieces[:s]
            for node in earlier
            if isinstance(node.meta.get("val"), torch.Tensor)
            and node.op != "get_attr"
            and any(piece_of.get(user) == s for user in node.users)
        ]
        found: dict[fx.Node, fx.Node | None] = {}
        with graph.inserting_before(piece[0]):
            for node in piece:
                for source in node.all_input_nodes:
                    if piece_of[source] < s and _is_size(source):
                        near = _near(source, tensors, found)
                        if near is not None:
                            node.replace_input_with(source, near)
        made = [node for node in graph.nodes if node not in piece_of and node.op != "output"]
        piece_of |= dict.fromkeys(made, s)
        piece[:0] = made


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _near(size: fx.Node, tensors: Sequence[fx.Node], found: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """Return a node that computes ``size`` from ``tensors``; None if there is no way."""
    if size not in found:
        made = _by_a_dimension(size, tensors) or _by_the_same_formula(size, tensors, found)
        if made is not None:
            made.meta = dict(size.meta)
        found[size] = made
    return found[size]


def _by_a_dimension(size: fx.Node, tensors: Sequence[fx.Node]) -> fx.Node | None:
    wanted = size.meta["val"].node.expr
    for tensor in tensors:
        for n, dimension in enumerate(tensor.meta["val"].shape):
            if isinstance(dimension, torch.SymInt) and dimension.node.expr == wanted:
                return size.graph.call_function(torch.ops.aten.sym_size.int, (tensor, n))
    return None


def _by_the_same_formula(
    size: fx.Node, tensors: Sequence[fx.Node], found: dict[fx.Node, fx.Node | None]
) -> fx.Node | None:
    sources = size.all_input_nodes
    if size.op != "call_function" or not sources or not all(map(_is_size, sources)):
        return None
    near = {source: _near(source, tensors, found) for source in sources}
    if None in near.values():
        return None
    return size.graph.node_copy(size, lambda source: near[source] or source)
