"""The link between processes with a GPU each: tensors are sent by NCCL, their formats by another link.

A communicator joins two workers in one direction, for one pipeline: it runs what is sent in order, and each kernel
spins until its peer's runs. With one for both directions, two workers that send first would wait for each other;
with one for all pipelines, the message of one would wait for the kernels of another. There is one if large
messages go that way. All other messages of that direction and pipeline use it too, and the rest goes through host
memory. Receives must be posted in the order of the sends: messages are numbered per communicator, and the
scheduler's thread, which issues all NCCL calls, posts the receive for each as soon as its number and format
arrive. Not earlier: the next one may be of any channel and size, and a receive without a matching send would
keep its communicator busy for ever. NCCL works on its own streams: neither lane nor host waits, and the
receiver's lane waits on the device when it takes the message. Not run on several GPUs yet.

A kernel that spins holds up what is behind it in its hardware queue, whatever the stream. So each stream needs a queue
of its own (``avgpipe.ranks.environment.launch_environment``), and where pipelines are many they share communicators:
there are no more streams than queues.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as Unanswered
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from avgpipe.device import ReadyOnEvent, current_stream, on_accelerator, select, used_on
from avgpipe.links.codec import Decoder, Encoder, Format
from avgpipe.links.link import BY_HOST, OF_MICRO_BATCHES, Channel, Key, Link, Mailbox, Message
from avgpipe.links.slots import device_id
from avgpipe.links.transport import Endpoint, Transport
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.queues import warn_of_few_queues
from avgpipe.ranks.rendezvous import in_thread

_LARGE = OF_MICRO_BATCHES | {Message.TIED_GRADIENTS, Message.REFERENCE_UPDATE, Message.EVALUATION}
_END_S = 5.0  # timeout for ending a communicator
_POLL_S = 1e-3
_MOST = 16  # communicators of a rank, if it has no more neighbours: half of a device's 32 queues


class Edge(NamedTuple):
    """A communicator, from one rank to another, for the pipelines of one share."""

    source: int
    target: int
    share: int = 0


def shares_of(into: Sequence[Mapping[Channel, int]]) -> int:
    """Return into how many shares pipelines are divided, by their numbers: one each, if they are few enough."""
    pairs, pipelines = set(), set()
    for rank, channels in enumerate(into):
        for channel, source in channels.items():
            if channel.kind in _LARGE:
                pairs.add((source, rank))
                pipelines.add(channel.pipeline)
    busiest = max(Counter(rank for pair in pairs for rank in pair).values(), default=1)
    return max(1, min(len(pipelines), _MOST // busiest))


def edges_of(into: Sequence[Mapping[Channel, int]]) -> list[Edge]:
    """Return the edges that need communicators, in an order in which every rank can connect its own in turn.

    Both ends of one wait for each other, so the order must be global. It is in rounds with at most one per
    rank; otherwise the last of a long chain would wait for all before it.

    Args:
        into: For each rank, the channels that end there, and the ranks where they begin.
    """
    shares = shares_of(into)
    edges = {
        Edge(source, rank, channel.pipeline % shares)
        for rank, channels in enumerate(into)
        for channel, source in channels.items()
        if channel.kind in _LARGE
    }
    turns: list[set[int]] = []  # the ranks that are busy
    placed = []
    for edge in sorted(edges):
        turn = next((n for n, busy in enumerate(turns) if busy.isdisjoint(edge[:2])), len(turns))
        if turn == len(turns):
            turns.append(set())
        turns[turn].update(edge[:2])
        placed.append((turn, edge))
    return [edge for _, edge in sorted(placed)]


def options(timeout_s: float) -> Any:
    """Return the options of a communicator.

    Its stream has high priority: torch takes it from a pool of its own, so it is never a lane's, which kernels of NCCL
    would block; and short kernels that others wait for go first. NCCL's time limit, after which torch ends the process,
    comes later than ours, whose error names the place.
    """
    found = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found._timeout = timedelta(seconds=timeout_s + LIMITS.group_spare_s)
    return found


def communicator(store: Any, rank: int, timeout_s: float) -> Any:
    """Return rank 0's or 1's end of a communicator of two.

    Not by ``new_group``, in which all ranks must take part, in one order, even those without such a device.
    With its local synchronization it names a group by the number of earlier ones of its caller, which may
    differ at the two ends.
    """
    return dist.ProcessGroupNCCL(store, rank, 2, options(timeout_s))


def connect(
    edges: Iterable[Edge], me: int, make: Callable[[Edge, int], Any], device: torch.device
) -> dict[Edge, Any]:
    """Make this rank's communicators, and try them now: the first message in mid-run would block the host.

    Args:
        edges: All in which ``me`` may have a part, in the global order.
        make: Makes an end of one: 0 where it begins, 1 where it ends.
    """
    select(device)  # for the thread that connects, whichever it is
    groups = {}
    for edge in edges:
        end = int(edge.source != me)
        group = groups[edge] = make(edge, end)
        token = [torch.zeros(1, device=device)]
        (group.recv(token, 0, 0) if end else group.send(token, 1, 0)).wait()
    return groups


def end_communicators(
    ends: Sequence[tuple[Any, Callable[[], Any], Sequence[Any]]], patience_s: float
) -> None:
    """End communicators, all at once, as the other side may end them in another order.

    Args:
        ends: For each the group, the function that ends it in peace, and its works. If one of these is not
            done, no peer will match it any more, and the group is aborted; the peaceful way would wait for
            it.
        patience_s: For the works.
    """
    deadline = time.monotonic() + patience_s
    ending = []
    for group, end, works in ends:
        while not (done := all(work.is_completed() for work in works)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        ending.append(in_thread(end if done else group.abort))
    deadline = time.monotonic() + _END_S
    for future in ending:
        with suppress(Unanswered, RuntimeError):  # a failure has been reported before
            future.result(max(0.0, deadline - time.monotonic()))


class _Outgoing:
    """The sending end of a communicator."""

    def __init__(self, group: Any) -> None:
        self.group, self.sent = group, 0
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, buffer: torch.Tensor) -> None:
        """Send a buffer, and keep it until it is sent."""
        self._pending.append((self.group.send([buffer], 1, 0), buffer))
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    @property
    def works(self) -> list[Any]:
        return [work for work, _ in self._pending]


class _Incoming:
    """The receiving end of a communicator. ``announced``: formats of messages, by their numbers."""

    def __init__(self, group: Any) -> None:
        self.group, self.received = group, 0
        self.announced: dict[int, tuple[Key, int, str]] = {}
        self._pending: deque[Any] = deque()

    def post(self, buffer: torch.Tensor) -> Any:
        """Post the receive of the next message, and return its work."""
        while self._pending and self._pending[0].is_completed():
            self._pending.popleft()
        self._pending.append(self.group.recv([buffer], 0, 0))
        return self._pending[-1]

    @property
    def works(self) -> list[Any]:
        return list(self._pending)


class NcclLink(Link):
    """Connects this worker with another one.

    Args:
        control: Makes the link that carries formats, given its end.
        out: The communicators to the peer, by pipeline; the control link sends everything of other pipelines.
        into: The communicators from the peer, likewise.
    """

    name = "nccl"

    def __init__(
        self,
        control: Callable[[Endpoint], Link],
        out: Mapping[int, Any],
        into: Mapping[int, Any],
        end: Endpoint,
    ) -> None:
        outgoing = {group: _Outgoing(group) for group in out.values()}
        incoming = {group: _Incoming(group) for group in into.values()}
        self._out = {pipeline: outgoing[group] for pipeline, group in out.items()}
        self._in = {pipeline: incoming[group] for pipeline, group in into.items()}
        self._ends: list[_Outgoing | _Incoming] = [*outgoing.values(), *incoming.values()]
        self._end = end
        self._encoders: dict[tuple[Any, ...], Encoder] = {c: end.encoder(c) for c in end.outgoing}
        self._decoders: dict[tuple[Any, ...], Decoder] = {c: end.decoder(c) for c in end.incoming}
        self._intake = _Intake(end.mailbox)
        self._control = control(Endpoint(self._intake, torch.device("cpu"), end.incoming, end.outgoing))
        end.mailbox.sources.append(self._collect)  # after the control link's own

    def send(self, key: Key, value: Any) -> None:
        out = self._out.get(key.pipeline)
        if out is None or key.kind == BY_HOST:
            self._control.send(key, value)
            return
        number, format, text, tensors = self._encoders[key[:4]].encode(value)
        if format.end:
            out.send(self._buffer(key, format, tensors))
        self._control.send(key, [torch.tensor([out.sent, number]), text.decode()])
        out.sent += 1

    def _buffer(self, key: Key, format: Format, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return a message's bytes, kept until NCCL's stream, which waits for the lane's, has read them."""
        if key.kind in OF_MICRO_BATCHES and format.is_memory_of(tensors):
            return tensors[0].view(-1).view(torch.uint8)  # activations and gradients are not written to
        # Others may be overwritten at once: on the lane's stream, so after this copy.
        buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._end.device)
        format.write(tensors, buffer)
        return buffer[: format.end]

    def _collect(self) -> None:
        while self._intake.arrived:
            key, value = self._intake.arrived.popleft()
            into = self._in.get(key.pipeline)
            if into is None or key.kind == BY_HOST:
                self._end.mailbox.put(key, _FromHost(value, None, self._end.device))
                continue
            numbers, text = value
            sent, number = numbers.tolist()
            into.announced[sent] = key, number, text
            while into.received in into.announced:
                self._post(into)

    def _post(self, into: _Incoming) -> None:
        """Post the receive of the next message, which was announced."""
        key, number, text = into.announced.pop(into.received)
        into.received += 1
        format = self._decoders[key[:4]].format(number, text.encode())
        # NCCL waits for the current stream's work: a stream of its own has no work of lanes or the caller.
        with self._end.receiving():
            buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._end.device)
            work = into.post(buffer[: format.end]) if format.end else None
        self._end.mailbox.put(key, _Posted(buffer, work, format, self._end.device))

    def leave(self) -> None:
        self._control.leave()

    def close(self, patience_s: float) -> None:
        self._end.mailbox.sources.remove(self._collect)
        self._control.close(patience_s)
        ends = [(end.group, end.group.shutdown, end.works) for end in self._ends]
        end_communicators(ends, min(patience_s, _END_S))


