"""The link through a torch.distributed group (gloo: CPU memory; CUDA tensors pass through it).

Every message has an *envelope*: a record, then the format's text and the tensors if they are few bytes. If not, those
are a *payload*, under tags of its channel. gloo moves no data before a receive is posted, and a receive
names a size. So receives are posted ahead: of envelopes, and of each channel's payloads, as large as the largest of
the recent ones. Both ends compute the same sizes. A payload larger than its receive is sent with another tag:

    steady     sender  payload, envelope ────────────>  receiver  has posted for both
    outgrown   sender  envelope, 1 byte, payload ────>  receiver  the byte ends the receive that is too small; then it
                                                                  posts one that fits

gloo reports completion only to a thread that waits for it: one thread for each peer waits for receives, and
one for sends.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from avgpipe.device import has_streams, on_accelerator, pinned_bytes, select
from avgpipe.errors import PeerLost, PipelineError
from avgpipe.links.codec import checksum, padded
from avgpipe.links.link import OF_MICRO_BATCHES, Channel, Key, Link, Message
from avgpipe.links.transport import Endpoint, Transport, flip_bit
from avgpipe.ranks.met import transport_reason

if TYPE_CHECKING:
    from avgpipe.links.codec import ToHost

_ENVELOPES_AHEAD = 8  # receives of envelopes, of which at least half are posted at any time
_MEDIUM_BYTES = 2 << 20  # payloads up to which two receives are posted
_RECENT = 8  # payloads of a channel that determine the size of the next receive
_ON_THE_LINE = 2  # payloads given to gloo: while one is written, the next one is queued
_UNREAPED = 16  # envelopes that the scheduler's thread has sent before the sending thread completes them
# Time limits are the scheduler's; a receive may be posted long before it is needed.
_FOREVER = timedelta(days=10_000)
_PATIENCE_S = 10.0  # timeout of closing for the last messages to be sent, and for the other end to leave
_CLOSE_S = 2.0  # and then for the threads to end
_ENVELOPE_TAG, _FIRST_TAG, _UNUSED_TAG = 0, 1, 2**31 - 1
# The channel's number, batch, micro-batch, the format's number, bytes of its text, all bytes after the
# record, and the time of sending.
_RECORD = struct.Struct("<qqqqqqd")
_SUMS = struct.Struct(
    "<II"
)  # at its end, if messages are verified: checksums of the bytes after it, and of itself
_RECORD_BYTES = _RECORD.size + _SUMS.size
_ENVELOPE_BYTES = _RECORD_BYTES + (64 << 10)
_FAREWELL = -1  # in place of a channel's number: the last message
_FIRST, _IDLE, _LAST = -1.0, 2.0**62, float("inf")  # priorities in the queue


class Room:
    """Sizes of the receives posted for a channel's next payloads; both ends compute the same ones."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._posted: deque[int] = deque()

    def next(self, payload_bytes: int) -> tuple[int, list[int]]:
        """Return the size of the receive for the next payload, of ``payload_bytes``; 0 if none is posted.

        And the sizes of the receives to post when it has arrived.
        """
        room = self._posted.popleft() if self._posted else 0
        self._recent.append(payload_bytes)
        size = max(self._recent)
        # While one payload arrives, the next one may begin; of large ones, one receive is enough, and it is
        # large.
        ahead = 2 if size <= _MEDIUM_BYTES else 1
        more = [size] * (ahead - len(self._posted))
        self._posted += more
        return room, more


