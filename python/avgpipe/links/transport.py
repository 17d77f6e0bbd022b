"""Transports, which make links between processes, and the ends of these links."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import copy_stream, has_streams
from avgpipe.links.link import OF_MICRO_BATCHES, Channel, Link, Mailbox, Message, tensors_of
from avgpipe_ext.ring import Bell

if TYPE_CHECKING:
    from avgpipe.links.codec import Decoder, Encoder, Verifier
    from avgpipe.ranks.met import Met


@dataclass(frozen=True)
class Endpoint:
    """This worker's end of a link.

    Attributes:
        mailbox: Receives what arrives.
        device: The device that needs it.
        incoming: The channels from the other end. Both ends list them in the same order.
        outgoing: The channels to the other end, likewise.
        wire_dtype: The dtype in which activations and gradients are sent (``on_wire``); None keeps theirs.
            The same at both ends.
        verifier: If given, messages carry checksums, and it makes the error for damaged ones; None: they
            carry none. Both ends have one, or none has.
    """

    mailbox: Mailbox
    device: torch.device
    incoming: Sequence[Channel] = ()
    outgoing: Sequence[Channel] = ()
    wire_dtype: torch.dtype | None = None
    verifier: Verifier | None = None

    @cached_property
    def stream(self) -> Any:
        """The stream on which arrived messages are copied to the device; None on the CPU."""
        return copy_stream(self.device) if has_streams(self.device) else None

    def receiving(self) -> AbstractContextManager[Any]:
        """Return the context in which messages are copied to the device."""
        return nullcontext() if self.stream is None else self.stream

    def encoder(self, channel: Channel) -> Encoder:
        """Return the sending end of a channel."""
        from avgpipe.links.codec import Encoder

        return Encoder(on_wire(channel.kind, self.wire_dtype))

    def decoder(self, channel: Channel) -> Decoder:
        """Return the receiving end of a channel."""
        from avgpipe.links.codec import Decoder

        return Decoder(on_wire(channel.kind, self.wire_dtype), self.device, self.stream)


class Transport(ABC):
    """A kind of link as this worker can offer it. Every worker makes the same transports.

    Args:
        world: The ranks of the pipeline.
        into: For each rank, the channels that end there, and the ranks where they begin.
        device: This worker's.
        below: The transports that this one is built on, by name.

    Attributes:
        remedy: What to do if a pair of workers cannot have this link.
        bell: The bell that peers ring when a message has arrived, if they do.
        processes: The processes of peers on this host, by rank, if this transport has found them.
    """

    remedy = "use 'auto'"
    bell: Bell | None = None

    def __init__(
        self,
        world: Met,
        into: Sequence[Mapping[Channel, int]],
        device: torch.device,
        below: Mapping[str, Transport],
    ) -> None:
        self.world, self.into, self.device, self.below = world, into, device, below
        self.processes: dict[int, int] = {}

    def offer(self) -> Any:
        """Return what other workers need to link with this one, for JSON.

        OSError, MemoryError or RuntimeError if it is impossible here.
        """

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        """Try the offer of ``rank``; ``offers`` are those of all ranks.

        OSError, ValueError or RuntimeError gives the reason why the link is impossible.
        """

    def bell_place(self) -> list[Any]:
        """Return the place of the bell: path and bytes of its memory, and an offset; empty without one."""
        return []

    def connect(self, ranks: Sequence[int]) -> None:
        """Connect to those ranks that this transport serves, while all ranks do the same."""

    @abstractmethod
    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> Link:
        """Return the link with ``rank``; ``others``: other transports that both could open, best first."""


def on_wire(kind: Message, wire_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which a kind of message is sent; None: its own.

    Gradients of tied weights, to which no loss scale applies any more, would underflow in float16.
    """
    narrow = kind in OF_MICRO_BATCHES or (kind is Message.TIED_GRADIENTS and wire_dtype is torch.bfloat16)
    return wire_dtype if narrow else None


# ---- bits that tests flip --------------------------------------------------------------------------------------------


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
