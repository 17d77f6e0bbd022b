"""The process of a rank: how it ends, and which resources of its machine it takes.

It ends with its parent, and with a code that names the cause.

``python -m avgpipe.ranks.process PARENT OUT COMMAND...`` becomes COMMAND, tied to the process PARENT; ``OUT``
is "stdout", or "stderr" for what the command writes to standard output. A COMMAND "module:function" is called
instead, with the arguments that the launcher has left in the folder where the ranks meet.

glibc returns large blocks to the system when they are freed, and requests them again page by page, which was
measured as up to a quarter of a batch's time. Torch has a cache of its own on CUDA, but none on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import logging
import os
import platform
import re
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from avgpipe.errors import PeerLost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

_log = logging.getLogger("avgpipe")
# The number of this generation, where ranks are replaced; the folder in which a spare gets its place; and for
# isolated pipelines the address of the run, and this process's pipeline.
GENERATION, SPARE, RUN, PIPELINE = "AVGPIPE_GENERATION", "AVGPIPE_SPARE", "AVGPIPE_RUN", "AVGPIPE_PIPELINE"
STORE_FILE = "AVGPIPE_STORE"  # names the variable with the path of the file in which ranks of one host meet
# Beside it, as only their user may read the folder.
ARGUMENTS, PROGRESS, _MISSED, _ASKED = "arguments.json", "progress", "missed", "asked"
FAILED, WRONG_ARGUMENTS, PEER_LOST = 1, 2, 3  # exit codes; the last: only because another rank failed
_LONGEST_PATH = 107  # bytes, of a Unix socket
_PR_SET_PDEATHSIG = 1
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 2**31 - 1  # free at the end of the heap: the largest int
_LARGE_BYTES = 2**30  # larger blocks go back at once
_TUNABLES, _ONE_HEAP = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
_MEMORY_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", _TUNABLES, "LD_PRELOAD")
_THREAD_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables of the user's choice
_warned = False  # about threads


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process, also after ``exec``, when ``parent``, its parent, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(128 + signal.SIGTERM)


def progress(line: str) -> None:
    """Report a line of progress to the launcher; only rank 0's line counts."""
    if STORE_FILE in os.environ and os.environ.get("RANK") == "0":
        path = _folder() / PROGRESS
        new = path.with_suffix(".new")
        new.write_text(line)
        new.replace(path)


@functools.cache
def report_lost_peers() -> None:
    """Report to the launcher, if it has started this process, when it ends by an uncaught PeerLost.

    A script's exit code is 1 then, and so may be that of the rank that it has missed.
    """
    if not os.environ.get(STORE_FILE):
        return
    before = sys.excepthook

    def report(kind: Any, error: Any, trace: Any) -> None:
        if issubclass(kind, PeerLost):
            with suppress(OSError):
                (_folder() / f"{_MISSED}-{os.environ['RANK']}").touch()
        before(kind, error, trace)

    sys.excepthook = report


def has_missed(folder: Path, rank: int) -> bool:
    """Whether a process that was started in ``folder`` has reported that."""
    return (folder / f"{_MISSED}-{rank}").exists()


def ask_for_losses(generation: int) -> None:
    """Ask the launcher, if it started this process, whether a rank is lost and this generation follows."""
    if os.environ.get(STORE_FILE):
        with suppress(OSError):
            (_folder() / f"{_ASKED}-{generation}").touch()


def is_asked(folder: Path, generation: int) -> bool:
    """Whether a process that was started in ``folder`` has asked whether a rank is lost."""
    return (folder / f"{_ASKED}-{generation}").exists()


