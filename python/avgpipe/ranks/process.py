"""The process of a rank: how it ends, and which resources of its machine it takes.

It ends with its parent, and with a code that names the cause.

``python -m avgpipe.ranks.process PARENT OUT COMMAND...`` becomes COMMAND, tied to the process PARENT; ``OUT``
is "stdout", or "stderr" for what the command writes to standard output. A COMMAND "module:function" is called
instead, with the arguments that the launcher has left in the folder where the ranks meet.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import logging
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from avgpipe.errors import PeerLost, reason
from avgpipe.ranks.environment import HOST, STORE_FILE, named
from avgpipe.ranks.limits import LIMITS

_log = logging.getLogger("avgpipe")
# Beside it, as only their user may read the folder.
ARGUMENTS, PROGRESS, _MISSED, _ASKED, _OWNER = "arguments.json", "progress", "missed", "asked", "owner"
_READY, _ERROR = "ready", "error"
FAILED, WRONG_ARGUMENTS, PEER_LOST = 1, 2, 3  # exit codes; the last: only because another rank failed
_LONGEST_PATH = 107  # bytes, of a Unix socket
_PR_SET_PDEATHSIG = 1


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


def has_reader() -> bool:
    """Whether standard output has a reader: not if it is a pipe to a program that has ended, as ``head`` does."""
    output = select.poll()
    output.register(1, 0)
    return not any(event & select.POLLERR for _, event in output.poll(0))


def end_without_reader() -> None:
    """End this process quietly, as programs end that write to a pipe without a reader; Python ignores that signal."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


@functools.cache
def report_lost_peers() -> None:
    """Report to the launcher, if it has started this process, the error by which it ends, and whether it is PeerLost.

    A script's exit code is 1 then, and so may be that of the rank that it has missed. It ends quietly by Ctrl-C, which
    the launcher reports once for all, and where standard output, which all ranks share, has no reader.
    """
    if not os.environ.get(STORE_FILE):
        return
    before = sys.excepthook

    def report(kind: Any, error: Any, trace: Any) -> None:
        _leave(_MISSED if issubclass(kind, PeerLost) else _ERROR, f"{kind.__name__}: {reason(error)}")
        if issubclass(kind, (BrokenPipeError, PeerLost)) and not has_reader():
            end_without_reader()
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)

    sys.excepthook = report


def _leave(name: str, text: str = "") -> None:
    """Leave a file for the launcher, if it has started this process."""
    with suppress(OSError, KeyError):
        (_folder() / f"{name}-{os.environ['RANK']}").write_text(text, errors="backslashreplace")


def report_ready() -> None:
    """Report to the launcher, if it has started this process, that this is at its Pipeline, to meet the others."""
    _leave(_READY)


def unready(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Return the ranks of processes, started in ``folder``, that have not reported it; none if none has.

    Once others have missed a rank, also those that have reported it later.
    """
    ready = {path.name: path.stat().st_mtime for path in folder.glob(f"{_READY}-*")}
    missed = min((path.stat().st_mtime for path in folder.glob(f"{_MISSED}-*")), default=float("inf"))
    return [rank for rank in ranks if ready.get(f"{_READY}-{rank}", float("inf")) >= missed] if ready else []


def forget_ready(folder: Path, rank: int) -> None:
    """Forget the report of a process that was lost."""
    (folder / f"{_READY}-{rank}").unlink(missing_ok=True)


def has_missed(folder: Path, rank: int) -> bool:
    """Whether a process that was started in ``folder`` has reported that."""
    return (folder / f"{_MISSED}-{rank}").exists()


def error_of(folder: Path, rank: int) -> str:
    """Return the error that a process has reported that was started in ``folder``; "" if it has reported none."""
    path = folder / f"{_ERROR}-{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def ask_for_losses(generation: int) -> None:
    """Ask the launcher, if it started this process, whether a rank is lost and this generation follows."""
    _leave(f"{_ASKED}-{generation}")


def is_asked(folder: Path, generation: int) -> bool:
    """Whether a process that was started in ``folder`` has asked whether a rank is lost."""
    return any(folder.glob(f"{_ASKED}-{generation}-*"))


def main() -> None:
    parent, out, *command = sys.argv[1:]
    die_with_parent(int(parent))
    if out == "stderr":
        os.dup2(2, 1)
    if ":" not in command[0]:
        os.execv(command[0], command)
    from avgpipe.ranks.signals import PREEMPTED, ending_on_signals

    with ending_on_signals(lambda _: None, LIMITS.grace_s, PREEMPTED):  # the launcher says why all ranks end
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
        _leave(_MISSED, str(error))
        return PEER_LOST
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


def _folder() -> Path:
    return Path(os.environ[STORE_FILE]).parent


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a temporary folder for a run; remove those that launchers have left that were killed.

    A launcher keeps a file locked in its folder. The lock ends with the process, however that ends.
    """
    for left in Path(gettempdir()).glob("avgpipe-*"):
        with suppress(OSError), open(left / _OWNER, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix="avgpipe-") as name, open(Path(name, "new"), "w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, Path(name, _OWNER))  # locked when others find it
        yield Path(name)


def fits_a_socket(path: Path) -> bool:
    """Whether a Unix socket may have this path."""
    return len(os.fsencode(path)) <= _LONGEST_PATH


def folder_for_a_socket() -> TemporaryDirectory[str]:
    """Make a temporary folder whose path is short enough for a Unix socket in it, also where TMPDIR's is not."""
    is_short = fits_a_socket(Path(gettempdir(), "avgpipe-12345678", "coordinator"))
    return TemporaryDirectory(prefix="avgpipe-", dir=None if is_short else "/tmp")


@functools.cache
def host_here() -> str:
    """Name the host of this process: processes of one host can share memory.

    Those in another container, on another network or of another user cannot, or count as if they could not.
    """
    names = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get(HOST) or "/".join([boot, *names, str(os.getuid())])


if __name__ == "__main__":
    main()
