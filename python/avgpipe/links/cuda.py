"""Links between CUDA devices.

Processes of one host that share a device: tensors stay in its memory, control goes through the ring. The sender copies
into a slot of device memory, which the receiver opens once and reads in place:

    sender's lane     F3 ── record ── F4 ...
    its copy stream         └ wait ─ wait(free) ── copy into the slot ── record(full)      then: publish
    receiver's lane                                                       └ wait(full) ── reads the slot ── record(free)

A slot belongs to a slot of the ring, so it is lent and given back with that one's lease: when the last tensor that
reads it is gone. The host waits for nothing. Memory and handles are the driver's own: torch's sharing of CUDA tensors
counts references in a named file of shared memory, which would stay behind a process that is killed.

Processes that have a GPU each: tensors travel by NCCL, what they are by another link. There is a communicator for each
directed edge between two workers, so that neither direction waits for the other. Within one, receives must be posted
in the order of the sends: messages are numbered per edge, and the scheduler's thread, which issues all NCCL calls,
posts the receive for each as soon as its number and format arrive. NCCL works on streams of its own: neither lane nor
host waits, and the receiver's lane waits on the device when it takes the message. Not run on several GPUs yet.
"""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from avgpipe.device import ReadyOnEvent, current_stream, on_accelerator, select, used_on
from avgpipe.links.link import Endpoint, Link, Mailbox, Transport
from avgpipe.links.message import Channel, Decoder, Encoder, Format, Key, Message, padded
from avgpipe.links.shared import Inbox, SharedLink, SharedTransport

# Events that other processes wait for are CUDA's own, as are the streams that they are recorded on: torch.Event has no
# handles, and a torch.Stream would misread these.
cuda: Any = torch.cuda

HANDLE_BYTES = 64  # of memory and of an event
_RECORD_BYTES = 4 * HANDLE_BYTES  # a slot's capacity, and the handles of its memory and its two events
_SMALLEST = 64 << 10
_LAZY_PEER_ACCESS = 1
_BY_HOST = Message.RESULT  # results of evaluations are small, mostly on the CPU, and stay with the caller

Edge = tuple[int, int]  # ranks: from, to


# ---- processes that share a device -------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Device memory, as a flat tensor of bytes, with the events that order its use.

    ``record``: what another process needs to open it.
    """

    memory: torch.Tensor
    full: Any  # recorded by the sender
    free: Any  # recorded by the receiver
    record: bytes


class CudaIpcLink(SharedLink):
    """Connects this worker with another process on the same device. ``slots``: the device's."""

    name = "cuda-ipc"

    def __init__(self, inbox: Inbox, outbox: Inbox, peer: int, end: Endpoint, slots: DeviceSlots) -> None:
        super().__init__(inbox, outbox, peer, end)
        self._slots = slots
        self._copies = cuda.Stream(end.device)
        self._outgoing_slots: dict[tuple[Channel, int], Slot] = {}  # by the address of the ring's slot
        self._copying: deque[tuple[Any, list[torch.Tensor]]] = deque()
        for n, (channel, receiver, decoder) in enumerate(self._incoming):
            if channel.kind != _BY_HOST:
                self._incoming[n] = channel, receiver, _SlotDecoder(decoder, slots, end.device)

    def send(self, key: Key, value: Any) -> None:
        if key.kind == _BY_HOST:
            super().send(key, value)
            return
        channel = Channel.of(key)
        sender, encoder = self._outgoing[channel]
        number, format, text, tensors = encoder.encode(value)
        address = sender.reserve(_RECORD_BYTES + padded(len(text)))
        slot = self._slot(channel, address, format.bytes)
        ctypes.memmove(address, slot.record, _RECORD_BYTES)
        ctypes.memmove(address + _RECORD_BYTES, text, len(text))
        self._copy(slot, format, tensors)
        # The other process waits for what ``full`` was recorded for last: publish only now.
        sender.publish(_RECORD_BYTES + len(text), key.batch, key.micro_batch, number, len(text))

    def _slot(self, channel: Channel, address: int, size: int) -> Slot:
        """The device slot of the ring's slot at ``address``, which the receiver does not hold."""
        slot = self._outgoing_slots.get((channel, address))
        if slot is None or slot.memory.numel() < size:
            if slot is not None:
                self._slots.give(slot)
            slot = self._outgoing_slots[channel, address] = self._slots.make(max(size, _SMALLEST))
        return slot

    def _copy(self, slot: Slot, format: Format, tensors: list[torch.Tensor]) -> None:
        self._copies.wait_stream(current_stream(self._end.device))
        self._copies.wait_event(slot.free)
        with self._copies:
            format.write(tensors, slot.memory)
            slot.full.record(self._copies)
        # The lane goes on and may drop them, or give their slot back: kept until the copy has read them.
        self._copying.append((slot.full, tensors))
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()