def named(target: str) -> Any:
    """Return the object named "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def is_replaceable() -> bool:
    """Whether a rank that is killed is replaced here."""
    return GENERATION in os.environ


def generation() -> int:
    """Return how often the ranks have met again after one was replaced."""
    return int(os.environ.get(GENERATION, "0"))


def pipeline_here() -> int | None:
    """Return the pipeline of this process in a run of isolated ones; None elsewhere."""
    return int(os.environ[PIPELINE]) if RUN in os.environ else None


def main() -> None:
    parent, out, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if out == "stderr":
        os.dup2(2, 1)
    if ":" not in command[0]:
        os.execv(command[0], command)
    from avgpipe.ranks.signals import GRACE_S, PREEMPTED, ending_on_signals

    with ending_on_signals(lambda _: None, GRACE_S, PREEMPTED):  # the launcher says why all ranks end
        code = _code_of(command[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads that wait for a lost peer must not delay the end


def _code_of(target: str) -> int:
    """Call ``target`` and return the exit code; the result goes to a file for the launcher."""
    from avgpipe.ranks.rendezvous import meet_at_the_end  # imports torch

    try:
        result = named(target)(**json.loads((_folder() / ARGUMENTS).read_text()))
        (_folder() / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        meet_at_the_end()
    except PeerLost as error:
        print(f"PeerLost: {error}", file=sys.stderr)
        return PEER_LOST
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


def _folder() -> Path:
    return Path(os.environ[STORE_FILE]).parent


def fits_a_socket(path: Path) -> bool:
    """Whether a Unix socket may have this path."""
    return len(os.fsencode(path)) <= _LONGEST_PATH


def folder_for_a_socket() -> TemporaryDirectory[str]:
    """Make a temporary folder whose path is short enough for a Unix socket in it, also where TMPDIR's is not."""
    is_short = fits_a_socket(Path(gettempdir(), "avgpipe-12345678", "coordinator"))
    return TemporaryDirectory(prefix="avgpipe-", dir=None if is_short else "/tmp")


def peer_of(connection: Connection) -> int:
    """Return the process id of the peer of a Unix socket; 0 where this process cannot see it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, _, _ = _CREDENTIALS.unpack(credentials)
    return int(process)


# ---- processors, threads and main memory -------------------------------------------------------------------------


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """Return the name of the processor."""
    named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the main memory that it frees; return whether it will.

    It will not without glibc, nor where the environment configures the allocation of memory.
    """
    mallopt = None if _chooses_memory() else _glibc_function("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    )


def launch_environment() -> dict[str, str]:
    """Return the variables for a process that will train, unless the environment sets them already.

    Torch requests aligned blocks. The few bytes that glibc cuts off beside one go through its cache per
    thread to the next small object, and stay there when the block is freed: a block of the same size no
    longer fits. A worker was seen to hold 570 MiB instead of 420. Without that cache the pieces merge again,
    and a model's batches took no longer.

    Also, what the thread of a link receives is freed by the scheduler's thread: if each had a heap of its
    own, every heap would keep its own peak, and heaps of threads are too small for large messages.
    """
    return {} if _chooses_memory() else {_TUNABLES: _ONE_HEAP}


def return_freed_memory() -> None:
    """Return free main memory to the system, once (malloc_trim); without glibc nothing happens."""
    malloc_trim = _glibc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def warn_of_threads(threads: int) -> None:
    """Warn where a pipeline in this process alone uses ``threads`` threads for its operators on a busy machine.

    Small operators wait for each thread in turn; where a thread has lost its processor, that takes many times
    as long as the work. A process warns once.
    """
    global _warned
    if _warned or threads == 1 or any(name in os.environ for name in _THREAD_CHOICES):
        return
    if os.getloadavg()[0] >= (os.cpu_count() or 1):
        _warned = True
        _log.warning(
            "this machine is busy, and each operator of torch waits for %d threads: micro-batches may take many times "
            "as long as with one; set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)",
            threads,
        )


def _chooses_memory() -> bool:
    """Whether the environment configures the allocation of memory, differently from us."""
    return any(os.environ.get(name) not in (None, "", _ONE_HEAP) for name in _MEMORY_CHOICES)


def _glibc_function(name: str) -> Any:
    """Return the function, or None without glibc."""
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        return getattr(ctypes.CDLL(None), name)
    except ValueError:
        return None


if __name__ == "__main__":
    main()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used: of an accelerator, else resident in main memory."""
    if device.type != "cpu":
        import torch  # a launcher does without torch

        return int(torch.accelerator.max_memory_allocated(device))
    # Of this program alone; getrusage also counts the program that the process ran before exec.
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
