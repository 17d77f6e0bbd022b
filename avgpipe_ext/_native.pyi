"""Compiled code that is no tensor operator (csrc/bindings.cpp); it needs no torch."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Integers = NDArray[np.int64]

def simulate(
    *, events: bool, **fields: Any
) -> tuple[int, _Integers, _Integers, _Integers, NDArray[np.float64], int, NDArray[Any] | None]:
    """Run a schedule on paper. The fields are those of Question in csrc/simulate/question.h.

    Returns the makespan, busy ticks per worker, ticks at the end of each batch, micro-batches in flight at most per
    stage and bytes held at most per worker, how many actions ran, and with ``events`` their records.

    Raises:
        ValueError: the schedule gets stuck, or an array has another size than it should.
        OverflowError: the times are too long to count.
        MemoryError: it does not fit into memory.
        TypeError: a field is missing, unknown, or an array of another dtype.
    """

class Memory(Buffer):
    """Anonymous shared memory, a writable buffer until the object and all that lies in it are gone.

    Its size is final.
    """

    @staticmethod
    def create(bytes: int) -> Memory:
        """New memory, zero, all of it there already: MemoryError if there is not as much."""
    @staticmethod
    def open(path: str, bytes: int) -> Memory:
        """A peer's memory. OSError as it comes; with EINVAL if the file has fewer than `bytes` bytes, or may shrink."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def path(self) -> str:
        """Where others open it, as long as the file is open here."""
    def close_file(self) -> None:
        """Close the file and keep the mapping: nobody else can open it from now on."""

class Bell:
    """A counter that any process rings and one sleeps on. It occupies `BYTES`, which are zero to begin with."""

    BYTES: ClassVar[int]

    def __init__(self, memory: Memory, offset: int) -> None: ...
    @staticmethod
    def local() -> Bell:
        """A bell for the threads of this process."""
    def count(self) -> int:
        """How often it was rung, modulo 2^32. What was written before a ring is seen after its count."""
    def ring(self) -> None:
        """Add one, and wake whoever sleeps; no system call if nobody does."""
    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> int:
        """Wait until count() != seen, for at most `timeout_s` seconds, and return count().

        Spins for `spin_s` seconds first (a busy core, the shortest latency), then sleeps. Returns early on a signal,
        so that Python's handlers run. Other threads run meanwhile.
        """

class Sender:
    """The writing end of a ring; used by one thread at a time.

    Its control block occupies `RING_BYTES` of the receiver's memory, which are zero to begin with.
    """

    RING_BYTES: ClassVar[int]

    def __init__(self, memory: Memory, offset: int, bell: Bell) -> None:
        """`bell` is the receiver's."""
    def reserve(self, bytes: int) -> int:
        """The address of a slot of at least `bytes`, a multiple of 64; what was reserved before is given up.

        Takes the first free slot that is large enough; else gives the first free one larger memory; else makes one.
        BufferError if all slots are lent, MemoryError if there is no memory.
        """
    def publish(self, bytes: int, a: int, b: int, c: int, d: int) -> None:
        """Announce `bytes` bytes of the reserved slot with four words (int64), and ring the receiver's bell.

        With 0 bytes the words go alone. BufferError if the receiver has a full queue of messages to take: then the
        slot stays reserved.
        """
    def waiting(self) -> int:
        """How many messages the receiver has not taken. It cannot take them any more once this process has ended."""
    def lent(self) -> int:
        """How many slots the receiver has not given back, be their messages taken or not."""
    def slots(self) -> tuple[int, int]:
        """How many slots exist, and their bytes in all."""

class Lease(Buffer):
    """A slot's memory as a writable buffer of the slot's size, for `torch.frombuffer(lease, dtype=...)`.

    When the last reference is gone, in whatever thread, the slot is the sender's again.
    """

    def __len__(self) -> int: ...

class Receiver:
    """The reading end of a ring; used by one thread at a time."""

    def __init__(self, memory: Memory, offset: int, sender_pid: int) -> None: ...
    def take(self) -> tuple[int, int, int, int, int, Lease | None] | None:
        """The oldest message: its bytes, its four words, and the lease of its slot; None if there is none.

        The lease is None for 0 bytes. OSError if the slot cannot be mapped (the sender is gone, say), RuntimeError if
        the record has impossible numbers; the message stays then.
        """

def copy(destination: int, source: int, bytes: int, past_caches: bool = False) -> None:
    """Copy between addresses of this process; other threads run while it copies much.

    `past_caches`: nobody reads it soon. Much is copied so anyway.
    """

# `path` is that of libavgpipe.so, which torch has loaded; ImportError if it has not.

def build_info(path: str) -> dict[str, Any]:
    """What was built, and what this processor offers to it: see `avgpipe_ext.build_info`."""

def cpu_path(path: str) -> str:
    """The instruction set of the CPU kernels in use."""

def set_launcher(path: str, launcher: Callable[[str, memoryview, int, int], object] | None) -> None:
    """Let a function launch all CUDA kernels from now on; with None those that are compiled in.

    It is called with the kernel's definition, its only parameter, to be passed by value and gone after the call, the
    pieces of work, from which the grid's size follows, and the index of the device. What it raises becomes a
    RuntimeError of the operator.
    """

KERNEL_SOURCE: str
"""For NVRTC; a line AVGPIPE_DEFINE_KERNEL(definition) behind it makes a kernel."""
KERNEL_DEFINITIONS: tuple[str, ...]
KERNEL_THREADS: int
"""Threads of a block."""

def grid_size(chunks: int, processors: int) -> int:
    """Blocks of threads for so many pieces of work on a device with so many multiprocessors."""
