"""Messages between stages: pytrees of tensors and plain values, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Message(str, Enum):
    """Kinds of messages. ``words`` names one in a sentence."""

    words: str

    def __new__(cls, letter: str, words: str = "") -> Message:
        kind = str.__new__(cls, letter)
        kind._value_, kind.words = letter, words
        return kind

    ACTIVATION = "F", "the activation"
    GRADIENT = "B", "the gradient"
    SKIP_ACTIVATION = "X", "the skipped activation"
    SKIP_GRADIENT = "Y", "the skipped activation's gradient"
    TIED_GRADIENTS = "T", "the tied gradients"
    NORM_PART = "N", "the gradient norm"
    TOTAL_NORM = "C", "the norm of all gradients"
    EVALUATION = "E", "the activation (of an evaluation)"
    RESULT = "R", "the result (of an evaluation)"
    REPLICA_PART = "A", "what another replica found"
    SUMS_READY = "Z", "the sum of the gradients"  # within a process: the sums use no link
    LOSS = "L", "the loss"
    REFERENCE_UPDATE = "V", "the update"
    COPY = "K", "a copy of the neighbour's state"


# Part of every micro-batch's training.
OF_MICRO_BATCHES = frozenset(
    (Message.ACTIVATION, Message.GRADIENT, Message.SKIP_ACTIVATION, Message.SKIP_GRADIENT)
)
# Small, mostly on the CPU, and kept by the caller: through the host's memory, with any link.
BY_HOST = Message.RESULT


def on_wire(kind: Message, wire_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which a kind of message is sent; None: its own.

    Gradients of tied weights, to which no loss scale applies any more, would underflow in float16.
    """
    narrow = kind in OF_MICRO_BATCHES or (kind is Message.TIED_GRADIENTS and wire_dtype is torch.bfloat16)
    return wire_dtype if narrow else None


class Key(NamedTuple):
    """Names a message: its kind, its pipeline, and the stage replicas that it goes between."""

    kind: Message
    pipeline: int
    source: int  # stage replica
    target: int  # stage replica
    batch: int
    micro_batch: int

    def __str__(self) -> str:
        of = f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"{Message(self.kind).words}{of} of batch {self.batch}"


class Channel(NamedTuple):
    """Messages of one kind, of one pipeline, from one stage replica to another. They keep their order."""

    kind: Message
    pipeline: int
    source: int
    target: int

    @classmethod
    def of(cls, key: Key) -> Channel:
        """Return the channel of a message."""
        return cls(*key[:4])


# ---- values ------------------------------------------------------------------------------------------------------


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in pytree.tree_flatten(value)[0] if isinstance(x, torch.Tensor)]


def wanting_gradients(value: Any) -> list[torch.Tensor]:
    """Return the tensors whose gradients go back to the source of ``value``."""
    return [t for t in tensors_of(value) if t.requires_grad]


def detached(value: Any) -> Any:
    """Return the value with tensors that share memory but are leaves; TypeError if it cannot be a message."""

    def leaf(x: Any) -> Any:
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else described(x)

    return leaf(value) if isinstance(value, torch.Tensor) else pytree.tree_map(leaf, value)


def flip_bit(tensors: Sequence[torch.Tensor], bit: int) -> None:
    """Flip a bit of tensors in memory; ``bit`` counts through all of them, and then from the first again."""
    place, bit = divmod(bit % (8 * sum(t.nbytes for t in tensors)), 8)
    for tensor in tensors:
        if place < tensor.nbytes:
            tensor.data.view(-1).view(torch.uint8)[place] ^= 1 << bit
            return
        place -= tensor.nbytes


def with_flipped_bit(value: Any, bit: int) -> Any:
    """Return the value with a copy of its first nonempty tensor, with one bit flipped."""
    first = next(t for t in tensors_of(value) if t.nbytes)
    copy = first.detach().clone(memory_format=torch.contiguous_format)
    flip_bit([copy], bit)
    copy.requires_grad_(first.requires_grad)
    return pytree.tree_map_only(torch.Tensor, lambda t: copy if t is first else t, value)


class TensorInfo(NamedTuple):
    """The description of a tensor in a format."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


def described(leaf: Any) -> Any:
    """Return the description of a leaf in a format."""
    if isinstance(leaf, torch.Tensor):
        return TensorInfo(tuple(leaf.shape), str(leaf.dtype)[6:], leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.Size):
        return leaf
    raise TypeError(
        f"a stage returned a {type(leaf).__name__}; between stages only tensors, None, bool, int, float, str and "
        "containers of them can be sent (register other containers with torch.utils._pytree)"
    )