class GroupLink(Link):
    """Connects this worker with the one at another rank.

    Args:
        group: The pipeline's own group.
        rank: The other end.
        lost: Makes the error for a broken connection from a description of the operation.
        end: This one.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, lost: Callable[[str], PeerLost], end: Endpoint
    ) -> None:
        self.name = f"torch.distributed ({group.name()})"
        self._group, self._rank, self._lost, self._end = group, rank, lost, end
        self._is_closing = self._has_left = False
        self.latency_s: dict[str, float] = {}
        self._outgoing: dict[tuple[Any, ...], _Outgoing] = {
            channel: _Outgoing(n, channel, end) for n, channel in enumerate(end.outgoing)
        }
        self._queue: queue.PriorityQueue[tuple[float, int, _Packed | list[Any]]] = queue.PriorityQueue()
        self._count = itertools.count()  # keeps the order of a channel, whose batches rise
        # Messages: counted by the scheduler's thread, by the sending one, and again by the scheduler's.
        self._queued = self._sent = self._released = 0
        # By number, messages that gloo has, each with its works. Only the scheduler's thread frees them: a
        # lazy copy must not end in one thread while the tensor that it copies ends, or is written to, in
        # another. torch counts down first and locks then, when the other thread may have freed the lock.
        self._line: dict[int, tuple[_Packed, list[Any]]] = {}
        self._unreaped: list[Any] = []  # works of envelopes that the scheduler's thread has sent
        self._incoming = [_Incoming(n, channel, end) for n, channel in enumerate(end.incoming)]
        loops = {"send": self._send_all} if end.outgoing else {}
        loops |= {"receive": self._receive_all} if end.incoming else {}
        self._threads = [
            threading.Thread(target=loop, name=f"avgpipe-{what}-{rank}", daemon=True)
            for what, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self, patience_s: float) -> None:
        # If a thread is inside gloo when the interpreter ends, it aborts the process.
        self.leave()
        deadline = time.monotonic() + min(patience_s, _PATIENCE_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._is_closing = True
        if not any(thread.is_alive() for thread in self._threads):
            return
        # Some wait for messages that will not arrive soon. gloo cannot cancel a receive, but one that reaches
        # its timeout ends all others of the group, which is this pipeline's own.
        with suppress(RuntimeError):
            self.post_receive(torch.empty(1), _UNUSED_TAG).wait(timedelta(milliseconds=1))
        deadline = time.monotonic() + _CLOSE_S
        # One may never end: gloo does not report a send that was in progress when the connection broke.
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def post_send(self, buffer: torch.Tensor, tag: int) -> Any:
        """Begin to send; gloo writes in the calling thread what it can write at once."""
        return self._group.send([buffer], self._rank, tag)

    def post_receive(self, buffer: torch.Tensor, tag: int) -> Any:
        """Begin to receive. The receive may be larger than the message."""
        return self._group.recv([buffer], self._rank, tag)

    def _broken(self, doing: str, error: Exception) -> None:
        if isinstance(error, PipelineError):
            self._end.mailbox.fail(error)
        elif not self._is_closing:
            self._end.mailbox.fail(self._lost(f"{doing}: {transport_reason(error)}"), self._rank)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, key: Key, value: Any) -> None:
        """Send an envelope at once if the line is idle; else, and with a payload, leave it to the sending thread.

        Of the queued messages, the oldest batch goes first. So pipelines that share a line too slow for
        all alternate: while one waits for its last gradients, the other uses the line. With first come, first
        served, all of them would be late at the same time.
        """
        self._give(self._outgoing[key[:4]].packed(key, value))  # a Channel is such a tuple

    def _give(self, message: _Packed) -> None:
        self._release()
        if message.payload is not None or message.made is not None or self._queued != self._sent:
            self._queued += 1
            self._enqueue(message.place, message)
            return
        self._seal(message)
        try:
            self._unreaped.append(self.post_send(message.envelope, _ENVELOPE_TAG))
        except Exception as error:
            self._broken("sending", error)
        if len(self._unreaped) >= _UNREAPED:
            self._enqueue(_FIRST, self._unreaped)
            self._unreaped = []

    def send_flipped(self, key: Key, value: Any, bit: int) -> None:
        message = self._outgoing[key[:4]].packed(key, value)
        payload = message.payload
        if payload is not None and message.made is None:
            payload = payload.clone()  # it may be the memory of the tensor itself
        self._give(message._replace(payload=payload, flip=bit))

    def _release(self) -> None:
        while self._released < self._sent:
            del self._line[self._released]
            self._released += 1

    def leave(self) -> None:
        self._release()
        # The other end's threads end when they receive the farewell, as ours do when the other end sends one.
        if self._outgoing and not self._has_left:
            self._has_left = True
            self._enqueue(_LAST, self._unreaped)
            farewell = _envelope(_bytes(_RECORD_BYTES), _FAREWELL, 0, 0, 0, 0, 0)
            self._enqueue(_LAST, _Packed(_LAST, "its farewell", farewell))

    def _enqueue(self, place: float, item: _Packed | list[Any]) -> None:
        self._queue.put((place, next(self._count), item))

    def _send_all(self) -> None:
        doing = "sending"
        posted = 0
        try:
            while True:
                while posted - self._sent >= _ON_THE_LINE or (posted > self._sent and self._queue.empty()):
                    self._wait_for_oldest()
                item = self._queue.get()[2]
                if isinstance(item, list):
                    _wait(item)
                    continue
                doing = f"sending {item.words}"
                if item.made is not None:
                    item.made.synchronize()
                self._seal(item)
                is_last = item.place == _LAST
                self._post(posted, item)
                posted += 1
                del item  # before waiting: then the line is its last holder
                if is_last:
                    break
            while self._sent < posted:
                self._wait_for_oldest()
        except Exception as error:
            self._broken(doing, error)

    def _seal(self, message: _Packed) -> None:
        """Write the checksums of a message, which is in the host's memory now, into its record."""
        if self._end.verifier is None and message.flip is None:
            return
        body = message.envelope[_RECORD_BYTES:] if message.payload is None else message.payload
        if self._end.verifier is not None:
            record = message.envelope.numpy().data
            _SUMS.pack_into(record, _RECORD.size, checksum(body.numpy()), zlib.crc32(record[: _RECORD.size]))
        if message.flip is not None:
            flip_bit([body], message.flip)

    def _wait_for_oldest(self) -> None:
        _wait(self._line[self._sent][1])
        self._sent += 1  # from here on it may be freed

    def _post(self, number: int, message: _Packed) -> None:
        """Give gloo a message."""
        works: list[Any] = []
        self._line[number] = message, works
        payload, channel = message.payload, message.channel
        if payload is None or channel is None:
            works.append(self.post_send(message.envelope, _ENVELOPE_TAG))
            return
        room, _ = channel.room.next(payload.numel())
        if payload.numel() <= room:  # the payload first: when the envelope has arrived, all has
            works.append(self.post_send(payload, channel.tag))
            works.append(self.post_send(message.envelope, _ENVELOPE_TAG))
            return
        works.append(self.post_send(message.envelope, _ENVELOPE_TAG))
        if room:
            works.append(self.post_send(torch.zeros(1, dtype=torch.uint8), channel.tag))
        works.append(self.post_send(payload, channel.tag + 1))

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        free = [torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8) for _ in range(_ENVELOPES_AHEAD)]
        posted: deque[tuple[torch.Tensor, Any]] = deque()
        try:
            select(self._end.device)
            while True:
                if len(free) >= _ENVELOPES_AHEAD // 2:
                    # Several at once: gloo notifies the other end of each, which costs least while it is
                    # awake.
                    posted += [(envelope, self.post_receive(envelope, _ENVELOPE_TAG)) for envelope in free]
                    free.clear()
                envelope, work = posted.popleft()
                work.wait(_FOREVER)
                if not self._take(envelope):
                    return
                free.append(envelope)
        except Exception as error:
            self._broken("receiving", error)

    def _take(self, envelope: torch.Tensor) -> bool:
        """Deliver a message; return False if it is the other end's last."""
        record = ctypes.string_at(envelope.data_ptr(), _RECORD_BYTES)
        number, batch, micro_batch, format, text_bytes, total, sent_s = _RECORD.unpack_from(record)
        body_sum, record_sum = _SUMS.unpack_from(record, _RECORD.size)
        verifier = self._end.verifier
        if verifier is not None and record_sum != zlib.crc32(record[: _RECORD.size]):
            raise verifier.damaged(None)
        if number == _FAREWELL:
            return False
        incoming = self._incoming[number]
        end = _RECORD_BYTES + total
        has_payload = end > _ENVELOPE_BYTES
        body = self._payload(incoming, total) if has_payload else envelope[_RECORD_BYTES:end].clone()
        took_s = time.time() - sent_s  # on the clocks of both ends
        kind, pipeline, source, target = incoming.channel
        key = Key(kind, pipeline, source, target, batch, micro_batch)
        if verifier is not None and body_sum != checksum(body[:total].numpy()):
            raise verifier.damaged(key)
        value = incoming.decoder.decode(format, text_bytes, body)
        if took_s < self.latency_s.get(key.kind, float("inf")):
            self.latency_s[key.kind] = took_s
        self._end.mailbox.deliver(key, value)
        return True

    def _payload(self, channel: _Incoming, size: int) -> torch.Tensor:
        """Wait for the payload that an envelope has announced, and post the receives of the next ones."""
        room, more = channel.room.next(size)
        buffer = None
        if room:
            buffer, work = channel.posted.popleft()
            work.wait(_FOREVER)
        if buffer is None or size > room:
            buffer = channel.memory(size)
            self.post_receive(buffer, channel.tag + 1).wait(_FOREVER)
        # Not earlier: while it writes a payload, gloo keeps a processor busy with what the other end sends.
        for bytes in more:
            following = channel.memory(bytes)
            channel.posted.append((following, self.post_receive(following, channel.tag)))
        return buffer


