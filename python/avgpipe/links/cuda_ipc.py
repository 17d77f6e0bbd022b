"""CUDA between processes of one host that share a device: tensors stay in its memory, control goes through the ring.

The sender copies into a slot of device memory, which the receiver opens once and reads in place:

    sender's lane     F3 ── record ── F4 ...
    its copy stream         └ wait ─ wait(free) ── copy into the slot ── record(full)      then: publish
    receiver's lane                                                       └ wait(full) ── reads the slot ── record(free)

A slot belongs to a slot of the ring, so it is lent and given back with that one's lease: when the last tensor that
reads it is gone. The host waits for nothing. Memory and handles are the driver's own: torch's sharing of CUDA tensors
counts references in a named file of shared memory, which would stay behind a process that is killed.
"""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from avgpipe import device as streams
from avgpipe.device import Handed
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Channel, Key
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.links.wire import Decoder, Format, padded
from avgpipe_ext import pack, unpack_

HANDLE_BYTES = 64  # of memory and of an event
_RECORD_BYTES = 4 * HANDLE_BYTES  # a slot's capacity, and the handles of its memory and its two events
_SMALLEST = 64 << 10
_LAZY_PEER_ACCESS = 1
_BY_HOST = "R"  # results of evaluations are small, mostly on the CPU, and stay with the caller


class Slot(NamedTuple):
    """Device memory, as a flat tensor of bytes, with the events that order its use.

    ``record``: what another process needs to open it.
    """

    memory: torch.Tensor
    full: Any  # recorded by the sender
    free: Any  # recorded by the receiver
    record: bytes


class Slots(Protocol):
    """Where slots come from."""

    def make(self, size: int) -> Slot: ...

    def give(self, slot: Slot) -> None:
        """Of no use to its sender any more."""

    def open(self, record: bytes) -> Slot:
        """Another process's."""

    def lend(self, slot: Slot, lease: Any, reader: Any) -> torch.Tensor:
        """Its memory for readers on the stream ``reader``. When they are gone, ``free`` is recorded there, and
        ``lease`` dies.
        """


class CudaIpcLink(SharedLink):
    """To and from a worker on the same device. ``slots``: the device's, or a stand-in."""

    name = "cuda-ipc"

    def __init__(
        self,
        inbox: Inbox,
        incoming: Sequence[Channel],
        peer: int,
        outbox: Inbox,
        device: torch.device,
        mailbox: Mailbox,
        wire_dtype: torch.dtype | None,
        slots: Slots,
    ) -> None:
        super().__init__(inbox, incoming, peer, outbox, device, mailbox, wire_dtype)
        self._device, self._slots = device, slots
        self._copies = streams.cuda.Stream(device)
        self._outgoing_slots: dict[tuple[Channel, int], Slot] = {}  # by the address of the ring's slot
        self._copying: deque[tuple[Any, list[torch.Tensor]]] = deque()
        for n, (channel, receiver, decoder) in enumerate(self._incoming):
            if channel.kind != _BY_HOST:
                self._incoming[n] = channel, receiver, _SlotDecoder(decoder, slots, device)

    def send(self, key: Key, value: Any) -> None:
        if key.kind == _BY_HOST:
            super().send(key, value)
            return
        channel = Channel.of(key)
        sender, encoder = self._outgoing.get(channel) or self._open(channel)
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
        cuda = streams.cuda
        self._copies.wait_stream(cuda.current_stream(self._device))
        self._copies.wait_event(slot.free)
        with cuda.stream(self._copies):
            write(format, tensors, slot.memory)
            slot.full.record(self._copies)
        # The lane goes on and may drop them, or give their slot back: kept until the copy has read them.
        self._copying.append((slot.full, tensors))
        self._forget_copied()

    def _forget_copied(self) -> None:
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()


class _SlotDecoder(Decoder):
    """Of messages that name a slot of device memory."""

    def __init__(self, headers: Decoder, slots: Slots, device: torch.device) -> None:
        self._headers, self._slots, self._reader = headers, slots, device
        self._opened: dict[bytes, Slot] = {}

    def decode(self, number: int, text_bytes: int, buffer: Any, offset: int = 0) -> Handed:
        data = ctypes.string_at(ctypes.addressof(buffer), _RECORD_BYTES + text_bytes)
        record = data[:_RECORD_BYTES]
        slot = self._opened.get(record)
        if slot is None:
            slot = self._opened[record] = self._slots.open(record)
        return _Arrived(
            self._slots, slot, self._headers.format(number, data[_RECORD_BYTES:]), buffer, self._reader
        )


class _Arrived(Handed):
    """A message in a slot; its tensors are made for the stream that receives it."""

    __slots__ = ("_format", "_slot", "_slots")

    def __init__(self, slots: Slots, slot: Slot, format: Format, lease: Any, device: torch.device) -> None:
        super().__init__(lease, slot.full, device)
        self._slots, self._slot, self._format = slots, slot, format

    def received(self) -> Any:
        stream = streams.cuda.current_stream(self._device)
        stream.wait_event(self._ready)
        return read(self._format, self._slots.lend(self._slot, self.value, stream))


