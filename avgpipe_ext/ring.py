"""Messages between processes of one host through shared memory, read where they were written.

The receiving process makes a `Memory` that holds a `Bell` and, for each sender, a ring's control block
(`Sender.RING_BYTES`), and tells the others `path`, `bytes` and the offsets. A sender opens it, writes each message
into a slot that `Sender.reserve` gives, and announces it with `Sender.publish`; the receiver sleeps on the bell and
calls `Receiver.take`. The slot stays with the receiver until its `Lease` dies.

Nothing is named in a file system, so nothing is left behind by a process that is killed. Addresses are those of this
process. Both processes must see each other in /proc and belong to one user.

Not promised: that a sender survives a memory limit of its control group, which the kernel enforces by killing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Callable
from typing import Any, ClassVar

from avgpipe_ext import _library

__all__ = ["Bell", "Lease", "Memory", "Receiver", "Sender", "copy", "echo", "supported"]

LINE_BYTES = 64
"""Alignment of bells, control blocks and slots."""

_MESSAGE = struct.Struct("=8q")
_SMALL_BYTES = 64 << 10
_NOTHING, _TAKEN, _UNMAPPED, _FAILED, _BROKEN = range(5)  # `Taken` in csrc/transfer/ring.h

_short = ctypes.PyDLL(str(_library.PATH))  # keeps the GIL: for calls that take less than giving it up
_long = ctypes.CDLL(str(_library.PATH))


def supported() -> bool:
    """Whether this system has what is needed: Linux, with /proc."""
    return _is_built and os.path.isdir("/proc/self/fd")


def _entry(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of the library; where the system lacks it, one that says so."""

    def missing(*_: object) -> Any:
        raise OSError(errno.ENOSYS, "shared-memory rings need Linux: use another link")

    if not _is_built:
        return missing
    function = getattr(library, f"avgpipe_{name}")
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]  # ctypes leaves it untyped


_is_built = bool(_short.avgpipe_ring_is_supported())
_ptr, _int, _i64, _f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_u32 = ctypes.c_uint32

_ring_bytes = _entry(_short, "ring_bytes", _i64)
_ring_slots = _entry(_short, "ring_slots", _i64)
_copy_small = _entry(_short, "copy", None, _ptr, _ptr, _i64)
_copy_large = _entry(_long, "copy", None, _ptr, _ptr, _i64)
_memory_create = _entry(_long, "memory_create", _ptr, _i64, _ptr)
_memory_open = _entry(_long, "memory_open", _ptr, ctypes.c_char_p, _i64, _ptr)
_memory_close_file = _entry(_short, "memory_close_file", None, _ptr)
_memory_delete = _entry(_long, "memory_delete", None, _ptr)
_bell_bytes = _entry(_short, "bell_bytes", _i64)
_bell_count = _entry(_short, "bell_count", _u32, _ptr)
_bell_ring = _entry(_short, "bell_ring", None, _ptr)
_bell_wait = _entry(_long, "bell_wait", _u32, _ptr, _u32, _f64, _f64)
_sender_create = _entry(_short, "sender_create", _ptr, _ptr, _ptr)
_sender_delete = _entry(_long, "sender_delete", None, _ptr)
_sender_reserve = _entry(_short, "sender_reserve", _i64, _ptr, _i64, _int)
_sender_make = _entry(_long, "sender_reserve", _i64, _ptr, _i64, _int)
_sender_publish = _entry(_short, "sender_publish", _int, _ptr, *[_i64] * 5)
_sender_slots = _entry(_short, "sender_slots", _i64, _ptr)
_sender_slot_bytes = _entry(_short, "sender_slot_bytes", _i64, _ptr)
_receiver_create = _entry(_short, "receiver_create", _ptr, _ptr, _i64)
_receiver_delete = _entry(_long, "receiver_delete", None, _ptr)
_receiver_take = _entry(_short, "receiver_take", _int, _ptr, _int, _ptr)
_receiver_map = _entry(_long, "receiver_take", _int, _ptr, _int, _ptr)
_lease_delete = _entry(_short, "lease_delete", None, _ptr)
_echo = _entry(_long, "echo", _f64, *[_ptr] * 3, *[_i64] * 2, *[_f64] * 2, _int)


def _aligned(address: int, what: str) -> int:
    if address <= 0 or address % LINE_BYTES:
        raise ValueError(f"{what} at address {address:#x}: use a multiple of {LINE_BYTES}")
    return address


def _no_memory(bytes: int, error: int) -> OSError | MemoryError:
    """Why `bytes` of shared memory could not be had."""
    reason = os.strerror(error)
    if error in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        return MemoryError(
            f"no {bytes} bytes of shared memory ({reason}): use smaller or fewer micro-batches, or raise the memory "
            "or file size limit (ulimit -f)"
        )
    way_out = "; raise the limit of open files (ulimit -n)" if error == errno.EMFILE else ""
    return OSError(error, f"no {bytes} bytes of shared memory: {reason}{way_out}")


