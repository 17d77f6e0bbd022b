"""The other end is a rank of a torch.distributed group (gloo: CPU memory; CUDA tensors pass through it).

A message is one buffer: a record, the header's text if it is new, the tensors. gloo moves no data before the
receive is posted, and a receive names its size, so ``_AHEAD`` receives are posted at any time, before anything is
known of what comes. How large they are follows from the messages before, by a rule that both ends apply: the
receive for message q is as large as the largest message up to q - _AHEAD. What does not fit follows its record
under a tag of its own.

gloo reports completion only to who waits. A thread for each incoming channel waits for what arrives, and one
thread for what was sent.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.device import select
from avgpipe.errors import PeerLost
from avgpipe.links.link import Mailbox
from avgpipe.links.message import KINDS, NAMES, Channel, Key
from avgpipe.links.wire import Decoder, Encoder, narrowed, padded, view
from avgpipe.ranks.world import transport_reason

_AHEAD = 2  # receives posted at any time: while one message arrives, the next one may begin
_FIRST_BYTES = 4096  # what the first of them hold
_FOREVER = timedelta(
    days=10_000
)  # time limits are the scheduler's; a receive may be posted long before it is needed
_PATIENCE_S = 10.0  # how long closing waits at most for what was sent last, and for the other end to leave
_CLOSE_S = 10.0  # and how long for each of them afterwards
_UNUSED_TAG = 2**31 - 1
_RECORD = struct.Struct(
    "<qqqqqd"
)  # batch, micro-batch, header's number, bytes of its text, of all; time of sending
_RECORD_BYTES = 64
_KEPT = 4  # free buffers of a channel
_LAST = float("inf")
_FAREWELL = -1  # in place of a header's number: nothing more comes


class Sizes:
    """How large the receive for each message of a channel is; both ends see the same messages and find the same."""

    def __init__(self) -> None:
        self._coming: deque[int] = deque([_FIRST_BYTES] * _AHEAD)

    def next(self, message_bytes: int) -> int:
        """What holds the next message, whose size is ``message_bytes``; the receive after those posted grows with
        it.
        """
        now = self._coming.popleft()
        self._coming.append(max(message_bytes, self.last))
        return now

    @property
    def last(self) -> int:
        """Of the receive that is posted last."""
        return self._coming[-1]


class GroupLink:
    """To and from the worker at ``rank``. ``incoming``, ``outgoing``: the channels from there and to there."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        seats: int,
        incoming: Sequence[Channel],
        outgoing: Sequence[Channel],
        device: torch.device,
        mailbox: Mailbox,
        lost: Callable[[str], PeerLost],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.name = f"torch.distributed ({group.name()})"
        self.group, self.rank, self.seats, self.device = group, rank, seats, device
        self._mailbox, self._lost, self._wire_dtype = mailbox, lost, wire_dtype
        self.closing = self._left = False
        # The shortest time that a message of a kind took, on the two ends' clocks.
        self.latency_s: dict[str, float] = {}
        self._receivers = [_Receiver(self, channel, wire_dtype) for channel in incoming]
        self._outgoing = {channel: _Outgoing(self, channel, wire_dtype) for channel in outgoing}
        self._sender = _Sender(self)

    def send(self, key: Key, value: Any) -> None:
        outgoing = self._outgoing[key[:4]]  # type: ignore[index]  # a Channel is such a tuple
        self._sender.put(key.batch if key.kind in "FBXY" else -1, outgoing, *outgoing.packed(key, value))

    def heard(self, key: Key, value: Any, took_s: float) -> None:
        known = self.latency_s.get(key.kind)
        if known is None or took_s < known:
            self.latency_s[key.kind] = took_s
        self._mailbox.deliver(key, value)

    def broken(self, doing: str, error: Exception) -> None:
        if not self.closing:
            self._mailbox.fail(self._lost(f"{doing}: {transport_reason(error)}"), self.rank)

    def leave(self) -> None:
        """Tell the other end that nothing more comes: its threads end by themselves, as ours do when it says so."""
        if self._left:
            return
        self._left = True
        for outgoing in self._outgoing.values():
            self._sender.put(_LAST, outgoing, *outgoing.packed_farewell())
        self._sender.put(_LAST)

    def close(self, patience_s: float) -> None:
        """End the threads: one that is inside the transport when the interpreter ends would abort the process."""
        self.leave()
        deadline = time.monotonic() + min(patience_s, _PATIENCE_S)
        threads = [self._sender.thread, *(receiver.thread for receiver in self._receivers)]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.closing = True
        if not any(thread.is_alive() for thread in threads):
            return
        # Some wait for what will not come soon. gloo cannot cancel a receive, but one that runs into its time limit
        # ends all others of the group, which is this pipeline's own.
        try:
            self.group.recv([torch.empty(1)], self.rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass
        for thread in threads:
            thread.join(_CLOSE_S)


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, link: GroupLink, channel: Channel, wire_dtype: torch.dtype | None) -> None:
        self._link, self._tag = link, _tag(channel, link.seats)
        self._encoder = Encoder(narrowed(channel, wire_dtype))
        self._sizes = Sizes()
        self.buffers = Buffers()
        self.kind = channel.kind

    def packed(self, key: Key, value: Any) -> tuple[torch.Tensor, int]:
        """The message in a buffer, and its bytes."""
        number, format, text, tensors = self._encoder.encode(value)
        begin = _RECORD_BYTES + padded(len(text))
        total = begin + format.bytes
        buffer = self.buffers.take(total)
        address = buffer.data_ptr()
        memory = view(address, total)
        record = key.batch, key.micro_batch, number, len(text), total, time.time()
        _RECORD.pack_into(memory, 0, *record)
        ctypes.memmove(address + _RECORD_BYTES, text, len(text))
        format.write(tensors, address + begin, lambda: memory, begin, ctypes.memmove)
        return buffer, total

    def packed_farewell(self) -> tuple[torch.Tensor, int]:
        buffer = self.buffers.take(_RECORD_BYTES)
        _RECORD.pack_into(view(buffer.data_ptr(), _RECORD_BYTES), 0, 0, 0, _FAREWELL, 0, _RECORD_BYTES, 0.0)
        return buffer, _RECORD_BYTES

    def post(self, buffer: torch.Tensor, total: int) -> list[Any]:
        """Send; the works that must be done before the buffer is free again."""
        group, rank = self._link.group, self._link.rank
        if total <= self._sizes.next(total):
            return [group.send([buffer[:total]], rank, self._tag)]
        return [
            group.send([buffer[:_RECORD_BYTES]], rank, self._tag),
            group.send([buffer[_RECORD_BYTES:total]], rank, self._tag + 1),
        ]


