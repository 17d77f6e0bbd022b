"""The link through a torch.distributed group (gloo: CPU memory; CUDA tensors pass through it).

Every message begins with an *envelope*: a record, then the format's text and the tensors if they are few bytes. If not,
they follow as a *payload*, under tags of its channel. gloo moves no data before a receive is posted, and a receive
names a size. So receives are posted ahead: of envelopes, and of each channel's payloads, as large as the largest of
the last ones. Both ends find the same sizes. A payload that outgrows its receive goes by another tag:

    steady     sender  envelope, payload ────────────>  receiver  has posted for both
    outgrown   sender  envelope, 1 byte, payload ────>  receiver  the byte ends the receive that is too small; then it
                                                                  posts one that fits

gloo reports completion only to who waits for it: one thread for each peer waits for what arrives, and one for what was
sent.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from avgpipe.device import select
from avgpipe.errors import PeerLost
from avgpipe.links.link import Link, Mailbox, Transport
from avgpipe.links.message import (
    OF_MICRO_BATCHES,
    Channel,
    Decoder,
    Encoder,
    Key,
    Message,
    narrowed,
    padded,
)
from avgpipe.ranks.world import transport_reason

_ENVELOPES_AHEAD = 8  # receives of envelopes, of which at least half are posted at any time
_PAYLOADS_AHEAD = 2  # receives of a channel's payloads: while one arrives, the next one may begin
_RECENT = 8  # payloads of a channel by which the next receive is measured
_ON_THE_LINE = 2  # payloads given to gloo: while one is written, the next one waits in line
_UNREAPED = 16  # envelopes that the scheduler's thread has sent, until the other one sees to their completion
# Time limits are the scheduler's; a receive may be posted long before it is needed.
_FOREVER = timedelta(days=10_000)
_PATIENCE_S = 10.0  # how long closing waits at most for what was sent last, and for the other end to leave
_CLOSE_S = 10.0  # and how long for each thread afterwards
_ENVELOPE_TAG, _FIRST_TAG, _UNUSED_TAG = 0, 1, 2**31 - 1
# The channel's number, batch, micro-batch, the format's number, bytes of its text, all bytes behind the record, and the
# time of sending.
_RECORD = struct.Struct("<qqqqqqd")
_RECORD_BYTES = 64
_ENVELOPE_BYTES = _RECORD_BYTES + (64 << 10)
_FAREWELL = -1  # in place of a channel's number: nothing more comes
_FIRST, _LAST = -1.0, float("inf")  # places in the line


class Room:
    """Sizes of the receives that are posted for a channel's next payloads. Both ends see the same payloads."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._posted = deque([0] * _PAYLOADS_AHEAD)  # 0: none

    def next(self, payload_bytes: int) -> int:
        """Return the size of the receive for the next payload, which has ``payload_bytes``."""
        self._recent.append(payload_bytes)
        self._posted.append(max(self._recent))
        return self._posted.popleft()

    @property
    def newest(self) -> int:
        """Size of the receive that is posted when the last payload has come."""
        return self._posted[-1]


class GroupLink(Link):
    """Connects this worker with the one at another rank.

    Args:
        group: The pipeline's own group.
        rank: The other end.
        incoming: The channels from there. Both ends name them in the same order.
        outgoing: The channels to there, likewise.
        device: Where what arrives is needed.
        mailbox: Where it goes.
        lost: Makes the error for a broken connection; it is told what was being done.
        wire_dtype: The dtype in which activations and gradients travel; None keeps theirs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        incoming: Sequence[Channel],
        outgoing: Sequence[Channel],
        device: torch.device,
        mailbox: Mailbox,
        lost: Callable[[str], PeerLost],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.name = f"torch.distributed ({group.name()})"
        self._line = _Line(group, rank, mailbox, lost)
        self.latency_s = self._line.latency_s
        self._outgoing = {channel: _Outgoing(n, channel, wire_dtype) for n, channel in enumerate(outgoing)}
        self._sender = _Sender(self._line) if outgoing else None
        self._receiver = _Receiver(self._line, incoming, device, wire_dtype) if incoming else None

    def send(self, key: Key, value: Any) -> None:
        assert self._sender is not None
        self._sender.put(self._outgoing[key[:4]].packed(key, value))  # type: ignore[index]  # a Channel is such a tuple

    def leave(self) -> None:
        # The other end's threads end by themselves when they hear of it, as ours do when it says so.
        if self._sender is not None:
            self._sender.end()

    def close(self, patience_s: float) -> None:
        # A thread that is inside gloo when the interpreter ends would abort the process.
        self.leave()
        deadline = time.monotonic() + min(patience_s, _PATIENCE_S)
        threads = [end.thread for end in (self._sender, self._receiver) if end is not None]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._line.is_closing = True
        if not any(thread.is_alive() for thread in threads):
            return
        # Some wait for what will not come soon. gloo cannot cancel a receive, but one that runs into its time limit
        # ends all others of the group, which is this pipeline's own.
        try:
            self._line.post_receive(torch.empty(1), _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass
        for thread in threads:
            thread.join(_CLOSE_S)


class GroupTransport(Transport):
    """The pipeline's gloo group, between any two workers."""

    def link(
        self,
        rank: int,
        mailbox: Mailbox,
        device: torch.device,
        wire_dtype: torch.dtype | None,
        others: Sequence[Transport],
    ) -> GroupLink:
        assert self.world.group is not None
        channels = self.topology.incoming(rank), self.topology.outgoing(rank)
        lost = partial(self.world.lost, rank)
        return GroupLink(self.world.group, rank, *channels, device, mailbox, lost, wire_dtype)


