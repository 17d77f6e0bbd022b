"""Shared memory between processes of one host: one copy on sending, and the receiver reads in place.

Each worker has an *inbox*, memory that its peers map: a bell that they ring and a ring of records for each
channel that ends here. Tensors lie in slots, which the sender makes and the receiver maps. A slot is free again
when the last tensor that reads it is freed.
"""

from __future__ import annotations

import os
import queue
import secrets
import select
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from avgpipe.device import has_streams, on_accelerator, pinned_bytes
from avgpipe.links.codec import Encoder, Format, checksum, padded, view
from avgpipe.links.link import Channel, Key, Link
from avgpipe.links.transport import Endpoint, Transport, flip_bit
from avgpipe_ext.ring import Bell, Memory, Receiver, Sender, copy

if TYPE_CHECKING:
    from avgpipe.links.codec import ToHost

_POLL_S = 1e-3
_TOKEN_BYTES = 64  # at the beginning of an inbox: proves to its opener that it is the right memory
# After it, on its own cache line, a byte that is not zero once nothing is taken any more.
_LEFT_BYTES = 64
_HEAD_BYTES = _TOKEN_BYTES + _LEFT_BYTES
_CHECKSUM_BITS = 32

_Words = tuple[int, int, int, int]  # batch, micro-batch, the format's number, bytes of its text


class Inbox:
    """The inbox of this worker, for ``channels``, or of another worker, opened from its ``offer``."""

    def __init__(self, memory: Memory, channels: Iterable[Channel]) -> None:
        self.memory, self.bell, self._bytes = memory, Bell(memory, _HEAD_BYTES), memoryview(memory)
        self._rings = {channel: _ring(n) for n, channel in enumerate(channels)}

    @classmethod
    def create(cls, channels: Collection[Channel]) -> Inbox:
        return cls(Memory.create(_ring(len(channels))), channels)

    def offer(self) -> dict[str, Any]:
        """Return what another process of this host needs to open it."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._bytes[:_TOKEN_BYTES] = token
        return {"host": host(), "pid": os.getpid(), "path": self.memory.path, "token": token.hex()}

    @classmethod
    def open(cls, offer: dict[str, Any], channels: Collection[Channel]) -> Inbox:
        """Open another worker's inbox; OSError, or ValueError, if that memory is not within reach."""
        found = cls(Memory.open(offer["path"], _ring(len(channels))), channels)
        if found._bytes[:_TOKEN_BYTES].hex() != offer["token"]:
            raise ValueError(f"{offer['path']} is not the memory that was offered")
        return found

    def leave(self) -> None:
        """Mark that this worker takes nothing more from it, so that senders need not wait for that."""
        self._bytes[_TOKEN_BYTES] = 1

    @property
    def is_left(self) -> bool:
        return bool(self._bytes[_TOKEN_BYTES])

    def sender(self, channel: Channel) -> Sender:
        """Return the writing end of a channel."""
        return Sender(self.memory, self._rings[channel], self.bell)

    def receiver(self, channel: Channel, sender_pid: int) -> Receiver:
        """Return the reading end of a channel."""
        return Receiver(self.memory, self._rings[channel], sender_pid)


def _ring(number: int) -> int:
    """Return the offset of a ring: after token, mark and bell."""
    return _HEAD_BYTES + padded(Bell.BYTES) + number * Sender.RING_BYTES