class _SlotDecoder(Decoder):
    """Decodes messages that name a slot of device memory."""

    def __init__(self, headers: Decoder, slots: DeviceSlots, device: torch.device) -> None:
        self._headers, self._slots, self._reader = headers, slots, device
        self._opened: dict[bytes, Slot] = {}

    def decode(self, number: int, text_bytes: int, memory: Any, offset: int = 0) -> ReadyOnEvent:
        data = bytes(memoryview(memory)[: _RECORD_BYTES + text_bytes])
        record = data[:_RECORD_BYTES]
        if record not in self._opened:
            self._opened[record] = self._slots.open(record)
        format = self._headers.format(number, data[_RECORD_BYTES:])
        return _InSlot(self._slots, self._opened[record], format, memory, self._reader)


class _InSlot(ReadyOnEvent):
    """A message in a slot; its tensors are made for the stream that receives it."""

    __slots__ = ("_format", "_slot", "_slots")

    def __init__(self, slots: DeviceSlots, slot: Slot, format: Format, lease: Any, at: torch.device) -> None:
        super().__init__(lease, slot.full, at)
        self._slots, self._slot, self._format = slots, slot, format

    def received(self) -> Any:
        stream = cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        memory = self._slots.lend(self._slot, self.value, stream)
        return self._format.read(memory, 0, memory.device)