class _Sender:
    """The thread that sends to the other end: what gloo can write at once it writes in the thread that asks.

    Of what waits for the line, the oldest batch goes first. So pipelines that share a line which is too slow for all
    fall into step: while one waits for its last gradients, the other fills the line. First come, first served makes all
    of them late at the same time.
    """

    def __init__(self, link: GroupLink) -> None:
        self._queue: queue.PriorityQueue[tuple[float, int, tuple[Any, ...]]] = queue.PriorityQueue()
        self._count = itertools.count()  # keeps the order of a channel, whose batches rise
        self._link = link
        self.thread = threading.Thread(target=self._run, name=f"avgpipe-send-{link.rank}", daemon=True)
        self.thread.start()

    def put(self, batch: float, *message: Any) -> None:
        """``message``: a channel's end, a buffer and the bytes in it that are sent; none: the thread ends."""
        self._queue.put((batch, next(self._count), message))

    def _run(self) -> None:
        while message := self._queue.get()[2]:
            outgoing, buffer, total = message
            try:
                for work in outgoing.post(buffer, total):
                    work.wait(_FOREVER)
            except Exception as error:
                self._link.broken(f"sending {NAMES[outgoing.kind]}", error)
                return
            outgoing.buffers.give(buffer)


class _Receiver:
    """The thread of one incoming channel. It keeps receives posted until the link closes or breaks."""

    def __init__(self, link: GroupLink, channel: Channel, wire_dtype: torch.dtype | None) -> None:
        self._link, self._channel, self._tag = link, channel, _tag(channel, link.seats)
        self._decoder = Decoder(narrowed(channel, wire_dtype), link.device)
        self._sizes = Sizes()
        self._buffers = Buffers()
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()
        name = f"avgpipe-receive-{channel.kind}{channel.pipeline}-{channel.source}-{channel.seat}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        doing = f"receiving {NAMES[self._channel.kind]} of pipeline {self._channel.pipeline}"
        try:
            select(self._link.device)
            for _ in range(_AHEAD):
                self._post(self._sizes.last)
            while (message := self._message()) is not None:
                self._link.heard(*message)
                self._post(self._sizes.last)
        except Exception as error:
            self._link.broken(doing, error)

    def _post(self, size: int) -> None:
        buffer = self._buffers.take(size)
        # A receive of more than comes is right, so a kept buffer may be larger than both ends agreed on.
        self._posted.append((buffer, self._link.group.recv([buffer], self._link.rank, self._tag)))

    def _message(self) -> tuple[Key, Any, float] | None:
        """What it is, its value, and the seconds that it took; None after the last one."""
        buffer, work = self._posted.popleft()
        work.wait(_FOREVER)
        lease = lend(buffer, self._buffers)
        batch, micro_batch, number, text_bytes, total, sent_s = _RECORD.unpack_from(lease)
        if number == _FAREWELL:
            return None
        if total > self._sizes.next(total):
            lease = self._rest(total)
        took_s = time.time() - sent_s
        value = self._decoder.decode(number, text_bytes, lease, _RECORD_BYTES)
        return Key(*self._channel, batch, micro_batch), value, took_s

    def _rest(self, total: int) -> _Lease:
        """A message that was larger than its receive: the record alone came, the rest comes now."""
        buffer = self._buffers.take(total)
        self._link.group.recv([buffer[_RECORD_BYTES:total]], self._link.rank, self._tag + 1).wait(_FOREVER)
        return lend(buffer, self._buffers)