class _Posted(ReadyOnEvent):
    """A message whose receive is posted. ``value``: the buffer."""

    __slots__ = ("_format",)

    def __init__(self, buffer: torch.Tensor, work: Any, format: Format, device: torch.device) -> None:
        super().__init__(buffer, work, device)
        self._format = format

    @property
    def has_happened(self) -> bool:
        return self._ready is None or bool(self._ready.is_completed())

    def received(self) -> Any:
        if self._ready is not None:
            self._ready.wait()  # on CUDA the current stream waits, not the host
        if on_accelerator(self.value):
            # Allocated on the stream that was current when the receive was posted, read on this one.
            used_on(current_stream(self._device), [self.value])
        return self._format.read(self.value, 0, self.value.device)


class _FromHost(ReadyOnEvent):
    """A small message in the host's memory."""

    __slots__ = ()
    has_happened = True

    def received(self) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._to_device, self.value)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = tensor.detach().to(self._device)
        return moved.requires_grad_(tensor.requires_grad)


class _Intake(Mailbox):
    """The mailbox of the control link: it keeps what arrives for the scheduler's thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.bell, self.sources, self.fail = mailbox.bell, mailbox.sources, mailbox.fail  # type: ignore[method-assign]
        self.arrived: deque[tuple[Key, Any]] = deque()

    def put(self, key: Key, value: Any) -> None:
        self.arrived.append((key, value))

    def deliver(self, key: Key, value: Any) -> None:
        self.put(key, value)
        self.bell.ring()


def nccl_device(device: torch.device) -> str | None:
    """Return the device that a worker would use NCCL with; None without CUDA or NCCL."""
    return device_id(device) if device.type == "cuda" and dist.is_nccl_available() else None


def nccl_joins(devices: Sequence[str | None]) -> bool:
    """Whether workers have NCCL and a CUDA device each: it refuses two on one device."""
    return None not in devices and len(set(devices)) == len(devices)


class NcclTransport(Transport):
    """Communicators between any two workers with their own GPUs."""

    def offer(self) -> Any:
        return nccl_device(self.device)

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        if not nccl_joins([offers[self.world.rank], offers[rank]]):
            raise ValueError("it needs NCCL and a GPU of its own at each end")

    def connect(self, ranks: Sequence[int]) -> None:
        me, limit_s = self.world.rank, self.world.timeout_s
        edges = [edge for edge in edges_of(self.into) if me in edge[:2] and set(ranks) & set(edge[:2])]
        warn_of_few_queues(len(edges))
        store: Any = self.world.store() if edges else None

        def make(edge: Edge, end: int) -> Any:
            name = f"from {edge.source} to {edge.target}, {edge.share}"
            return communicator(dist.PrefixStore(name, store), end, limit_s)  # type: ignore[attr-defined]

        self._groups = connect(edges, me, make, self.device)

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> NcclLink:
        me, (host, *below) = self.world.rank, others
        out, into = self._between(me, rank), self._between(rank, me)
        return NcclLink(partial(host.link, rank, others=below), out, into, end)

    def _between(self, source: int, target: int) -> dict[int, Any]:
        """Return the communicators from one rank to another, by pipeline."""
        shares = shares_of(self.into)
        pipelines = {channel.pipeline for channels in self.into for channel in channels}
        edges = {i: Edge(source, target, i % shares) for i in sorted(pipelines)}
        return {i: self._groups[edge] for i, edge in edges.items() if edge in self._groups}
