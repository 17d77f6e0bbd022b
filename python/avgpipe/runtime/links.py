"""Links move messages between stages: ``send`` never blocks the caller, arrived messages lie in the mailbox.

Between processes a message is a control record of fixed size, a header when it differs from the channel's last one, and
the tensors. A *channel* is one kind of message of one pipeline between two stages; its messages arrive in the order in
which they were sent. gloo moves no data before the receive is posted and reports completion only to who waits, so each
incoming channel has a thread of its own that waits for what the lanes said they expect.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.message import Header, Key, TensorInfo, assemble, describe

_KINDS = "FBTNCER"
_CONTROL = struct.Struct("<qqq")  # batch, micro-batch, bytes of the header that follows (0: as before)


class Link(Protocol):
    """One worker's connection to the stages that live in one place."""

    def send(self, key: Key, value: Any) -> None: ...

    def expect(self, keys: Iterable[Key]) -> None:
        """Messages that will be needed, in the order of their channel."""

    def flush(self) -> None:
        """Wait until everything sent has left; only when the other end is known to receive it."""

    def close(self) -> None: ...


class LocalLink:
    """Ends in this process: the value is handed over, its tensors detached and shared, not copied."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def send(self, key: Key, value: Any) -> None:
        self._mailbox.deliver(key, assemble(*describe(value)))

    def expect(self, keys: Iterable[Key]) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Channel(NamedTuple):
    kind: str
    pipeline: int
    source: int
    stage: int

    @classmethod
    def of(cls, key: Key) -> Channel:
        return cls(*key[:4])

    def tag(self, stages: int) -> int:
        """Distinguishes the channels between two ranks."""
        place = (self.pipeline * stages + self.source) * stages + self.stage
        return place * len(_KINDS) + _KINDS.index(self.kind)


class GroupLink:
    """The other end is another rank of a torch.distributed group (gloo: CPU memory, CUDA tensors pass through it)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        stages: int,
        device: torch.device,
        mailbox: Mailbox,
        lost: Callable[[str], PeerLost],
    ) -> None:
        self._group, self._rank, self._stages, self._device = group, rank, stages, device
        self._mailbox, self._lost = mailbox, lost
        self._last_sent: dict[Channel, Header] = {}
        self._in_flight: dict[Channel, deque[tuple[int, list[Any]]]] = {}
        self._receivers: dict[Channel, _Receiver] = {}
        self.last_heard: Key | None = None

    def send(self, key: Key, value: Any) -> None:
        header, tensors = describe(value)
        channel = Channel.of(key)
        changed = self._last_sent.get(channel) != header
        text = header.to_bytes() if changed else b""
        self._last_sent[channel] = header
        control = torch.frombuffer(
            bytearray(_CONTROL.pack(key.batch, key.micro_batch, len(text))), dtype=torch.uint8
        )
        buffers = [control]
        if text:
            buffers.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        buffers += [t.cpu().contiguous() for t in tensors if t.numel()]
        tag = channel.tag(self._stages)
        try:
            works = [self._group.send([b], self._rank, tag) for b in buffers]
        except RuntimeError as error:
            raise self._lost(f"sending {key}: {error}") from error
        # The works keep their buffers alive. A batch begins only when the one before it has been received on this
        # channel, so waiting for the works of two batches ago never blocks.
        sent = self._in_flight.setdefault(channel, deque())
        sent.append((key.batch, works))
        while sent[0][0] < key.batch - 1:
            self._finish(sent.popleft()[1], key)

    def _finish(self, works: list[Any], key: Key) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(f"sending {key}: {error}") from error

    def flush(self) -> None:
        for channel, sent in self._in_flight.items():
            while sent:
                batch, works = sent.popleft()
                self._finish(works, Key(*channel, batch, -1))

    def expect(self, keys: Iterable[Key]) -> None:
        for key in keys:
            channel = Channel.of(key)
            if channel not in self._receivers:
                self._receivers[channel] = _Receiver(self, channel)
            self._receivers[channel].expected.put(key)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.expected.put(None)

    def _receive(self, channel: Channel, expected: queue.SimpleQueue[Key | None]) -> None:
        """Body of a channel's thread: receive what is expected, in order, until told to end."""
        tag = channel.tag(self._stages)
        header: Header | None = None

        def receive(buffers: list[torch.Tensor]) -> None:
            for work in [self._group.recv([b], self._rank, tag) for b in buffers]:
                work.wait()

        while (key := expected.get()) is not None:
            try:
                control = torch.empty(_CONTROL.size, dtype=torch.uint8)
                receive([control])
                batch, micro_batch, size = _CONTROL.unpack(control.numpy().tobytes())
                if size:
                    text = torch.empty(size, dtype=torch.uint8)
                    receive([text])
                    header = Header.from_bytes(text.numpy().tobytes())
                assert header is not None
                tensors = [x.empty() for x in header.leaves if isinstance(x, TensorInfo)]
                receive([t for t in tensors if t.numel()])
                if (batch, micro_batch) != (key.batch, key.micro_batch):
                    raise RuntimeError(f"expected {key}, received batch {batch} micro-batch {micro_batch}")
                self.last_heard = key
                self._mailbox.deliver(key, assemble(header, [t.to(self._device) for t in tensors]))
            except Exception as error:
                self._mailbox.fail(self._lost(f"receiving {key}: {error}"))
                return


class _Receiver:
    """The thread of one incoming channel and the queue of what it is to receive."""

    def __init__(self, link: GroupLink, channel: Channel) -> None:
        self.expected: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=link._receive,
            args=(channel, self.expected),
            name=f"avgpipe-receive-{channel.kind}{channel.pipeline}-{channel.source}-{channel.stage}",
            daemon=True,
        )
        self.thread.start()