class Buffers:
    """Memory that is used again: of the last few given back, the last one that is large enough."""

    def __init__(self) -> None:
        self._free: deque[torch.Tensor] = deque(maxlen=_KEPT)  # a rush does not keep its memory for ever

    def take(self, size: int) -> torch.Tensor:
        while self._free:
            try:
                buffer = self._free.pop()
            except IndexError:  # another thread was quicker
                break
            if buffer.numel() >= size:
                return buffer  # smaller ones are dropped: messages have grown
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class _Lease(ctypes.Array[ctypes.c_ubyte]):
    """A buffer's memory, lent to the tensors that read it: it goes back when the last of them is gone."""

    _length_, _type_ = 0, ctypes.c_ubyte
    owner: torch.Tensor
    pool: Buffers

    def __del__(self) -> None:
        self.pool.give(self.owner)


@lru_cache(maxsize=1024)
def _lease_of(size: int) -> type[_Lease]:
    return type("_SizedLease", (_Lease,), {"_length_": size, "_type_": ctypes.c_ubyte})


def lend(buffer: torch.Tensor, pool: Buffers) -> _Lease:
    lease = _lease_of(buffer.numel()).from_address(buffer.data_ptr())
    lease.owner, lease.pool = buffer, pool
    return lease


def _tag(channel: Channel, seats: int) -> int:
    """Distinguishes the channels between two ranks; the next number is of what does not fit."""
    place = (channel.pipeline * seats + channel.source) * seats + channel.seat
    return 2 * (place * len(KINDS) + KINDS.index(channel.kind))