class _Owner:
    """Owns an object of the library. Objects of a cycle may end in any order."""

    _handle: int | None = None
    _delete: ClassVar[Callable[..., Any]]

    def __del__(self) -> None:
        if self._handle is not None:
            type(self)._delete(self._handle)


class Memory(_Owner):
    """Anonymous shared memory: `bytes` at `address` of this process, until the object dies. Its size is final.

    `path` is where others open it, as long as the file is open here.
    """

    _delete = _memory_delete
    address: int
    bytes: int
    path: str

    def __init__(self, handle: int, address: int, bytes: int, path: str) -> None:
        self._handle = handle
        self.address, self.bytes, self.path = address, bytes, path

    @classmethod
    def create(cls, bytes: int) -> Memory:
        """New memory, zero, all of it there already: MemoryError if there is not as much."""
        if bytes <= 0:
            raise ValueError(f"a memory of {bytes} bytes: use at least 1")
        out = (_i64 * 2)()
        handle = _memory_create(bytes, out)
        if handle is None:
            raise _no_memory(bytes, -out[0])
        return cls(handle, out[0], bytes, f"/proc/{os.getpid()}/fd/{out[1]}")

    @classmethod
    def open(cls, path: str, bytes: int) -> Memory:
        """A peer's memory. OSError as it comes; with EINVAL if the file has fewer than `bytes` bytes, or may shrink."""
        out = (_i64 * 2)()
        handle = _memory_open(os.fsencode(path), bytes, out)
        if handle is None:
            raise OSError(-out[0], os.strerror(-out[0]), path)
        return cls(handle, out[0], bytes, path)

    def close_file(self) -> None:
        """Closes the file and keeps the mapping: nobody else can open it from now on."""
        _memory_close_file(self._handle)


class Bell:
    """A counter that any process rings and one sleeps on.

    It occupies `BYTES` at an address that is a multiple of 64, in memory that is zero to begin with.
    """

    BYTES: ClassVar[int] = _bell_bytes() if _is_built else 0

    def __init__(self, address: int, keep: object) -> None:
        """`keep`: whatever must live as long as this object, say the Memory."""
        self._address, self._keep = _aligned(address, "a bell"), keep

    @classmethod
    def local(cls) -> Bell:
        """A bell for the threads of this process."""
        memory = ctypes.create_string_buffer(cls.BYTES + LINE_BYTES)
        address = ctypes.addressof(memory)
        return cls(address + -address % LINE_BYTES, memory)

    def count(self) -> int:
        """How often it was rung, modulo 2^32. What was written before a ring is seen after its count."""
        count: int = _bell_count(self._address)
        return count

    def ring(self) -> None:
        """Adds one, and wakes whoever sleeps; no system call if nobody does."""
        _bell_ring(self._address)

    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> int:
        """Waits until count() != seen, for at most `timeout_s` seconds, and returns count().

        Spins for `spin_s` seconds first (a busy core, the shortest latency), then sleeps. Returns early on a signal,
        so that Python's handlers run. Other threads run meanwhile.
        """
        count: int = _bell_wait(self._address, seen, timeout_s, spin_s)
        return count


class Sender(_Owner):
    """The writing end of a ring; used by one thread at a time.

    Its control block occupies `RING_BYTES` at a multiple of 64 in the receiver's memory, zero to begin with.
    """

    _delete = _sender_delete
    RING_BYTES: ClassVar[int] = _ring_bytes() if _is_built else 0

    def __init__(self, ring_address: int, bell: Bell, keep: object) -> None:
        """`bell` is the receiver's; `keep`: whatever must live as long as this object."""
        self._bell, self._keep = bell, keep
        self._handle = _sender_create(_aligned(ring_address, "a ring"), bell._address)
        self._sent = ctypes.c_uint64.from_address(ring_address)
        self._taken = ctypes.c_uint64.from_address(ring_address + LINE_BYTES)

    def reserve(self, bytes: int) -> int:
        """The address of a slot of at least `bytes`, a multiple of 64; what was reserved before is given up.

        Takes the first free slot that is large enough; else gives the first free one larger memory; else makes one.
        BufferError if all slots are lent, MemoryError if there is no memory.
        """
        if bytes <= 0:
            raise ValueError(f"a slot of {bytes} bytes: use at least 1, or publish 0 bytes without a slot")
        address: int = _sender_reserve(self._handle, bytes, 0)
        if address == -errno.EAGAIN:
            address = _sender_make(self._handle, bytes, 1)
        if address > 0:
            return address
        if address == -errno.ENOBUFS:
            raise BufferError(
                f"all {_ring_slots()} slots are lent: the receiver keeps tensors of that many messages, or takes none; "
                "copy what is to be kept"
            )
        raise _no_memory(bytes, -address)

    def publish(self, bytes: int, a: int, b: int, c: int, d: int) -> None:
        """Announces `bytes` bytes of the reserved slot with four words (int64), and rings the receiver's bell.

        With 0 bytes the words go alone. BufferError if the receiver has a full queue of messages to take: then the
        slot stays reserved.
        """
        status = _sender_publish(self._handle, bytes, a, b, c, d)
        if status == -errno.EAGAIN:
            raise BufferError("the queue is full: the receiver takes no messages; try again later")
        if status:
            raise ValueError(f"{bytes} bytes to publish: reserve a slot of that many first")

    def waiting(self) -> int:
        """How many messages the receiver has not taken. It cannot take them any more once this process has ended."""
        return int(self._sent.value - self._taken.value)

    def slots(self) -> tuple[int, int]:
        """How many slots exist, and their bytes in all."""
        return _sender_slots(self._handle), _sender_slot_bytes(self._handle)


