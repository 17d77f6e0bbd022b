"""The process of a rank: it ends with its parent, on signals even while a library waits, and with a code that says why.

``python -m avgpipe.ranks.process PARENT OUT COMMAND...`` becomes COMMAND, tied to the process PARENT; ``OUT`` is
"stdout", or "stderr" for what the command writes to standard output. A COMMAND "module:function" is called instead,
with the arguments that the launcher has left in the folder where the ranks meet.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from avgpipe.errors import PeerLost

STORE_FILE = "AVGPIPE_STORE"  # names the variable with the path of the file in which ranks of one host meet
ARGUMENTS, PROGRESS = "arguments.json", "progress"  # beside it, as only their user may read the folder
FAILED, WRONG_ARGUMENTS, PEER_LOST = 1, 2, 3  # exit codes; the last: only because another rank failed
GRACE_S = 3.0  # after SIGTERM, to see the closed connection of the rank that died and name it
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when ``parent``, its parent, ends, however that ends.

    Linux; elsewhere nothing happens. Survives ``exec``.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was watched
        os._exit(128 + signal.SIGTERM)


@contextmanager
def ending_on_signals(say: Callable[[signal.Signals], None], grace_s: float = 0.0) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end this process with 128 + their number; SIGTERM after ``grace_s`` seconds.

    A thread does it, woken by the signal itself: Python's own handlers would wait until the main thread
    returns from whatever library call it is in. The grace lets a worker see, and say, why the others are
    gone. ``say`` is called just before the end. Outside the main thread signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {s: signal.signal(s, lambda *_: None) for s in _SIGNALS}
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch, args=(reader, say, grace_s), name="avgpipe-signals", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        watcher.join()
        os.close(writer)
        os.close(reader)


def _watch(reader: int, say: Callable[[signal.Signals], None], grace_s: float) -> None:
    number = os.read(reader, 1)[0]
    if number == signal.SIGTERM and grace_s and select.select([reader], [], [], grace_s)[0]:
        number = os.read(reader, 1)[0]  # the block ended meanwhile, or another signal is impatient
    if number:
        end = signal.Signals(number)
        say(end)
        os._exit(128 + end)


def progress(line: str) -> None:
    """Tell the launcher what is going on; what rank 0 says counts."""
    if STORE_FILE in os.environ and os.environ.get("RANK") == "0":
        path = _folder() / PROGRESS
        new = path.with_suffix(".new")
        new.write_text(line)
        new.replace(path)


def call(target: str, arguments: dict[str, Any]) -> Any:
    """Return what the function named "module:function" returns."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def main() -> None:
    parent, out, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if out == "stderr":
        os.dup2(2, 1)
    if ":" not in command[0]:
        os.execv(command[0], command)
    with ending_on_signals(lambda _: None, GRACE_S):  # the launcher says why all ranks end
        code = _code_of(command[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            code
        )  # threads that wait for a lost peer, or for what never comes, must not hold this process up


def _code_of(target: str) -> int:
    """Call ``target`` and return the exit code; the result goes to a file for the launcher."""
    import torch.distributed as dist

    try:
        result = call(target, json.loads((_folder() / ARGUMENTS).read_text()))
        (_folder() / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            dist.barrier()  # together: the store may live in rank 0
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


if __name__ == "__main__":
    main()
