"""What travels between stages: a pytree of tensors and plain values, and the header that describes it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Message(str, Enum):
    """What travels between stages."""

    ACTIVATION = "F"
    GRADIENT = "B"
    SKIP_ACTIVATION = "X"
    SKIP_GRADIENT = "Y"
    TIED_GRADIENTS = "T"
    NORM_PART = "N"
    TOTAL_NORM = "C"
    EVALUATION = "E"
    RESULT = "R"
    REPLICA_PART = "A"
    SUMS_READY = "Z"
    LOSS = "L"
    REFERENCE_UPDATE = "V"

    __hash__ = str.__hash__  # an Enum's own is slow


class Key(NamedTuple):
    """Names a message: what it is, whose it is, and which stage it is for."""

    kind: Message
    pipeline: int
    source: int  # seat
    seat: int  # destination
    batch: int
    micro_batch: int

    def __str__(self) -> str:
        of = f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"{NAMES[self.kind]}{of} of batch {self.batch}"


KINDS = "FBXYTNCERALV"  # of messages that come through links

NAMES = {
    "F": "the activation",
    "B": "the gradient",
    "X": "the skipped activation",
    "Y": "the skipped activation's gradient",
    "T": "the tied gradients",
    "N": "the gradient norm",
    "C": "the norm of all gradients",
    "E": "the activation (of an evaluation)",
    "R": "the result (of an evaluation)",
    "A": "what another replica found",
    "Z": "the sum of the gradients",
    "L": "the loss",
    "V": "the update",
}


class Channel(NamedTuple):
    """Messages of one kind, of one pipeline, from one seat to another. They keep their order."""

    kind: Message
    pipeline: int
    source: int  # seat
    seat: int  # destination

    @classmethod
    def of(cls, key: Key) -> Channel:
        return cls(*key[:4])


@dataclass(frozen=True)
class Header:
    """Structure of a message. ``leaves``: a tensor as (shape, dtype name, requires_grad), or a plain value."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def to_bytes(self) -> bytes:
        structure = pytree.treespec_dumps(self.structure)
        check_structure(structure)
        return json.dumps([structure, [_leaf_to_json(x) for x in self.leaves]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        structure, leaves = json.loads(data)
        check_structure(structure)
        return cls(pytree.treespec_loads(structure), tuple(_leaf_from_json(x) for x in leaves))


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


def _leaf_to_json(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, TensorInfo):
        return {"tensor": [list(leaf.shape), leaf.dtype, leaf.requires_grad]}
    return {"size": list(leaf)} if isinstance(leaf, torch.Size) else {"value": leaf}


def _leaf_from_json(leaf: dict[str, Any]) -> Any:
    if "tensor" in leaf:
        shape, dtype, requires_grad = leaf["tensor"]
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise TypeError(f"a message has a tensor of {dtype!r}, which is no dtype of torch")
        return TensorInfo(tuple(shape), dtype, requires_grad)
    return torch.Size(leaf["size"]) if "size" in leaf else leaf["value"]


# What a defaultdict between stages may make; as torch names them.
_FACTORIES = {("builtins", kind.__name__) for kind in (dict, list, set, tuple, int, float, bool, str)}


def check_structure(text: str) -> None:
    """Refuse, with TypeError, what ``treespec_loads`` would import or look up by a name that a message gives: it may
    come from a stranger. Classes of enumerations count that are loaded already.
    """
    _check_node(json.loads(text)[1])


def _check_node(node: dict[str, Any]) -> None:
    context = node["context"]
    if isinstance(context, str):
        try:
            json.loads(context, object_hook=_check_enumeration)
        except json.JSONDecodeError:
            pass  # the registered name of a named tuple
    elif node["type"] == "collections.defaultdict":
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in _FACTORIES:
            raise TypeError(
                f"a defaultdict of {'.'.join(map(str, factory))} cannot travel between stages; use one of "
                f"{', '.join(sorted(name for _, name in _FACTORIES))}, or a dict"
            )
    for child in node["children_spec"]:
        _check_node(child)


def _check_enumeration(found: dict[str, Any]) -> dict[str, Any]:
    if "__enum__" in found:
        module, _, name = found["fqn"].partition(":")
        place: Any = sys.modules.get(module)
        for part in name.split("."):
            place = getattr(place, part, None)
        if not (isinstance(place, type) and issubclass(place, Enum)):
            raise TypeError(f"{found['fqn']} in a message is no enumeration that this process has loaded")
    return found


def describe(value: Any) -> tuple[Header, list[torch.Tensor]]:
    """The header of a value and its tensors, detached. Plain leaves must be None, bool, int, float or str."""
    leaves, structure = pytree.tree_flatten(value)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Header(structure, tuple(leaf_info(leaf) for leaf in leaves)), tensors


def leaf_info(leaf: Any) -> Any:
    """What a header says of a leaf."""
    if isinstance(leaf, torch.Tensor):
        return TensorInfo(tuple(leaf.shape), str(leaf.dtype)[6:], leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.Size):
        return leaf
    raise TypeError(
        f"a stage returned a {type(leaf).__name__}; between stages only tensors, None, bool, int, float, str and "
        "containers of them can travel (register other containers with torch.utils._pytree)"
    )


def assemble(header: Header, tensors: list[torch.Tensor]) -> Any:
    """The value that ``describe`` took apart; tensors that required gradients are leaves that do again."""
    stream = iter(tensors)
    leaves = [
        next(stream).requires_grad_(x.requires_grad) if isinstance(x, TensorInfo) else x
        for x in header.leaves
    ]
    return pytree.tree_unflatten(leaves, header.structure)


def wanting_gradients(value: Any) -> list[torch.Tensor]:
    """The tensors whose gradients go back to where ``value`` came from."""
    return [t for t in tensors_of(value) if t.requires_grad]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in pytree.tree_flatten(value)[0] if isinstance(x, torch.Tensor)]