class _Line:
    """What both directions share: the way to gloo, and what becomes of what arrives or breaks."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, mailbox: Mailbox, lost: Callable[[str], PeerLost]
    ) -> None:
        self.rank, self.is_closing = rank, False
        self.latency_s: dict[str, float] = {}
        self._group, self._mailbox, self._lost = group, mailbox, lost

    def post_send(self, buffer: torch.Tensor, tag: int) -> Any:
        return self._group.send([buffer], self.rank, tag)

    def post_receive(self, buffer: torch.Tensor, tag: int) -> Any:
        return self._group.recv([buffer], self.rank, tag)

    def deliver(self, key: Key, value: Any, took_s: float) -> None:
        known = self.latency_s.get(key.kind)
        if known is None or took_s < known:
            self.latency_s[key.kind] = took_s
        self._mailbox.deliver(key, value)

    def broken(self, doing: str, error: Exception) -> None:
        if not self.is_closing:
            self._mailbox.fail(self._lost(f"{doing}: {transport_reason(error)}"), self.rank)


# ---- sending -----------------------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    """A message as it is sent. ``channel`` is None for the last one."""

    channel: _Outgoing | None
    batch: float
    envelope: torch.Tensor
    payload: torch.Tensor | None = None


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, number: int, channel: Channel, wire_dtype: torch.dtype | None) -> None:
        self._number, self._tag = number, _FIRST_TAG + 2 * number
        self._is_of_micro_batches = channel.kind in OF_MICRO_BATCHES
        self._encoder = Encoder(narrowed(channel, wire_dtype))
        self._room = Room()
        self.words = Message(channel.kind).words

    def packed(self, key: Key, value: Any) -> _Packed:
        number, format, text, tensors = self._encoder.encode(value)
        begin = padded(len(text))
        total = begin + format.bytes
        fits = _RECORD_BYTES + total <= _ENVELOPE_BYTES
        envelope = _envelope(
            total if fits else 0, self._number, key.batch, key.micro_batch, number, len(text), total
        )
        batch = key.batch if self._is_of_micro_batches else _FIRST
        if not fits and not text and self._is_of_micro_batches and format.is_memory_of(tensors):
            return _Packed(self, batch, envelope, _copied_lazily(tensors[0]))
        body = envelope[_RECORD_BYTES:] if fits else torch.empty(total, dtype=torch.uint8)
        if text:
            ctypes.memmove(body.data_ptr(), text, len(text))
        if format.bytes:
            format.write(tensors, body.data_ptr() + begin)
        return _Packed(self, batch, envelope, None if fits else body)

    def post(self, line: _Line, payload: torch.Tensor) -> list[Any]:
        """Send a payload whose envelope was sent; the works to wait for."""
        size, room = payload.numel(), self._room.next(payload.numel())
        if size <= room:
            return [line.post_send(payload, self._tag)]
        works = [line.post_send(torch.zeros(1, dtype=torch.uint8), self._tag)] if room else []
        return [*works, line.post_send(payload, self._tag + 1)]


def _envelope(more_bytes: int, *record: float) -> torch.Tensor:
    envelope = torch.empty(_RECORD_BYTES + more_bytes, dtype=torch.uint8)
    ctypes.memmove(envelope.data_ptr(), _RECORD.pack(*record, time.time()), _RECORD.size)
    return envelope


def _copied_lazily(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of an activation or gradient as they are now. torch copies them when somebody writes to the tensor
    before they are sent, which is seldom. Not for what is reached by its address, as flat buffers are, and so not for a
    part of larger memory.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.untyped_storage().nbytes() == flat.numel():
        try:
            return flat._lazy_clone()  # private: torch has it for this
        except (AttributeError, RuntimeError):  # memory that is not torch's own
            pass
    return flat.clone()


class _Sender:
    """The thread that sends to the other end: what gloo can write at once it writes in the thread that asks.

    Of what waits for the line, the oldest batch goes first. So pipelines that share a line which is too slow for all
    fall into step: while one waits for its last gradients, the other fills the line. First come, first served makes all
    of them late at the same time. An envelope that finds the line idle is sent without the thread.
    """

    def __init__(self, line: _Line) -> None:
        self._line, self._left = line, False
        self._queue: queue.PriorityQueue[tuple[float, int, _Packed | list[Any]]] = queue.PriorityQueue()
        self._count = itertools.count()  # keeps the order of a channel, whose batches rise
        self._queued = self._sent = 0  # messages: counted by the scheduler's thread, and by this one
        self._unreaped: list[Any] = []  # works of envelopes that the scheduler's thread has sent
        self.thread = threading.Thread(target=self._run, name=f"avgpipe-send-{line.rank}", daemon=True)
        self.thread.start()

    def put(self, message: _Packed) -> None:
        if message.payload is not None or self._queued != self._sent:
            self._queued += 1
            self._enqueue(message.batch, message)
            return
        try:
            self._unreaped.append(self._line.post_send(message.envelope, _ENVELOPE_TAG))
        except Exception as error:
            self._line.broken("sending", error)
        if len(self._unreaped) >= _UNREAPED:
            self._enqueue(_FIRST, self._unreaped)
            self._unreaped = []

    def end(self) -> None:
        """Say farewell when all has been sent, and end the thread."""
        if not self._left:
            self._left = True
            self._enqueue(_LAST, self._unreaped)
            self._enqueue(_LAST, _Packed(None, _LAST, _envelope(0, _FAREWELL, 0, 0, 0, 0, 0)))

    def _enqueue(self, place: float, item: _Packed | list[Any]) -> None:
        self._queue.put((place, next(self._count), item))

    def _run(self) -> None:
        doing = "sending"
        line: deque[list[Any]] = deque()
        try:
            item: _Packed | list[Any] | None = None
            while not (isinstance(item, _Packed) and item.channel is None):
                while len(line) >= _ON_THE_LINE or (line and self._queue.empty()):
                    _wait(line.popleft())
                    self._sent += 1
                item = None  # holds no memory while nothing is to be sent
                item = self._queue.get()[2]
                if isinstance(item, list):
                    _wait(item)
                    continue
                doing = "sending" if item.channel is None else f"sending {item.channel.words}"
                works = [self._line.post_send(item.envelope, _ENVELOPE_TAG)]
                if item.channel is not None and item.payload is not None:
                    works += item.channel.post(self._line, item.payload)
                line.append(works)
                del works
            for works in line:
                _wait(works)
        except Exception as error:
            self._line.broken(doing, error)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait(_FOREVER)


# ---- receiving ---------------------------------------------------------------------------------------------------


class _Receiver:
    """The thread that receives from the other end, until that leaves or the connection breaks."""

    def __init__(
        self, line: _Line, channels: Sequence[Channel], device: torch.device, wire_dtype: torch.dtype | None
    ) -> None:
        self._line, self._device = line, device
        self._incoming = [
            _Incoming(line, n, channel, Decoder(narrowed(channel, wire_dtype), device))
            for n, channel in enumerate(channels)
        ]
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()
        self._free = [torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8) for _ in range(_ENVELOPES_AHEAD)]
        self.thread = threading.Thread(target=self._run, name=f"avgpipe-receive-{line.rank}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            select(self._device)
            self._post()
            while self._receive():
                if len(self._free) >= _ENVELOPES_AHEAD // 2:
                    self._post()
        except Exception as error:
            self._line.broken("receiving", error)

    def _post(self) -> None:
        """Post several envelopes at once: gloo tells the other end of each, which costs least while it is awake."""
        for envelope in self._free:
            self._posted.append((envelope, self._line.post_receive(envelope, _ENVELOPE_TAG)))
        self._free.clear()

    def _receive(self) -> bool:
        """Deliver the next message; False after the last one."""
        envelope, work = self._posted.popleft()
        work.wait(_FOREVER)
        record = ctypes.string_at(envelope.data_ptr(), _RECORD.size)
        channel, batch, micro_batch, number, text_bytes, total, sent_s = _RECORD.unpack(record)
        if channel == _FAREWELL:
            return False
        incoming = self._incoming[channel]
        has_payload = _RECORD_BYTES + total > _ENVELOPE_BYTES
        body = incoming.payload(total) if has_payload else envelope[_RECORD_BYTES:][:total].clone()
        took_s = time.time() - sent_s
        value = incoming.decoder.decode(number, text_bytes, body)
        self._line.deliver(incoming.key(batch, micro_batch), value, took_s)
        self._free.append(envelope)
        if has_payload:
            # Not before: while it writes a payload, gloo keeps a processor busy with what the other end sends.
            incoming.post()
        return True


class _Incoming:
    """The receiving end of a channel."""

    def __init__(self, line: _Line, number: int, channel: Channel, decoder: Decoder) -> None:
        self._channel, self.decoder = channel, decoder
        self._line, self._tag = line, _FIRST_TAG + 2 * number
        self._room = Room()
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()

    def key(self, batch: int, micro_batch: int) -> Key:
        return Key(*self._channel, batch, micro_batch)

    def payload(self, size: int) -> torch.Tensor:
        """Wait for the payload that an envelope has announced."""
        if room := self._room.next(size):
            buffer, work = self._posted.popleft()
            work.wait(_FOREVER)
            if size <= room:
                return buffer
        buffer, work = self._posting(size, self._tag + 1)
        work.wait(_FOREVER)
        return buffer

    def post(self) -> None:
        """Post a receive behind those that are posted."""
        self._posted.append(self._posting(self._room.newest, self._tag))

    def _posting(self, size: int, tag: int) -> tuple[torch.Tensor, Any]:
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer, self._line.post_receive(buffer, tag)
