"""Slots of device memory that processes of one host share, with the events that order their use.

Memory and handles are the driver's own: torch's sharing of CUDA tensors counts references in a named file of
shared memory, which would remain after a process is killed; its symmetric memory needs a device for each
process; and only a whole allocation can be shared, of which tensors of its allocator are parts.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from avgpipe.device import foreign_memory

# Events that other processes wait for are CUDA's own, as are the streams that they are recorded on: torch.Event has no
# handles, and a torch.Stream would misread these.
cuda: Any = torch.cuda

HANDLE_BYTES = 64  # of memory and of an event
RECORD_BYTES = 4 * HANDLE_BYTES  # a slot's place, and the handles of its memory and its two events
_PLACE = struct.Struct("<qq16s16s")  # size, offset in the shared memory, tokens of its process and its device
_TOKEN_BYTES = 16
_SMALLEST = 64 << 10
_BLOCK = 2 << 20  # the unit in which the driver allocates and shares memory
_LAZY_PEER_ACCESS = 1


class Slot(NamedTuple):
    """Device memory with the events that order its use.

    ``memory``: as a flat tensor of bytes; None on another device. ``record``: the bytes by which another
    process opens it.
    """

    address: int
    size: int
    memory: torch.Tensor | None
    full: Any  # recorded by the sender
    free: Any  # recorded by the receiver
    record: bytes


def place_of(record: bytes) -> bytes:
    """Return the part of a slot's record that names its memory, whichever its events."""
    return record[: 2 * HANDLE_BYTES]