class DeviceSlots:
    """Slots in the memory of ``device``. The driver's memory, for only the beginning of an allocation can be shared.

    It is not given back while the process lives: a receiver may have it open, and to free it then is undefined.
    Slots that messages have outgrown serve smaller ones.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._spare: list[Slot] = []
        with torch.cuda.device(self._device):
            torch.empty(1, device=self._device)  # makes the device's context this thread's

    def make(self, size: int) -> Slot:
        fitting = [n for n, slot in enumerate(self._spare) if slot.memory.numel() >= size]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda n: self._spare[n].memory.numel()))
        size = 1 << (size - 1).bit_length()  # messages that grow outgrow few slots
        pointer, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(self._device):
            what = f"{size} bytes of device memory"
            self._call("cuMemAlloc_v2", what, ctypes.byref(pointer), ctypes.c_size_t(size))
            self._call("cuIpcGetMemHandle", "sharing device memory", ctypes.byref(handle), pointer)
            full, free = (cuda.Event(interprocess=True) for _ in range(2))
        record = size.to_bytes(HANDLE_BYTES, "little"), bytes(handle), full.ipc_handle(), free.ipc_handle()
        memory = self._tensor(_DeviceMemory(pointer.value, size))
        return Slot(memory, full, free, b"".join(record))

    def give(self, slot: Slot) -> None:
        self._spare.append(slot)

    def open(self, record: bytes) -> Slot:
        size, memory, full, free = (
            record[n : n + HANDLE_BYTES] for n in range(0, _RECORD_BYTES, HANDLE_BYTES)
        )
        pointer, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
        with torch.cuda.device(self._device):
            what = "opening another process's device memory"
            handle = _Handle.from_buffer_copy(memory)
            self._call("cuIpcOpenMemHandle_v2", what, ctypes.byref(pointer), handle, flags)
            opened = [cuda.Event.from_ipc_handle(self._device, handle) for handle in (full, free)]
        tensor = self._tensor(_DeviceMemory(pointer.value, int.from_bytes(size, "little")))
        return Slot(tensor, opened[0], opened[1], record)

    def lend(self, slot: Slot, lease: Any, reader: Any) -> torch.Tensor:
        return self._tensor(_Loan(slot, lease, reader))

    def _call(self, function: str, doing: str, *arguments: Any) -> None:
        """Call a function of the CUDA driver; OSError where it fails."""
        if status := getattr(self._driver, function)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            why = (text.value or b"unknown error").decode()
            raise OSError(f"{doing}: {why} (CUDA error {status})")

    def _tensor(self, memory: _DeviceMemory) -> torch.Tensor:
        # The tensor keeps ``memory``, and with it the lease. The allocator knows nothing of it, so that
        # record_stream has no effect; the event ``free`` does its work.
        return torch.as_tensor(memory, device=self._device)

    def offer(self) -> dict[str, str]:
        """What lets another process find out whether it can open this one's slots."""
        token = secrets.token_bytes(HANDLE_BYTES)
        self._offered = self.make(_SMALLEST)
        self._offered.memory[:HANDLE_BYTES] = torch.tensor(list(token), dtype=torch.uint8)
        self._offered.full.record(cuda.current_stream(self._device))
        return {"token": token.hex(), "slot": self._offered.record.hex(), "device": device_id(self._device)}

    def check(self, offer: dict[str, str]) -> None:
        """Raise ValueError or OSError if the slots of who made ``offer`` are out of reach."""
        if offer["device"] != device_id(self._device):
            raise ValueError("its device is another one")
        slot = self.open(bytes.fromhex(offer["slot"]))
        cuda.current_stream(self._device).wait_event(slot.full)
        if bytes(slot.memory[:HANDLE_BYTES].tolist()).hex() != offer["token"]:
            raise ValueError("what its device memory holds is not what it wrote there")


class _DeviceMemory:
    """Device memory, in the way in which libraries describe it to each other."""

    def __init__(self, pointer: int, size: int) -> None:
        described = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}
        self.__cuda_array_interface__ = described


class _Loan(_DeviceMemory):
    """A slot's memory as long as a tensor reads it."""

    def __init__(self, slot: Slot, lease: Any, reader: Any) -> None:
        super().__init__(slot.memory.data_ptr(), slot.memory.numel())
        self._slot, self._lease, self._reader = slot, lease, reader

    def __del__(self) -> None:
        # All that reads it is issued by now. First the event, then the lease: the sender looks at it in this order.
        if not sys.is_finalizing():
            self._slot.free.record(self._reader)
        self._lease = None


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class IpcTransport(Transport):
    """Slots in the memory of a device that processes of one host share."""

    def offer(self) -> Any:
        self._slots = DeviceSlots(self.device)
        return self._slots.offer()

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        if rank not in self.below["shm"].processes:
            raise ValueError("no shared memory with it")
        self._slots.check(offers[rank])

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> CudaIpcLink:
        shared = self.below["shm"]
        assert isinstance(shared, SharedTransport)
        return CudaIpcLink(*shared.ends(rank), end, self._slots)


# ---- processes that have a device each ---------------------------------------------------------------------------


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


