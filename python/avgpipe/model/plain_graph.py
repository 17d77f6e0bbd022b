"""An exported program as a graph like those of torch.fx: with the model's arguments and output."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from avgpipe.model.example import Arguments
from avgpipe.model.tracing import attribute
from avgpipe.model.units import module_of, submodule

_Check = Callable[..., Any]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOT_MET = "the model was exported for inputs like example_inputs, and these differ"


class Leaves(nn.Module):
    """Flattens an argument; ValueError if its structure is not that of the example's."""

    def __init__(self, name: str, example: Any) -> None:
        super().__init__()
        self.name, self.spec = name, pytree.tree_structure(example)

    def forward(self, value: Any) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        if spec != self.spec:
            raise ValueError(f"{_NOT_MET}: {self.name} is {spec}, and was {self.spec}")
        return leaves


class Nested(nn.Module):
    """Rebuilds the model's output from its leaves."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *leaves: Any) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)


class Guards(nn.Module):
    """Refuses inputs that the graph was not made for.

    torch.export also excludes lengths for which the model's code behaves normally, such as the whole length
    of a table. Inputs as long as the example's, for which the layers were checked, need not meet these
    conditions.

    Args:
        leaves: Leaves of the exported inputs.
        proved: Leaves of the example, equally long or a step longer.
        training: Conditions of torch.export on sizes, by AssertionError.
        evaluation: The same, in evaluation.
    """

    def __init__(
        self, leaves: Sequence[Any], proved: Sequence[Any], training: _Check, evaluation: _Check
    ) -> None:
        super().__init__()
        self.constants = {n: leaf for n, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self.dims = {n: leaf.dim() for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self.longer = {
            (n, at): b.shape[at]
            for n, (a, b) in enumerate(zip(leaves, proved))
            if isinstance(a, torch.Tensor)
            for at in range(a.dim())
            if a.shape[at] != b.shape[at]
        }
        self.checks = {True: training, False: evaluation}

    def forward(self, *leaves: Any) -> None:
        for n, constant in self.constants.items():
            if leaves[n] != constant:
                raise ValueError(f"{_NOT_MET}: {constant!r} became {leaves[n]!r}")
        for n, dims in self.dims.items():
            if leaves[n].dim() != dims:
                raise ValueError(f"{_NOT_MET}: a tensor of {dims} dimensions became {list(leaves[n].shape)}")
        asked = list(leaves)
        for (n, at), length in self.longer.items():
            if leaves[n].shape[at] == length:
                asked[n] = asked[n].narrow(at, 0, length - 1)
        try:
            self.checks[self.training](*asked)
        except AssertionError as error:
            broken = str(error).removeprefix("Guard failed: ")
            raise ValueError(f"{_NOT_MET}: it needs {broken}") from error


def plain_graph(model: nn.Module, program: Any, call: Arguments) -> tuple[fx.Graph, dict[str, Any]]:
    """Return a program's graph with the model's arguments and output, and the objects that it names."""
    module = program.module()
    graph, root = fx.Graph(), dict[str, Any]()
    graph.output(graph.graph_copy(module.graph, {}))
    checks = [n for n in graph.nodes if n.op == "call_module" and str(n.target) == "_guards_fn"]
    root["_guards"] = module._guards_fn.forward if checks else _nothing
    for node in checks:
        graph.erase_node(node)
    _keep_batch_norms(graph, root, model)
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # autocast, or another device, would violate its assertion
        elif node.op == "get_attr":
            if not node.users:
                graph.erase_node(node)
                continue
            root[node.target] = _found(model, module, node.target)
    _take_arguments(graph, root, call)
    result = next(n for n in graph.nodes if n.op == "output")
    spec = program.call_spec.out_spec
    (leaves,) = result.args
    if spec != pytree.tree_structure(0):
        root["_output"] = Nested(spec)
        with graph.inserting_before(result):
            result.args = (graph.call_module("_output", tuple(leaves)),)
    else:
        result.args = (leaves[0],)
    return graph, root


def _nothing(*_: Any) -> None:
    pass


def _found(model: nn.Module, module: nn.Module, name: str) -> Any:
    """Return the model's own tensor of a name, or else the one that the export made."""
    try:
        return attribute(model, name)
    except AttributeError:
        return attribute(module, name)


