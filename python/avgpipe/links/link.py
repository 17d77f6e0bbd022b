"""The interface of links, the mailbox that they fill, and the link within a process.

Arrived messages wait in the mailbox for the lane that needs them; the scheduler sleeps on it until one does.
The scheduler's thread alone reads and takes. It polls the links that have no thread of their own
(``sources``) when the bell has rung; threads, and other processes, ring it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import ReadyOnEvent, has_streams, ready_on_event
from avgpipe.ranks.environment import cores
from avgpipe_ext.ring import Bell

if TYPE_CHECKING:
    pass

_SPIN_S = 200e-6


class Link(ABC):
    """This worker's connection to another one.

    Attributes:
        name: Its name in messages.
        latency_s: The shortest time that a message took, by its kind, if that is measured.
    """

    name: str
    latency_s: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def send(self, key: Key, value: Any) -> None:
        """Send a message, without ever waiting for the other end.

        The caller may change ``value`` afterwards, except results of a micro-batch's steps
        (``OF_MICRO_BATCHES``): these may be read later in place.
        """

    def send_flipped(self, key: Key, value: Any, bit: int) -> None:
        """Send a message in which one bit is flipped in transit, for a test."""
        from avgpipe.links.transport import with_flipped_bit

        self.send(key, with_flipped_bit(value, bit))

    def leave(self) -> None:
        """Announce to the other end that no more is sent or taken; do not wait."""

    def close(self, patience_s: float) -> None:
        """Leave, and wait at most ``patience_s`` seconds until the other end has the last messages."""


class Mailbox:
    """Messages that have arrived, and the failures of those that will not arrive.

    Args:
        bell: The bell that this worker's peers ring; by default one of this process.
        neighbours: Workers that compute on this host at the same time, including this one. A wait spins at
            first if there is a processor for each.
        ranks: The rank that holds each stage replica; by default replica k is at rank k.
    """

    def __init__(
        self, bell: Bell | None = None, neighbours: int = 1, ranks: Sequence[int] | None = None
    ) -> None:
        self._ranks = ranks
        self.messages: dict[Key, Any] = {}
        self.sources: list[Callable[[], None]] = []
        self.bell = bell or Bell.local()
        self._spin_s = _SPIN_S if neighbours <= cores() else 0.0
        self._seen = -1
        self._failure: BaseException | None = None
        self._lost: dict[int, BaseException] = {}  # ranks from which nothing more comes

    def put(self, key: Key, value: Any) -> None:
        """Deliver from the scheduler's own thread."""
        self.messages[key] = value

    def deliver(self, key: Key, value: Any) -> None:
        """Deliver from any thread."""
        self.messages[key] = value
        self.bell.ring()

    def fail(self, failure: BaseException, source: int | None = None) -> None:
        """Make every later wait for missing messages raise ``failure`` (the first one stays).

        With ``source``, only waits for messages of that rank: it may have left because it was done.
        """
        if source is not None:
            self._lost.setdefault(source, failure)
        elif self._failure is None:
            self._failure = failure
        self.bell.ring()

    def __contains__(self, key: Key) -> bool:
        return key in self.messages

    def receive(self, keys: Iterable[Key]) -> None:
        """Make the current stream wait for messages that have arrived, so that their takers need not wait."""
        for key in keys:
            message = self.messages[key]
            if isinstance(message, ReadyOnEvent):
                self.messages[key] = message.received()

    def take(self, key: Key) -> Any:
        message = self.messages.pop(key)
        return message.received() if isinstance(message, ReadyOnEvent) else message

    def collect(self) -> None:
        """Poll the sources if the bell has rung since the last time."""
        count = self.bell.count()
        if count != self._seen:
            self._seen = count  # before polling: what arrives meanwhile rings once more
            for source in self.sources:
                source()

    def pause(self, limit_s: float) -> None:
        """Sleep until the bell rings, at most ``limit_s``."""
        self.bell.wait(self._seen, limit_s, 0.0)

    def raise_failure(self, awaited: Callable[[], Iterable[Key]] = tuple) -> None:
        if self._failure is not None:
            raise self._failure
        if self._lost:
            for key in awaited():
                rank = key.source if self._ranks is None else self._ranks[key.source]
                if rank in self._lost:
                    raise self._lost[rank]

    def wait_until(
        self,
        arrived: Callable[[], bool],
        timeout_s: float,
        awaited: Callable[[], Iterable[Key]] = tuple,
    ) -> bool:
        """Wait until ``arrived()``, checked whenever the bell rings; return False after ``timeout_s``.

        ``awaited()``: messages without which it never is.
        """
        deadline = time.monotonic() + timeout_s
        spin_s = self._spin_s
        while True:
            self.collect()
            if arrived():
                return True
            self.raise_failure(awaited)  # after the check: a peer that has sent everything may end
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.bell.wait(self._seen, left_s, spin_s)


class LocalLink(Link):
    """Both ends in this process: tensors are detached and shared, not copied.

    On an accelerator they have the event at which they are ready.
    """

    name = "local"

    def __init__(self, mailbox: Mailbox, device: torch.device) -> None:
        self._mailbox, self._device, self._has_streams = mailbox, device, has_streams(device)

    def send(self, key: Key, value: Any) -> None:
        value = detached(value)
        self._mailbox.put(key, ready_on_event(value, self._device) if self._has_streams else value)


# ---- messages --------------------------------------------------------------------------------------------------------


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
