"""Compiled code other than tensor operators (csrc/bindings.cpp); it needs no torch."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Integers = NDArray[np.int64]

def simulate(
    *, events: bool, **fields: Any
) -> tuple[int, _Integers, _Integers, _Integers, NDArray[np.float64], int, NDArray[Any] | None]:
    """Simulate a schedule. The fields are those of Question in csrc/simulate/question.h.

    Returns the makespan, busy ticks per worker, ticks at the end of each batch, the most micro-batches in
    flight per stage and the most bytes held per worker, the number of actions, and with ``events`` their
    records.

    Raises:
        ValueError: the schedule gets stuck, or an array has a wrong size.
        OverflowError: the times are too long to count.
        MemoryError: it does not fit into memory.
        TypeError: a field is missing, unknown, or an array of another dtype.
    """

class Memory(Buffer):
    """Anonymous shared memory, a writable buffer as long as the object or anything in it exists.

    Its size is final.
    """

    @staticmethod
    def create(bytes: int) -> Memory:
        """Make memory, zero and fully allocated: MemoryError if there is not enough."""
    @staticmethod
    def open(path: str, bytes: int) -> Memory:
        """Open a peer's memory. OSError; with EINVAL if the file has fewer than `bytes` bytes, or may shrink."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def path(self) -> str:
        """The path where others open it, as long as the file is open here."""
    def close_file(self) -> None:
        """Close the file and keep the mapping: no other process can open it from now on."""

class Bell:
    """A counter that any process rings and one sleeps on. It occupies `BYTES`, which must be zero at first."""

    BYTES: ClassVar[int]

    def __init__(self, memory: Memory, offset: int) -> None: ...
    @staticmethod
    def local() -> Bell:
        """Make a bell for the threads of this process."""
    def count(self) -> int:
        """Return the number of rings, modulo 2^32. What was written before a ring is visible after its count."""
    def ring(self) -> None:
        """Add one, and wake the sleeper; no system call if there is none."""
    def wait(self, seen: int, timeout_s: float, spin_s: float = 0.0) -> int:
        """Wait until count() != seen, for at most `timeout_s` seconds, and return count().

        Spins for `spin_s` seconds first (a busy core, the shortest latency), then sleeps. Returns early on a signal,
        so that Python's handlers run. Other threads run meanwhile.
        """

class Sender:
    """The writing end of a ring; used by one thread at a time.

    Its control block occupies `RING_BYTES` of the receiver's memory, which must be zero at first.
    """

    RING_BYTES: ClassVar[int]

    def __init__(self, memory: Memory, offset: int, bell: Bell) -> None:
        """Make the sender; `bell` is the receiver's."""
    def reserve(self, bytes: int) -> int:
        """Return the address of a slot of at least `bytes`, a multiple of 64; an earlier reservation is dropped.

        Takes the first free slot that is large enough; else enlarges the first free one; else makes one.
        BufferError if all slots are lent, MemoryError if there is no memory.
        """
    def publish(self, bytes: int, a: int, b: int, c: int, d: int) -> None:
        """Announce `bytes` bytes of the reserved slot with four words (int64), and ring the receiver's bell.

        With 0 bytes only the words are sent. BufferError if the receiver's queue of messages is full: then
        the slot stays reserved.
        """
    def waiting(self) -> int:
        """Return how many messages the receiver has not taken. It cannot take them once this process has ended."""
    def lent(self) -> int:
        """Return how many slots the receiver has not given back, with messages taken or not."""
    def slots(self) -> tuple[int, int]:
        """Return the number of slots, and their total bytes."""

class Lease(Buffer):
    """A slot's memory as a writable buffer of the slot's size, for `torch.frombuffer(lease, dtype=...)`.

    When the last reference is gone, in any thread, the slot returns to the sender.
    """

    def __len__(self) -> int: ...

class Receiver:
    """The reading end of a ring; used by one thread at a time."""

    def __init__(self, memory: Memory, offset: int, sender_pid: int) -> None: ...
    def take(self) -> tuple[int, int, int, int, int, Lease | None] | None:
        """Take the oldest message: its bytes, its four words, and the lease of its slot; None if there is none.

        The lease is None for 0 bytes. OSError if the slot cannot be mapped (for example as the sender is
        gone), RuntimeError if the record has impossible numbers; the message stays then.
        """

def copy(destination: int, source: int, bytes: int, past_caches: bool = False) -> None:
    """Copy between addresses of this process; other threads run during large copies.

    `past_caches`: it is not read soon. Large copies always bypass the caches.
    """

# `path` is that of libavgpipe.so, which torch has loaded; ImportError if it has not.

def build_info(path: str) -> dict[str, Any]:
    """Return facts about the build and this processor: see `avgpipe_ext.build_info`."""

def cpu_path(path: str) -> str:
    """Return the instruction set of the CPU kernels in use."""

def set_launcher(
    path: str, launcher: Callable[[str, memoryview, int, int], object] | None, for_all: bool
) -> None:
    """Make a function launch the CUDA kernels of devices that no built-in one serves, or `for_all`; None: nothing.

    It is called with the kernel's definition, its only parameter, passed by value and invalid after the call,
    the number of chunks of work, which determines the grid's size, and the index of the device. An error that
    it raises becomes a RuntimeError of the operator.
    """

def images_serve(images: str, major: int, minor: int) -> bool:
    """Return whether a device of this compute capability runs one of the images, "8.0,9.0a,12.0+PTX"."""

KERNEL_SOURCE: str
"""Source for NVRTC; with a line AVGPIPE_DEFINE_KERNEL(definition) after it, it makes a kernel."""
KERNEL_DEFINITIONS: tuple[str, ...]
KERNEL_THREADS: int
"""Threads of a block."""

def grid_size(chunks: int, processors: int) -> int:
    """Return the blocks of threads for ``chunks`` chunks of work on a device with ``processors`` multiprocessors."""