def _keep_batch_norms(graph: fx.Graph, root: dict[str, Any], model: nn.Module) -> None:
    """Call BatchNorms instead of their operators, which would update the statistics with every micro-batch."""
    for node in reversed(graph.nodes):
        name = module_of(node)
        module = submodule(model, name) if name else None
        kind = next((c for c in type(module).__mro__ if c in _BATCH_NORMS), None)
        if module is None or kind is None:
            continue
        if node.target is torch.ops.aten.batch_norm.default:
            root.setdefault(name, _only_the_norm(module, kind))
            with graph.inserting_before(node):
                call = graph.call_module(name, node.args[:1])
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
        elif isinstance(node.target, OpOverload) and not node.users:
            counted = node.args[0] if node.args else None
            counts = isinstance(counted, fx.Node) and str(counted.target) == f"{name}.num_batches_tracked"
            if counts or not node.target._schema.is_mutable:
                graph.erase_node(node)


def _only_the_norm(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a subclass's layer as one of torch's, with the same tensors: the rest of its work is in the graph."""
    if type(module) is kind:
        return module
    norm = kind.__new__(kind)
    nn.Module.__init__(norm)
    own = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"
    }
    vars(norm).update(own, _parameters=dict(module._parameters), _buffers=dict(module._buffers))
    return norm


def _take_arguments(graph: fx.Graph, root: dict[str, Any], call: Arguments) -> None:
    """Make the graph take the model's arguments, instead of the tensors in them."""
    old = [n for n in graph.nodes if n.op == "placeholder"]
    given = [*zip(_names_of_args(call), call.args), *call.kwargs.items()]
    first = next(iter(graph.nodes))
    leaves: list[fx.Node] = []
    with graph.inserting_before(first):
        taken = [graph.placeholder(name) for name, _ in given]
        for node, (name, value) in zip(taken, given):
            if pytree.tree_structure(value) == pytree.tree_structure(0):
                leaves.append(node)
                continue
            root[f"_{name}"] = Leaves(name, value)
            apart = graph.call_module(f"_{name}", (node,))
            numbers = range(len(pytree.tree_leaves(value)))
            leaves += [graph.call_function(operator.getitem, (apart, n)) for n in numbers]
        graph.call_module("_guards", tuple(leaves))
    for before, leaf in zip(old, leaves, strict=True):
        before.replace_all_uses_with(leaf)
        leaf.meta = dict(before.meta)
        graph.erase_node(before)


def _names_of_args(call: Arguments) -> list[str]:
    names = list(call.named)[: len(call.args)]
    return names if len(names) == len(call.args) else [f"args_{n}" for n in range(len(call.args))]


class Place(nn.Module):
    """Holds the device of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.probe: torch.Tensor
        self.register_buffer("probe", torch.empty(0), persistent=False)

    def forward(self) -> torch.device:
        return self.probe.device


def place_anew(graph: fx.Graph, root: dict[str, Any], device: torch.device) -> None:
    """Create tensors on the device of the stage, instead of the example's."""
    for node in list(graph.nodes):
        if not any(value == device for value in pytree.tree_leaves((node.args, dict(node.kwargs)))):
            continue
        root["_place"] = Place()
        with graph.inserting_before(node):
            place = graph.call_module("_place")
        place.meta = dict(node.meta)
        node.args, node.kwargs = _replaced((node.args, dict(node.kwargs)), device, place)


def _replaced(value: Any, old: Any, new: Any) -> Any:
    return pytree.tree_map(lambda leaf: new if leaf == old else leaf, value)