def write(format: Format, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy a message's tensors to their places in flat memory."""
    for tensor, place in zip(tensors, format.places):
        if place.cast is not None and place.bytes:
            pack([tensor.resolve_neg()], out=place.on(memory))
        elif place.bytes:
            place.on(memory).view(place.shape).copy_(tensor, non_blocking=True)


def read(format: Format, memory: torch.Tensor) -> Any:
    """The message in flat memory; tensors that travelled as they are are views of it."""
    tensors = []
    for place in format.places:
        if place.count == 0 or place.cast is not None:
            value = torch.empty(place.shape, dtype=place.dtype, device=memory.device)
            if place.count:
                unpack_(place.on(memory), [value])
        else:
            value = place.on(memory).view(place.shape)
        tensors.append(value.requires_grad_() if place.requires_grad else value)
    return format.build(tensors)


class DeviceSlots:
    """Slots in the memory of ``device``. The driver's memory, for only the beginning of an allocation can be shared.

    It is not given back while the process lives: a receiver may have it open, and to free it then is undefined.
    Slots that messages have outgrown serve smaller ones.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._driver = _Driver()
        self._spare: list[Slot] = []
        with torch.cuda.device(self._device):
            torch.empty(1, device=self._device)  # makes the device's context this thread's

    def make(self, size: int) -> Slot:
        fitting = [n for n, slot in enumerate(self._spare) if slot.memory.numel() >= size]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda n: self._spare[n].memory.numel()))
        size = 1 << (size - 1).bit_length()  # messages that grow outgrow few slots
        with torch.cuda.device(self._device):
            pointer = self._driver.allocate(size)
            full, free = (streams.cuda.Event(interprocess=True) for _ in range(2))
            handles = self._driver.handle(pointer) + full.ipc_handle() + free.ipc_handle()
        memory = self._tensor(_Memory(pointer, size))
        return Slot(memory, full, free, size.to_bytes(HANDLE_BYTES, "little") + handles)

    def give(self, slot: Slot) -> None:
        self._spare.append(slot)

    def open(self, record: bytes) -> Slot:
        size, memory, full, free = (
            record[n : n + HANDLE_BYTES] for n in range(0, _RECORD_BYTES, HANDLE_BYTES)
        )
        with torch.cuda.device(self._device):
            pointer = self._driver.open(memory)
            opened = [streams.cuda.Event.from_ipc_handle(self._device, handle) for handle in (full, free)]
        tensor = self._tensor(_Memory(pointer, int.from_bytes(size, "little")))
        return Slot(tensor, opened[0], opened[1], record)

    def lend(self, slot: Slot, lease: Any, reader: Any) -> torch.Tensor:
        return self._tensor(_Loan(slot, lease, reader))

    def _tensor(self, memory: _Memory) -> torch.Tensor:
        # The tensor keeps ``memory``, and with it the lease. The allocator knows nothing of it, so that
        # record_stream has no effect; the event ``free`` does its work.
        return torch.as_tensor(memory, device=self._device)

    def offer(self) -> dict[str, str]:
        """What lets another process find out whether it can open this one's slots."""
        token = secrets.token_bytes(HANDLE_BYTES)
        self._offered = self.make(_SMALLEST)
        self._offered.memory[:HANDLE_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8).to(
            self._device
        )
        self._offered.full.record(torch.cuda.current_stream(self._device))
        return {"token": token.hex(), "slot": self._offered.record.hex(), "device": device_id(self._device)}

    def check(self, offer: dict[str, str]) -> None:
        """Raise ValueError or OSError if the slots of who made ``offer`` are out of reach."""
        if offer["device"] != device_id(self._device):
            raise ValueError("its device is another one")
        slot = self.open(bytes.fromhex(offer["slot"]))
        torch.cuda.current_stream(self._device).wait_event(slot.full)
        if bytes(slot.memory[:HANDLE_BYTES].tolist()).hex() != offer["token"]:
            raise ValueError("what its device memory holds is not what it wrote there")


def device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class _Memory:
    """Device memory, in the way in which libraries describe it to each other."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


class _Loan(_Memory):
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


class _Driver:
    """What is needed of the CUDA driver's interface."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._allocate, self._get = library.cuMemAlloc_v2, library.cuIpcGetMemHandle
        self._open, self._error = library.cuIpcOpenMemHandle_v2, library.cuGetErrorString
        self._allocate.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        self._get.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self._open.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        self._error.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self._check(self._allocate(ctypes.byref(pointer), size), f"{size} bytes of device memory")
        return pointer.value

    def handle(self, pointer: int) -> bytes:
        handle = _Handle()
        self._check(self._get(ctypes.byref(handle), pointer), "sharing device memory")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_uint64()
        status = self._open(ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        self._check(status, "opening another process's device memory")
        return pointer.value

    def _check(self, status: int, doing: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._error(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise OSError(f"{doing}: {reason} (CUDA error {status})")
