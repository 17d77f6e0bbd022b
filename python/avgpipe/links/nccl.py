"""CUDA between processes that have a GPU each: tensors travel by NCCL, what they are by another link.

A communicator for each directed edge between two workers, so that neither direction waits for the other. Within one,
receives must be posted in the order of the sends: messages are numbered per edge, and the scheduler's thread, which
issues all NCCL calls, posts the receive for each as soon as its number and format arrive. NCCL works on streams of its
own: neither lane nor host waits, and the receiver's lane waits on the device when it takes the message.

Not run on several GPUs yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from avgpipe import device as streams
from avgpipe.device import Handed, select
from avgpipe.links.cuda_ipc import read, write
from avgpipe.links.link import Link, Mailbox
from avgpipe.links.message import Channel, Key
from avgpipe.links.wire import Decoder, Encoder, Format, narrowed

Edge = tuple[int, int]  # ranks: from, to


def edge_groups(
    edges: Sequence[Edge], device: torch.device, timeout_s: float, backend: str = "nccl"
) -> dict[Edge, dist.ProcessGroup]:
    """A communicator for each of ``edges``, which all ranks name alike; made and tried now, not in mid-run."""
    select(device)  # for whichever thread connects
    limit = timedelta(seconds=timeout_s)
    groups = {edge: dist.new_group(list(edge), timeout=limit, backend=backend) for edge in edges}
    for edge, group in groups.items():
        token = torch.zeros(1, device=device)
        if dist.get_rank() == edge[0]:
            dist.send(token, edge[1], group=group)
        elif dist.get_rank() == edge[1]:
            dist.recv(token, edge[0], group=group)
    return groups


class NcclLink:
    """To and from rank ``peer``. ``control``: makes the link that carries formats, given its mailbox."""

    name = "nccl"

    def __init__(
        self,
        control: Callable[[Mailbox], Link],
        groups: dict[Edge, dist.ProcessGroup],
        peer: int,
        device: torch.device,
        mailbox: Mailbox,
        wire_dtype: torch.dtype | None,
    ) -> None:
        me = dist.get_rank()
        self._out, self._in = groups.get((me, peer)), groups.get((peer, me))
        self._peer, self._device, self._mailbox, self._wire_dtype = peer, device, mailbox, wire_dtype
        self._encoders: dict[Channel, Encoder] = {}
        self._decoders: dict[Channel, Decoder] = {}
        self._sent = self._received = 0  # messages
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._announced: dict[int, tuple[Key, int, str]] = {}  # by number
        self._intake = _Intake(mailbox)
        self._control = control(self._intake)
        mailbox.sources.append(self._collect)  # after the control link's own

    def send(self, key: Key, value: Any) -> None:
        channel = Channel.of(key)
        encoder = self._encoders.get(channel)
        if encoder is None:
            encoder = self._encoders[channel] = Encoder(narrowed(channel, self._wire_dtype))
        number, format, text, tensors = encoder.encode(value)
        if format.bytes:
            # Made on the lane's stream; NCCL's waits for that, and keeps the buffer until it has read it.
            buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._device)
            write(format, tensors, buffer)
            self._sending.append((dist.isend(buffer, self._peer, group=self._out), buffer))
        self._control.send(key, [torch.tensor([self._sent, number]), text.decode()])
        self._sent += 1
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def _collect(self) -> None:
        while self._intake.arrived:
            key, (numbers, text) = self._intake.arrived.popleft()
            sent, number = numbers.tolist()
            self._announced[sent] = key, number, text
        while (next_one := self._announced.pop(self._received, None)) is not None:
            self._received += 1
            self._post(*next_one)

    def _post(self, key: Key, number: int, text: str) -> None:
        channel = Channel.of(key)
        decoder = self._decoders.get(channel)
        if decoder is None:
            decoder = self._decoders[channel] = Decoder(narrowed(channel, self._wire_dtype), self._device)
        format = decoder.format(number, text.encode())
        buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._device)
        work = dist.irecv(buffer, self._peer, group=self._in) if format.bytes else None
        self._mailbox.put(key, _Posted(buffer, work, format, self._device))

    def close(self, patience_s: float) -> None:
        self._mailbox.sources.remove(self._collect)
        self._control.close(patience_s)


class _Posted(Handed):
    """A message whose receive is posted. ``value``: the buffer."""

    __slots__ = ("_format",)

    def __init__(self, buffer: torch.Tensor, work: Any, format: Format, device: torch.device) -> None:
        super().__init__(buffer, work, device)
        self._format = format

    def received(self) -> Any:
        if self._ready is not None:
            self._ready.wait()  # on CUDA the current stream waits, not the host
        if self.value.is_cuda:
            # Allocated on the stream that was current when the receive was posted, read on this one.
            self.value.record_stream(streams.cuda.current_stream(self._device))
        return read(self._format, self.value)


class _Intake(Mailbox):
    """The mailbox of the control link: what arrives waits for the scheduler's thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self.sources = mailbox, mailbox.sources
        self.arrived: deque[tuple[Key, Any]] = deque()

    def put(self, key: Key, value: Any) -> None:
        self.arrived.append((key, value))

    def deliver(self, key: Key, value: Any) -> None:
        self.arrived.append((key, value))
        self._mailbox.bell.ring()

    def fail(self, failure: BaseException, source: int | None = None) -> None:
        self._mailbox.fail(failure, source)