class DeviceSlots:
    """Slots in the memory of a device, for all links of this process.

    Only the whole of an allocation can be shared, so blocks of the driver's own granularity are divided into
    slots. Nothing is freed while the process lives: another process may have it open, and then freeing is
    undefined. Slots of closed links, and those too small for larger messages, serve others, and stay open for
    them if opened once.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._device_token = hashlib.blake2b(driver.identity.encode(), digest_size=_TOKEN_BYTES).digest()
        self._lock = threading.Lock()  # pipelines may run in different threads
        self._spare: list[Slot] = []
        self._own: dict[bytes, Slot] = {}  # by place
        self._opened: dict[bytes, Slot] = {}  # by record
        self._granted: dict[bytes, Slot] = {}  # likewise
        self._blocks: dict[bytes, int] = {}  # addresses of opened blocks, by process token and handle
        self._offered: Slot | None = None

    def current_stream(self) -> Any:
        """Return the calling thread's current stream of the device, as CUDA's own class."""
        return cuda.current_stream(self._driver.device)

    def make(self, size: int) -> Slot:
        """Return a slot of at least ``size`` bytes."""
        with self._lock:
            fitting = [slot for slot in self._spare if slot.size >= size]
            if not fitting:
                # A power of two, so that growing messages seldom need a new one.
                fitting = self._carve(1 << (max(size, _SMALLEST) - 1).bit_length())
                self._spare += fitting
            found = min(fitting, key=lambda slot: slot.size)
            self._spare = [slot for slot in self._spare if slot is not found]
            return found

    def _carve(self, size: int) -> list[Slot]:
        whole = max(size, _BLOCK)
        pointer, handle = self._driver.allocate(whole)
        return [self._slot(pointer, handle, offset, size) for offset in range(0, whole, size)]

    def _slot(self, pointer: int, handle: bytes, offset: int, size: int) -> Slot:
        full, free = self._driver.event(), self._driver.event()
        place = _PLACE.pack(size, offset, self._token, self._device_token).ljust(HANDLE_BYTES, b"\0") + handle
        memory = self._driver.tensor(DeviceMemory(pointer + offset, size))
        record = place + full.ipc_handle() + free.ipc_handle()
        slot = self._own[place] = Slot(pointer + offset, size, memory, full, free, record)
        return slot

    def give(self, slot: Slot) -> None:
        with self._lock:
            self._spare.append(slot)

    def own(self, place: bytes) -> Slot:
        """Return this process's slot, as it was made."""
        return self._own[place]

    def open(self, record: bytes) -> Slot:
        """Return another process's slot, or one of this process with the other one's event ``full``."""
        with self._lock:
            if record not in self._opened:
                _, _, full, free = _handles(record)
                own = self._own.get(place_of(record))
                if own is not None:
                    slot = own._replace(full=self._driver.open_event(full), record=record)
                else:
                    full, free = self._driver.open_event(full), self._driver.open_event(free)
                    slot = self._mapped(record, full, free)
                self._opened[record] = slot
            return self._opened[record]

    def open_granted(self, record: bytes) -> Slot:
        """Return another process's slot for writing, with an event ``full`` of this process."""
        with self._lock:
            if record not in self._granted:
                _, _, _, free = _handles(record)
                full = self._driver.event()
                written = place_of(record) + full.ipc_handle() + free
                self._granted[record] = self._mapped(written, full, self._driver.open_event(free))
            return self._granted[record]

    def _mapped(self, record: bytes, full: Any, free: Any) -> Slot:
        place, handle, _, _ = _handles(record)
        size, offset, process, device = _PLACE.unpack_from(place)
        if process + handle not in self._blocks:
            self._blocks[process + handle] = self._driver.open(handle)
        address = self._blocks[process + handle] + offset
        is_here = device == self._device_token
        memory = self._driver.tensor(DeviceMemory(address, size)) if is_here else None
        return Slot(address, size, memory, full, free, record)

    def lend(self, slot: Slot, lease: Any, reader: Any, returns: Any) -> torch.Tensor:
        """Return a slot's memory for use on a stream, ``reader``. The lease ends with the last tensor in it."""
        tensor: torch.Tensor = self._driver.tensor(_Loan(slot, lease, reader, returns))
        return tensor

    def push(self, source: torch.Tensor, slot: Slot) -> None:
        """Copy this device's bytes into another one's slot, on the current stream."""
        self._driver.copy(slot.address, source.data_ptr(), source.numel(), self.current_stream())

    def fetch(self, theirs: Slot, ours: Slot, size: int, stream: Any) -> None:
        """Copy ``size`` bytes of another device's slot into one of this device."""
        if size:
            self._driver.copy(ours.address, theirs.address, size, stream)

    def offer(self) -> dict[str, str]:
        """Return what another process needs to check whether it can open this one's slots."""
        if self._offered is None:
            self._offered = self.make(_SMALLEST)
            assert self._offered.memory is not None
            self._offered.memory[:_TOKEN_BYTES] = torch.tensor(list(self._token), dtype=torch.uint8)
            self._offered.full.record(self.current_stream())
        return {"slot": self._offered.record.hex(), "device": self._driver.identity}

    def check(self, offer: dict[str, str]) -> bool:
        """Return whether the process behind ``offer`` is on another device.

        ValueError or RuntimeError if its slots are out of reach.
        """
        crosses = offer["device"] != self._driver.identity
        if crosses:
            self._driver.check_access(offer["device"])
        slot = self.open(bytes.fromhex(offer["slot"]))
        stream = self.current_stream()
        seen = torch.empty(_TOKEN_BYTES, dtype=torch.uint8, device=self._driver.device)
        stream.wait_event(slot.full)
        self._driver.copy(seen.data_ptr(), slot.address, _TOKEN_BYTES, stream)
        if bytes(seen.tolist()) != _PLACE.unpack_from(slot.record)[2]:
            raise ValueError("its device memory does not hold what it wrote there")
        return crosses


def _handles(record: bytes) -> list[bytes]:
    """Return the parts of a slot's record: its place, and the handles of its memory, ``full`` and ``free``."""
    return [record[n : n + HANDLE_BYTES] for n in range(0, RECORD_BYTES, HANDLE_BYTES)]


