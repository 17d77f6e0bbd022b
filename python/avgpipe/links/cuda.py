"""The link between processes of one host that share a CUDA device: tensors stay in its memory.

Control messages go through the shared-memory ring. The sender copies into a slot of device memory, which the
receiver opens once and reads in place:

    sender's lane     F3 ── record ── F4 ...
    its copy stream         └ wait ─ wait(free) ── copy into the slot ── record(full)      then: publish
    receiver's lane                                                       └ wait(full) ── reads the slot ── record(free)

A slot belongs to a slot of the ring, so it is lent and returned with that one's lease: when the last tensor
that reads it is freed. The host waits for nothing. Memory and handles are the driver's own: torch's sharing
of CUDA tensors counts references in a named file of shared memory, which would remain after a process is
killed.
"""

from __future__ import annotations

import ctypes
import secrets
import struct
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from avgpipe.device import ReadyOnEvent, current_stream, foreign_memory, used_on
from avgpipe.links.codec import Decoder, Format, padded
from avgpipe.links.link import BY_HOST, OF_MICRO_BATCHES, Channel, Endpoint, Key, Link, Transport
from avgpipe.links.shared import Inbox, SharedLink, SharedTransport
from avgpipe_ext.driver import driver

# Events that other processes wait for are CUDA's own, as are the streams that they are recorded on: torch.Event has no
# handles, and a torch.Stream would misread these.
cuda: Any = torch.cuda

HANDLE_BYTES = 64  # of memory and of an event
_RECORD_BYTES = 4 * HANDLE_BYTES  # a slot's place, and the handles of its memory and its two events
_PLACE = struct.Struct("<qq16s")  # size, offset in the shared memory, and the token of its process
_SMALLEST = 64 << 10
_BLOCK = 2 << 20  # the unit in which the driver allocates and shares memory
_LAZY_PEER_ACCESS = 1
_RETURN_S = 5.0  # timeout of closing for slots to be returned
_PROCESS = secrets.token_bytes(16)


class Slot(NamedTuple):
    """Device memory, as a flat tensor of bytes, with the events that order its use.

    ``record``: the bytes by which another process opens it.
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
        for n, (channel, receiver, decoder) in enumerate(self._incoming):
            if channel.kind != BY_HOST:
                self._incoming[n] = channel, receiver, _SlotDecoder(decoder, slots, end.device)

    def send(self, key: Key, value: Any) -> None:
        if key.kind == BY_HOST:
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
        if key.kind not in OF_MICRO_BATCHES:
            # Such as an update of the reference, whose memory the lane's next step overwrites.
            current_stream(self._end.device).wait_event(slot.full)
        # The other process waits for the last recording of ``full``: publish only now.
        sender.publish(_RECORD_BYTES + len(text), key.batch, key.micro_batch, number, len(text))

    send_flipped = Link.send_flipped  # the ring has the address of the bytes, not the bytes

    def _slot(self, channel: Channel, address: int, size: int) -> Slot:
        """Return the device slot of the ring's slot at ``address``, which the receiver does not hold."""
        slot = self._outgoing_slots.get((channel, address))
        if slot is None or slot.memory.numel() < size:
            if slot is not None:
                self._slots.give(slot)
            slot = self._outgoing_slots[channel, address] = self._slots.make(size)
        return slot

    def _copy(self, slot: Slot, format: Format, tensors: list[torch.Tensor]) -> None:
        self._copies.wait_stream(current_stream(self._end.device))
        self._copies.wait_event(slot.free)
        with self._copies:
            format.write(tensors, slot.memory)
            slot.full.record(self._copies)
        used_on(self._copies, tensors)  # the lane continues and may free them, or return their slot

    def close(self, patience_s: float) -> None:
        """Leave, and release the slots that both sides have finished with to other links; keep the others."""
        senders = [sender for sender, _ in self._outgoing.values()]
        super().close(patience_s)
        slots = self._outgoing_slots.values()
        # In this order: the receiver records ``free``, and then returns its slot of the ring.
        if self._wait_for(
            lambda: (
                not any(sender.lent() for sender in senders)
                and all(slot.full.query() and slot.free.query() for slot in slots)
            ),
            min(patience_s, _RETURN_S),
        ):
            for slot in slots:
                self._slots.give(slot)
        self._outgoing_slots = {}