class GroupTransport(Transport):
    """The pipeline's gloo group, between any two workers."""

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> GroupLink:
        assert self.world.group is not None
        return GroupLink(self.world.group, rank, partial(self.world.lost, rank), end)


class _Packed(NamedTuple):
    """A message as it is sent.

    Attributes:
        place: Its priority in the queue.
        words: Its name in messages.
        made: The event at which an accelerator has copied it to the host; None if it is there.
        flip: The bit that a test flips in transit.
    """

    place: float
    words: str
    envelope: torch.Tensor
    channel: _Outgoing | None = None
    payload: torch.Tensor | None = None
    made: Any = None
    flip: int | None = None


class _Outgoing:
    """The sending end of a channel."""

    def __init__(self, number: int, channel: Channel, end: Endpoint) -> None:
        self._number, self._encoder = number, end.encoder(channel)
        self._is_verified = end.verifier is not None
        self._trains, self._words = channel.kind in OF_MICRO_BATCHES, Message(channel.kind).words
        self._kind, self._copies = channel.kind, None  # type: Message, ToHost | None
        self._place = _IDLE if channel.kind is Message.COPY else _FIRST
        self.tag, self.room = _FIRST_TAG + 2 * number, Room()

    def packed(self, key: Key, value: Any) -> _Packed:
        number, format, text, tensors = self._encoder.encode(value)
        total = padded(len(text)) + format.bytes
        fits = _RECORD_BYTES + total <= _ENVELOPE_BYTES
        place = key.batch if self._trains else self._place
        record = self._number, key.batch, key.micro_batch, number, len(text)
        devices = [tensor.device for tensor in tensors if on_accelerator(tensor)]
        if devices:
            envelope = _envelope(pinned_bytes(_RECORD_BYTES + (total if fits else 0)), *record, total)
            payload = None if fits else pinned_bytes(total)
            address = envelope.data_ptr() + _RECORD_BYTES if payload is None else payload.data_ptr()
            made = self._to_host(devices[0]).write(format, text, tensors, address)
            return _Packed(place, self._words, envelope, self, payload, made)
        # Not if another thread reads it again for its checksum.
        lazily = not (fits or text or self._is_verified) and self._trains and format.is_memory_of(tensors)
        if lazily:
            total = format.end  # without padding: both ends must compute the same size of the transfer
        envelope = _envelope(_bytes(_RECORD_BYTES + (total if fits else 0)), *record, total)
        payload = None
        if fits:
            format.write_all(text, tensors, envelope.data_ptr() + _RECORD_BYTES)
        elif lazily:
            payload = _copied_lazily(tensors[0])
        else:
            payload = _bytes(total)
            format.write_all(text, tensors, payload.data_ptr())
        return _Packed(place, self._words, envelope, self, payload)

    def _to_host(self, device: torch.device) -> ToHost:
        if self._copies is None:
            from avgpipe.links.codec import ToHost

            self._copies = ToHost(self._kind, device)
        return self._copies