def host() -> str:
    """Return text that is equal in processes that can share memory: one kernel and one PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"


class SharedLink(Link):
    """Connects this worker with another process of this host.

    Args:
        inbox: This worker's.
        outbox: The other one's.
        peer: The other one's process.
        end: This one.
    """

    name = "shared memory"

    def __init__(self, inbox: Inbox, outbox: Inbox, peer: int, end: Endpoint) -> None:
        self._inbox, self._outbox, self._peer, self._end = inbox, outbox, peer, end
        self._outgoing: dict[Any, tuple[Any, Encoder]] = {
            c: (outbox.sender(c), end.encoder(c)) for c in end.outgoing
        }
        self._incoming = [(c, inbox.receiver(c, peer), end.decoder(c)) for c in end.incoming]
        self._on_host = not has_streams(end.device)
        # Messages that an accelerator still copies to the host: a thread waits for that, and then sends them.
        self._later: queue.SimpleQueue[_Later | None] = queue.SimpleQueue()
        self._late = 0  # messages in that queue
        self._to_host: dict[tuple[Any, ...], ToHost] = {}  # by channel
        self._lock = threading.Lock()  # for senders, and for that number
        self._thread: threading.Thread | None = None
        self._flip: int | None = None  # the bit of the next message that a test flips
        end.mailbox.sources.append(self._collect)

    def send(self, key: Key, value: Any) -> None:
        channel = key[:4]  # a Channel is such a tuple
        sender, encoder = self._outgoing[channel]
        number, format, text, tensors = encoder.encode(value)
        total = padded(len(text)) + format.bytes
        words = key.batch, key.micro_batch, number, len(text)
        if not self._on_host:
            with self._lock:
                is_late = self._late > 0 or any(map(on_accelerator, tensors))
                self._late += is_late  # later messages go behind it
            if is_late:
                self._send_copied(sender, format, text, tensors, channel, words)
                return
        address = sender.reserve(total) if total else 0
        if total:
            format.write_all(text, tensors, address)
        self._publish(sender, channel, words, address, total)

    def _publish(
        self, sender: Sender, channel: tuple[Any, ...], words: _Words, address: int, size: int
    ) -> None:
        if self._end.verifier is not None:
            words = _sealed(words, channel, view(address, size))
        if self._flip is not None:
            flip_bit([torch.frombuffer(view(address, size), dtype=torch.uint8)], self._flip)
            self._flip = None
        sender.publish(size, *words)

    def _send_copied(
        self,
        sender: Sender,
        format: Format,
        text: bytes,
        tensors: list[torch.Tensor],
        channel: tuple[Any, ...],
        words: _Words,
    ) -> None:
        """Let a thread send once a device has copied the message to the host."""
        from avgpipe.links.codec import ToHost

        memory = pinned_bytes(padded(len(text)) + format.bytes)
        device = next((t.device for t in tensors if on_accelerator(t)), self._end.device)
        if channel not in self._to_host:
            self._to_host[channel] = ToHost(channel[0], device)
        made = self._to_host[channel].write(format, text, tensors, memory.data_ptr())
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_later, name="avgpipe-copied", daemon=True)
            self._thread.start()
        self._later.put(_Later(made, sender, memory, channel, words))

    def _send_later(self) -> None:
        try:
            while (item := self._later.get()) is not None:
                item.made.synchronize()
                size = item.memory.numel()
                with self._lock:
                    address = item.sender.reserve(size) if size else 0
                    if size:
                        copy(address, item.memory.data_ptr(), size)
                    self._publish(item.sender, item.channel, item.words, address, size)
                    self._late -= 1
        except Exception as error:
            self._end.mailbox.fail(error)

    def send_flipped(self, key: Key, value: Any, bit: int) -> None:
        self._flip = bit
        self.send(key, value)

    def _collect(self) -> None:
        for channel, receiver, decoder in self._incoming:
            try:
                while (record := receiver.take()) is not None:
                    size, batch, micro_batch, number, text_bytes, lease = record
                    key = Key(*channel, batch, micro_batch)
                    if self._end.verifier is not None:
                        sealed, text_bytes = text_bytes, text_bytes >> _CHECKSUM_BITS
                        data = b"" if lease is None else memoryview(lease)[:size]
                        if _sealed((batch, micro_batch, number, text_bytes), channel, data)[-1] != sealed:
                            raise self._end.verifier.damaged(key)
                    self._end.mailbox.put(key, decoder.decode(number, text_bytes, lease))
            except (FileNotFoundError, ProcessLookupError):
                pass  # memory not opened yet ended with its process, whose death is reported elsewhere

    def leave(self) -> None:
        self._inbox.leave()  # a peer that closes later, or too, need not wait for it

    def close(self, patience_s: float) -> None:
        # A message that is not taken yet ends with its sender, so a peer that still takes some may take the
        # last.
        self.leave()
        self._end.mailbox.sources.remove(self._collect)
        if self._thread is not None:
            self._later.put(None)
            self._thread.join(patience_s)
        senders = [sender for sender, _ in self._outgoing.values()]
        self._wait_for(
            lambda: self._outbox.is_left or not any(sender.waiting() for sender in senders), patience_s
        )
        self._outgoing.clear()

    def _wait_for(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Wait until ``condition`` is true, while the other process lives; return False if it never was."""
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline or not _is_alive(self._peer):
                return False
            time.sleep(_POLL_S)
        return True


def _sealed(words: _Words, channel: tuple[Any, ...], data: Any) -> _Words:
    """Return a record's words with a checksum of them, channel and message bytes in the last one."""
    place = zlib.crc32(repr((*channel, *words)).encode())
    return *words[:3], words[3] << _CHECKSUM_BITS | checksum(data, place)


class _Later(NamedTuple):
    """A message that is being copied to the host. ``made``: the event at which it is there."""

    made: Any
    sender: Sender
    memory: torch.Tensor
    channel: tuple[Any, ...]
    words: _Words


class SharedTransport(Transport):
    """Shared memory, between processes of one host."""

    remedy = (
        "use 'auto' or 'gloo' where workers are on several hosts, or share one space of process numbers between "
        "containers"
    )

    def offer(self) -> Any:
        self._inbox, self._opened = Inbox.create(self.into[self.world.rank]), dict[int, Inbox]()
        self.bell = self._inbox.bell
        return self._inbox.offer()

    def bell_place(self) -> list[Any]:
        return [self._inbox.memory.path, self._inbox.memory.bytes, _HEAD_BYTES]

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        theirs = offers[rank]
        if theirs["host"] != host():
            raise ValueError("not on this host")
        self._opened[rank] = Inbox.open(theirs, self.into[rank])
        self.processes[rank] = theirs["pid"]

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> SharedLink:
        return SharedLink(*self.ends(rank), end)

    def ends(self, rank: int) -> tuple[Inbox, Inbox, int]:
        """Return this worker's inbox, and the inbox and process of ``rank``."""
        return self._inbox, self._opened[rank], self.processes[rank]


def _is_alive(process: int) -> bool:
    try:
        file = os.pidfd_open(process)
    except OSError:
        return False
    try:
        return not select.select([file], [], [], 0)[0]  # readable once it has ended, also before it is reaped
    finally:
        os.close(file)