class _SlotDecoder(Decoder):
    """Decodes messages that name a slot of device memory."""

    def __init__(self, headers: Decoder, slots: DeviceSlots, device: torch.device) -> None:
        self._headers, self._slots, self._reader = headers, slots, device

    def decode(self, number: int, text_bytes: int, memory: Any, offset: int = 0) -> ReadyOnEvent:
        data = bytes(memoryview(memory)[: _RECORD_BYTES + text_bytes])
        format = self._headers.format(number, data[_RECORD_BYTES:])
        return _InSlot(self._slots, self._slots.open(data[:_RECORD_BYTES]), format, memory, self._reader)


class _InSlot(ReadyOnEvent):
    """A message in a slot; its tensors are made for the stream of the receiver."""

    __slots__ = ("_format", "_slot", "_slots")

    def __init__(self, slots: DeviceSlots, slot: Slot, format: Format, lease: Any, at: torch.device) -> None:
        super().__init__(lease, slot.full, at)
        self._slots, self._slot, self._format = slots, slot, format

    def received(self) -> Any:
        stream = cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        memory = self._slots.lend(self._slot, self.value, stream)
        return self._format.read(memory, 0, memory.device)


# ---- memory ------------------------------------------------------------------------------------------------------


class DeviceSlots:
    """Slots in the memory of a device, for all links of this process.

    Only the whole of an allocation can be shared, so blocks of the driver's own granularity are divided into
    slots. Nothing is freed while the process lives: a receiver may have it open, and then freeing is
    undefined. Slots of closed links, and those too small for larger messages, serve others, and stay open for
    them if opened once.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()  # pipelines may run in different threads
        self._spare: list[Slot] = []
        self._opened: dict[bytes, Slot] = {}  # by record
        self._blocks: dict[bytes, int] = {}  # addresses of opened blocks, by process token and handle
        self._returns = cuda.Stream(driver.device)
        self._offered: Slot | None = None

    def make(self, size: int) -> Slot:
        """Return a slot of at least ``size`` bytes."""
        with self._lock:
            fitting = [slot for slot in self._spare if slot.memory.numel() >= size]
            if not fitting:
                # A power of two, so that growing messages seldom need a new one.
                fitting = self._carve(1 << (max(size, _SMALLEST) - 1).bit_length())
                self._spare += fitting
            found = min(fitting, key=lambda slot: slot.memory.numel())
            self._spare = [slot for slot in self._spare if slot is not found]
            return found

    def _carve(self, size: int) -> list[Slot]:
        whole = max(size, _BLOCK)
        pointer, handle = self._driver.allocate(whole)
        return [self._slot(pointer, handle, offset, size) for offset in range(0, whole, size)]

    def _slot(self, pointer: int, handle: bytes, offset: int, size: int) -> Slot:
        full, free = self._driver.event(), self._driver.event()
        place = _PLACE.pack(size, offset, _PROCESS).ljust(HANDLE_BYTES, b"\0")
        memory = self._driver.tensor(DeviceMemory(pointer + offset, size))
        return Slot(memory, full, free, place + handle + full.ipc_handle() + free.ipc_handle())

    def give(self, slot: Slot) -> None:
        with self._lock:
            self._spare.append(slot)

    def open(self, record: bytes) -> Slot:
        """Return another process's slot."""
        with self._lock:
            if record not in self._opened:
                place, handle, full, free = (
                    record[n : n + HANDLE_BYTES] for n in range(0, _RECORD_BYTES, HANDLE_BYTES)
                )
                size, offset, process = _PLACE.unpack_from(place)
                if process + handle not in self._blocks:
                    self._blocks[process + handle] = self._driver.open(handle)
                memory = DeviceMemory(self._blocks[process + handle] + offset, size)
                events = [self._driver.open_event(event) for event in (full, free)]
                self._opened[record] = Slot(self._driver.tensor(memory), events[0], events[1], record)
            return self._opened[record]

    def lend(self, slot: Slot, lease: Any, reader: Any) -> torch.Tensor:
        """Return a slot's memory for use on a stream. The lease ends with the last tensor in it."""
        tensor: torch.Tensor = self._driver.tensor(_Loan(slot, lease, reader, self._returns))
        return tensor

    def offer(self) -> dict[str, str]:
        """Return what another process needs to check whether it can open this one's slots."""
        if self._offered is None:
            self._offered = self.make(_SMALLEST)
            self._offered.memory[: len(_PROCESS)] = torch.tensor(list(_PROCESS), dtype=torch.uint8)
            self._offered.full.record(cuda.current_stream(self._driver.device))
        return {"slot": self._offered.record.hex(), "device": device_id(self._driver.device)}

    def check(self, offer: dict[str, str]) -> None:
        """Raise ValueError or OSError if the slots of the process behind ``offer`` are out of reach."""
        if offer["device"] != device_id(self._driver.device):
            raise ValueError("it is on another device")
        slot = self.open(bytes.fromhex(offer["slot"]))
        cuda.current_stream(self._driver.device).wait_event(slot.full)
        if bytes(slot.memory[: len(_PROCESS)].tolist()) != _PLACE.unpack_from(slot.record)[2]:
            raise ValueError("its device memory does not hold what it wrote there")