class _Incoming:
    """The receiving end of a channel.

    Attributes:
        posted: Buffers of receives, and their works.
        memory: Makes a buffer, given its bytes. From pinned memory the copy to an accelerator neither keeps
            the thread nor passes through another buffer; torch reuses such memory once it has been read.
    """

    def __init__(self, number: int, channel: Channel, end: Endpoint) -> None:
        self.channel = channel
        self.decoder = end.decoder(channel)
        self.tag, self.room = _FIRST_TAG + 2 * number, Room()
        self.posted: deque[tuple[torch.Tensor, Any]] = deque()
        self.memory = pinned_bytes if has_streams(end.device) else _bytes


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _envelope(envelope: torch.Tensor, *record: float) -> torch.Tensor:
    ctypes.memmove(envelope.data_ptr(), _RECORD.pack(*record, time.time()), _RECORD.size)
    return envelope


def _copied_lazily(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an activation or gradient as they are now.

    torch copies them if something writes to the tensor before they are sent, which is rare. Not for tensors
    that are accessed by address, like flat buffers, and so not for a part of larger memory.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.untyped_storage().nbytes() == flat.numel():
        with suppress(AttributeError, RuntimeError):  # memory that torch did not allocate
            return flat._lazy_clone()  # private; torch provides it for this purpose
    return flat.clone()


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait(_FOREVER)