class Lease(ctypes.Array):  # type: ignore[type-arg]  # not subscriptable at run time before Python 3.9's typing
    """A slot's memory as a writable buffer of the slot's capacity, for `torch.frombuffer(lease, dtype=...)`.

    When the last reference is gone, in whatever thread, the slot is the sender's again.
    """

    _type_ = ctypes.c_ubyte
    _length_ = 0
    _handle: int | None = None
    _keep: object = None
    _delete = staticmethod(_lease_delete)

    def __del__(self) -> None:
        if self._handle is not None:
            self._delete(self._handle)


@functools.lru_cache(maxsize=256)
def _lease_type(capacity: int) -> type[Lease]:
    return type("Lease", (Lease,), {"_length_": capacity})


class Receiver(_Owner):
    """The reading end of a ring; used by one thread at a time."""

    _delete = _receiver_delete

    def __init__(self, ring_address: int, sender_pid: int, keep: object) -> None:
        """`ring_address` as for `Sender`, in this process; `keep`: whatever must live as long as this object."""
        self._keep = keep
        self._out = (_i64 * 8)()
        self._out_address = ctypes.addressof(self._out)
        self._handle = _receiver_create(_aligned(ring_address, "a ring"), sender_pid)
        # How many were sent and taken lies first: to look there is faster than to call.
        self._sent = ctypes.c_uint64.from_address(ring_address)
        self._taken = ctypes.c_uint64.from_address(ring_address + LINE_BYTES)

    def take(self) -> tuple[int, int, int, int, int, Lease | None] | None:
        """The oldest message: its bytes, its four words, and the lease of its slot; None if there is none.

        The lease is None for 0 bytes. OSError if the slot cannot be mapped (the sender is gone, say), RuntimeError if
        the record has impossible numbers; the message stays then.
        """
        if self._sent.value == self._taken.value:
            return None
        status = _receiver_take(self._handle, 0, self._out_address)
        if status == _UNMAPPED:
            status = _receiver_map(self._handle, 1, self._out_address)
        if status != _TAKEN:
            raise self._why(status)
        bytes, a, b, c, d, address, capacity, handle = _MESSAGE.unpack_from(self._out)
        if not handle:
            return bytes, a, b, c, d, None
        lease = _lease_type(capacity).from_address(address)
        lease._handle, lease._keep = handle, self._keep
        return bytes, a, b, c, d, lease

    def _why(self, status: int) -> Exception:
        bytes, slot, capacity, error = self._out[:4]
        if status == _FAILED:
            return OSError(error, f"slot {slot} of {capacity} bytes cannot be mapped: {os.strerror(error)}")
        return RuntimeError(
            f"a broken ring: its next message has {bytes} bytes in slot {slot} of {capacity} bytes; do both processes "
            "run the same version of avgpipe?"
        )


def copy(destination: int, source: int, bytes: int) -> None:
    """Copies between addresses of this process; other threads run while it copies much."""
    (_copy_small if bytes <= _SMALL_BYTES else _copy_large)(destination, source, bytes)


def echo(
    sender: Sender,
    receiver: Receiver,
    bell: Bell,
    *,
    rounds: int,
    bytes: int,
    spin_s: float = 0.0,
    timeout_s: float = 60.0,
    is_first: bool = False,
) -> float:
    """Sends messages of `bytes` to and fro, free of Python; returns the seconds that one takes in one direction.

    Both processes call it with the same `rounds` and `bytes`, one of them with `is_first`. Each message is copied
    into a slot of the way back. `bell` is this process's own, `spin_s` as for `Bell.wait`. TimeoutError if nothing
    comes for `timeout_s`.
    """
    if rounds < 1 or bytes < 1:
        raise ValueError(f"{rounds} rounds of {bytes} bytes: use at least 1 of both")
    handles = sender._handle, receiver._handle, bell._address
    seconds: float = _echo(*handles, rounds, bytes, spin_s, timeout_s, int(is_first))
    if seconds < 0:
        error = int(-seconds)
        raise OSError(error, f"echo of {rounds} rounds of {bytes} bytes: {os.strerror(error)}")
    return seconds / (2 * rounds)