class DeviceMemory:
    """Device memory, described by ``__cuda_array_interface__``."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer, self.size = pointer, size
        described = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}
        self.__cuda_array_interface__ = described


class _Loan(DeviceMemory):
    """A slot's memory as long as a tensor reads it. ``returns``: a stream for returns of its channel alone."""

    def __init__(self, slot: Slot, lease: Any, reader: Any, returns: Any) -> None:
        super().__init__(slot.address, slot.size)
        self._free, self._lease, self._returns = slot.free, lease, returns
        assert slot.memory is not None
        self._device = slot.memory.device
        self._readers = [reader]
        foreign_memory[self.pointer] = self

    def used_on(self, stream: Any) -> None:
        """Note that another stream reads it too: a stage may pass on what it has received, or send it on."""
        with stream:
            reader = cuda.current_stream(self._device)  # the same one, as CUDA's own class
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
            self._free.record(last)
        self._lease = None


class Driver:
    """The functions of the CUDA driver that are needed, for one device. RuntimeError if one fails.

    By NVIDIA's own binding, which torch's builds for CUDA require: torch has no function for any of them.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else cuda.current_device()
        self.device = torch.device("cuda", index)
        self.identity = device_id(self.device)
        cuda.init()
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise RuntimeError(f"{error}: pip install cuda-bindings, of torch's CUDA version") from None
        self._call("cuInit", 0)
        (number,) = self._call("cuDeviceGet", index)
        (self._context,) = self._call("cuDevicePrimaryCtxRetain", number)  # torch's, until the process ends

    def allocate(self, size: int) -> tuple[int, bytes]:
        """Return the address of new memory, and its handle."""
        with self._current():
            try:
                (pointer,) = self._call("cuMemAlloc", size)
            except RuntimeError:
                cuda.empty_cache()  # torch keeps the memory of freed tensors
                (pointer,) = self._call("cuMemAlloc", size)
            (handle,) = self._call("cuIpcGetMemHandle", pointer)
            return int(pointer), ctypes.string_at(handle.getPtr(), HANDLE_BYTES)  # 13.5 has no ``reserved``

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory."""
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        with self._current():
            (pointer,) = self._call("cuIpcOpenMemHandle", opened, _LAZY_PEER_ACCESS)
            return int(pointer)

    def check_access(self, identity: str) -> None:
        """Raise ValueError if this device cannot reach the memory of another one.

        Whether one that this process does not see (CUDA_VISIBLE_DEVICES) is within reach is found by opening it.
        """
        for n in range(cuda.device_count()):
            there = torch.device("cuda", n)
            if device_id(there) == identity and not cuda.can_device_access_peer(self.device, there):
                raise ValueError(
                    f"no peer access from {self.device} to {there}; nvidia-smi topo -p2p r shows what has it"
                )

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Copy between addresses that this device reaches, by a copy engine if they are on two devices."""
        with self._current():
            self._call("cuMemcpyAsync", target, source, size, stream.cuda_stream)

    def event(self) -> Any:
        with cuda.device(self.device):
            return cuda.Event(interprocess=True)

    def open_event(self, handle: bytes) -> Any:
        return cuda.Event.from_ipc_handle(self.device, handle)

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        # The tensor keeps ``memory``, and with it a lease. The allocator does not own this memory, so
        # record_stream has no effect; the event ``free`` replaces it.
        return torch.as_tensor(memory, device=self.device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make torch's context the thread's inside: a thread may have none yet."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: {status}")
        found: list[Any] = results
        return found


def copy_stream(device: torch.device) -> Any:
    """Return a stream for a channel's copies, like `avgpipe.device.copy_stream`, but of CUDA's own class."""
    return cuda.Stream(device, priority=-1)


def device_id(device: torch.device) -> str:
    """Return the identity of a CUDA device of this host, the same in all of its processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def slots_of(device: torch.device) -> DeviceSlots:
    """Return this process's slots in the memory of a device."""
    return DeviceSlots(Driver(device))