class DeviceMemory:
    """Device memory, described by ``__cuda_array_interface__``."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer, self.size = pointer, size
        described = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}
        self.__cuda_array_interface__ = described


class _Loan(DeviceMemory):
    """A slot's memory as long as a tensor reads it. ``returns``: a stream without other work."""

    def __init__(self, slot: Slot, lease: Any, reader: Any, returns: Any) -> None:
        super().__init__(slot.memory.data_ptr(), slot.memory.numel())
        self._slot, self._lease, self._returns = slot, lease, returns
        self._readers = [reader]
        foreign_memory[self.pointer] = self

    def used_on(self, stream: Any) -> None:
        """Note that another stream reads it too: a stage may pass on what it has received, or send it on."""
        with stream:
            reader = cuda.current_stream(self._slot.memory.device)  # the same one, as CUDA's own class
        if reader not in self._readers:
            self._readers.append(reader)

    def __del__(self) -> None:
        # All reads are issued by now. First the event, then the lease: the sender checks them in this order.
        if not sys.is_finalizing():
            last = self._readers[0]
            if len(self._readers) > 1:  # so that none of them waits for the others
                last = self._returns
                for reader in self._readers:
                    last.wait_stream(reader)
            self._slot.free.record(last)
        self._lease = None


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """The functions of the CUDA driver that are needed, for one device. RuntimeError if one fails."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else cuda.current_device()
        self.device = torch.device("cuda", index)
        cuda.init()
        self._driver = driver()

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Return the address of new memory, and its handle."""
        pointer, handle = ctypes.c_uint64(), _Handle()
        request = "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size)
        try:
            self._call(*request)
        except RuntimeError:
            cuda.empty_cache()  # torch keeps the memory of freed tensors
            self._call(*request)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return pointer.value, bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory."""
        pointer, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), flags)
        return pointer.value

    def event(self) -> Any:
        with cuda.device(self.device):
            return cuda.Event(interprocess=True)

    def open_event(self, handle: bytes) -> Any:
        return cuda.Event.from_ipc_handle(self.device, handle)

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        # The tensor keeps ``memory``, and with it a lease. The allocator does not own this memory, so
        # record_stream has no effect; the event ``free`` replaces it.
        return torch.as_tensor(memory, device=self.device)

    def _call(self, *call: Any) -> None:
        with self._driver.context(self.device.index):
            self._driver.call(*call)


def device_id(device: torch.device) -> str:
    """Return the identity of a CUDA device of this host, the same in all of its processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def slots_of(device: torch.device) -> DeviceSlots:
    """Return this process's slots in the memory of a device."""
    return DeviceSlots(Driver(device))


class IpcTransport(Transport):
    """Slots in the memory of a device that processes of one host share."""

    def offer(self) -> Any:
        self._slots = slots_of(self.device)
        return self._slots.offer()

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        if rank not in self.below["shm"].processes:
            raise ValueError("no shared memory with it")
        self._slots.check(offers[rank])

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> CudaIpcLink:
        shared = self.below["shm"]
        assert isinstance(shared, SharedTransport)
        return CudaIpcLink(*shared.ends(rank), end, self._slots)
