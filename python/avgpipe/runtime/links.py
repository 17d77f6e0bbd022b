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
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.message import Header, Key, TensorInfo, assemble, describe
from avgpipe.runtime.world import transport_reason

_KINDS = "FBTNCER"
_PATIENCE_S = 0.5  # how long closing waits for the threads before it breaks their waits
_CLOSE_S = 10.0  # and how long for each of them afterwards
_UNUSED_TAG = 2**31 - 1
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
            raise self._lost(f"sending {key}: {transport_reason(error)}") from error
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
            raise self._lost(f"sending {key}: {transport_reason(error)}") from error

    def flush(self) -> None:
        for channel, sent in self._in_flight.items():
            while sent:
                batch, works = sent.popleft()
                self._finish(works, Key(*channel, batch, -1))

    def expect(self, keys: Iterable[Key]) -> None:
        for key in keys:
            channel = Channel.of(key)
            if channel not in self._receivers:
                self._receivers[channel] = _Receiver(self, channel, self._stages, self._device)
            self._receivers[channel].expected.put(key)

    def heard(self, key: Key, value: Any) -> None:
        self.last_heard = key
        self._mailbox.deliver(key, value)

    def broken(self, key: Key, error: Exception) -> None:
        self._mailbox.fail(self._lost(f"receiving {key}: {transport_reason(error)}"))

    def post(self, buffer: torch.Tensor, tag: int) -> Any:
        return self._group.recv([buffer], self._rank, tag)

    def close(self) -> None:
        """End the threads: one that is inside the transport when the interpreter ends would abort the process."""
        receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.end()
        deadline = time.monotonic() + _PATIENCE_S
        if all(receiver.ended(max(0.0, deadline - time.monotonic())) for receiver in receivers):
            return
        # Some wait for what will never come. gloo cannot cancel a receive, but a receive that runs into its time limit
        # ends all others of the group, which is this pipeline's own.
        try:
            self.post(torch.empty(1), _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass
        for receiver in receivers:
            receiver.ended(_CLOSE_S)


class _Receiver:
    """The thread of one incoming channel: receives what is expected, in order, until told to end."""

    def __init__(self, link: GroupLink, channel: Channel, stages: int, device: torch.device) -> None:
        self.expected: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._link, self._tag, self._device = link, channel.tag(stages), device
        self._header: Header | None = None
        self._closing = False
        name = f"avgpipe-receive-{channel.kind}{channel.pipeline}-{channel.source}-{channel.stage}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (key := self.expected.get()) is not None:
            try:
                self._link.heard(key, self._message(key))
            except Exception as error:
                if not self._closing:
                    self._link.broken(key, error)
                return

    def _message(self, key: Key) -> Any:
        control = torch.empty(_CONTROL.size, dtype=torch.uint8)
        self._receive([control])
        batch, micro_batch, size = _CONTROL.unpack(control.numpy().tobytes())
        if size:
            text = torch.empty(size, dtype=torch.uint8)
            self._receive([text])
            self._header = Header.from_bytes(text.numpy().tobytes())
        assert self._header is not None
        tensors = [x.empty() for x in self._header.leaves if isinstance(x, TensorInfo)]
        self._receive([t for t in tensors if t.numel()])
        if (batch, micro_batch) != (key.batch, key.micro_batch):
            raise RuntimeError(f"batch {batch} micro-batch {micro_batch} came instead")
        return assemble(self._header, [t.to(self._device) for t in tensors])

    def _receive(self, buffers: list[torch.Tensor]) -> None:
        for work in [self._link.post(b, self._tag) for b in buffers]:
            work.wait()

    def end(self) -> None:
        self._closing = True
        self.expected.put(None)

    def ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()