class NcclLink(Link):
    """Connects this worker with rank ``peer``. ``control`` makes the link that carries formats, given its end."""

    name = "nccl"

    def __init__(
        self,
        control: Callable[[Endpoint], Link],
        groups: Mapping[Edge, dist.ProcessGroup],
        peer: int,
        end: Endpoint,
    ) -> None:
        me = dist.get_rank()
        self._out, self._in = groups.get((me, peer)), groups.get((peer, me))
        self._peer, self._end = peer, end
        self._encoders: dict[tuple[Any, ...], Encoder] = {c: end.encoder(c) for c in end.outgoing}
        self._decoders: dict[tuple[Any, ...], Decoder] = {c: end.decoder(c) for c in end.incoming}
        self._sent = self._received = 0  # messages
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._announced: dict[int, tuple[Key, int, str]] = {}  # by number
        self._intake = _Intake(end.mailbox)
        self._control = control(Endpoint(self._intake, torch.device("cpu"), end.incoming, end.outgoing))
        end.mailbox.sources.append(self._collect)  # after the control link's own

    def send(self, key: Key, value: Any) -> None:
        number, format, text, tensors = self._encoders[key[:4]].encode(value)
        if format.bytes:
            # Made on the lane's stream; NCCL's waits for that, and keeps the buffer until it has read it.
            buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._end.device)
            format.write(tensors, buffer)
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
        while self._received in self._announced:
            key, number, text = self._announced.pop(self._received)
            self._received += 1
            format = self._decoders[key[:4]].format(number, text.encode())
            buffer = torch.empty(format.bytes, dtype=torch.uint8, device=self._end.device)
            work = dist.irecv(buffer, self._peer, group=self._in) if format.bytes else None
            self._end.mailbox.put(key, _Posted(buffer, work, format, self._end.device))

    def leave(self) -> None:
        self._control.leave()

    def close(self, patience_s: float) -> None:
        self._end.mailbox.sources.remove(self._collect)
        self._control.close(patience_s)


class _Posted(ReadyOnEvent):
    """A message whose receive is posted. ``value``: the buffer."""

    __slots__ = ("_format",)

    def __init__(self, buffer: torch.Tensor, work: Any, format: Format, device: torch.device) -> None:
        super().__init__(buffer, work, device)
        self._format = format

    def received(self) -> Any:
        if self._ready is not None:
            self._ready.wait()  # on CUDA the current stream waits, not the host
        if on_accelerator(self.value):
            # Allocated on the stream that was current when the receive was posted, read on this one.
            used_on(current_stream(self._device), [self.value])
        return self._format.read(self.value, 0, self.value.device)


class _Intake(Mailbox):
    """The mailbox of the control link: what arrives waits for the scheduler's thread."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.bell, self.sources, self.fail = mailbox.bell, mailbox.sources, mailbox.fail  # type: ignore[method-assign]
        self.arrived: deque[tuple[Key, Any]] = deque()

    def put(self, key: Key, value: Any) -> None:
        self.arrived.append((key, value))

    def deliver(self, key: Key, value: Any) -> None:
        self.put(key, value)
        self.bell.ring()


def device_id(device: torch.device) -> str:
    """Return what names a CUDA device of this host in all of its processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_device(device: torch.device) -> str | None:
    """Return which device a worker would use NCCL with; None without either."""
    return device_id(device) if device.type == "cuda" and dist.is_nccl_available() else None


def nccl_joins(devices: Sequence[str | None]) -> bool:
    """Whether all workers have NCCL and a CUDA device each: it refuses two on one device."""
    return None not in devices and len(set(devices)) == len(devices)


class NcclTransport(Transport):
    """A communicator for each edge, where every worker has a GPU of its own."""

    _edges: dict[Edge, dist.ProcessGroup] | None = None

    def offer(self) -> Any:
        return nccl_device(self.device)

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        if not nccl_joins(offers):
            count = len(set(offers) - {None})
            raise ValueError(f"it needs NCCL and a GPU for each of {len(offers)} workers, which have {count}")

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> NcclLink:
        if self._edges is None:  # for the first link, which all ranks make now
            edges = sorted({(source, rank) for rank, of in enumerate(self.into) for source in of.values()})
            limit_s = self.world.timeout_s
            self._edges = self.world.connect(lambda: edge_groups(edges, end.device, limit_s))
        host = next(n for n, other in enumerate(others) if not isinstance(other, IpcTransport))
        control = partial(others[host].link, rank, others=others[host + 1 :])
        return NcclLink(control, self._edges, rank, end)
