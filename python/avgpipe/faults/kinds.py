"""The effect of each kind of fault on the process."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from avgpipe.faults.fault import Fault, InjectedFault
from avgpipe.links.link import Key, Link, LocalLink, tensors_of
from avgpipe.ranks import environment as probe

_log = logging.getLogger("avgpipe")
# Sends SIGCONT to its parent after some seconds, unless the parent ends before.
_CONTINUE = """
import os, select, signal, sys
parent = os.pidfd_open(int(sys.argv[1]))
if not select.select([parent], [], [], float(sys.argv[2]))[0]:
    signal.pidfd_send_signal(parent, signal.SIGCONT)
"""


def happen(fault: Fault, phase: str, place: Mapping[str, Any]) -> bool:
    """Let a fault happen; return whether the place itself must act on it."""
    where = f"at {phase}: {', '.join(f'{n} {v}' for n, v in place.items() if v is not None)}"
    _log.warning("avgpipe.testing: %s %s", fault.kind, where)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        _stop(fault.for_s)
    elif fault.kind == "slow":
        time.sleep(fault.for_s or 0)
    elif fault.kind == "exception":
        raise InjectedFault(f"injected by avgpipe.testing {where}")
    elif fault.kind == "out of memory":
        _run_out_of_memory(where)
    elif fault.kind == "half-written message":
        for descriptor in connections():
            begin_message(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        if fault.kind in ("cut line", "reset"):
            for descriptor in connections(fault.store):
                (cut if fault.kind == "cut line" else reset)(descriptor)
        return fault.kind != "reset"
    return False


def _stop(for_s: float | None) -> None:
    command = [sys.executable, "-S", "-E", "-c", _CONTINUE, str(os.getpid()), str(for_s)]
    helper = None if for_s is None else subprocess.Popen(command)
    signal.raise_signal(signal.SIGSTOP)
    if helper is not None:
        helper.kill()  # another process may have sent SIGCONT before it
        helper.wait()


def _run_out_of_memory(where: str) -> NoReturn:
    text = f"out of memory, injected by avgpipe.testing {where}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        raise torch.OutOfMemoryError(text)
    raise MemoryError(text)


# ---- connections of this process -------------------------------------------------------------------------------------


_FOLDER = "/proc/self/fd"
_NOWHERE = struct.pack("=H14x", socket.AF_UNSPEC)  # an address to connect to, of 16 bytes


def connections(store: bool = False) -> list[int]:
    """Return the descriptors of established connections; those with torch's store only if ``store``."""
    found = []
    for descriptor, what in _descriptors():
        if what.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                # OSError for one that only listens
                ports = [str(end[1]) for end in (one.getpeername(), one.getsockname())] if is_tcp else []
                if is_tcp and (store or os.environ.get("MASTER_PORT") not in ports):
                    found.append(descriptor)
    return found


def reset(descriptor: int) -> None:
    """End a connection by a TCP reset, which both ends notice as such."""
    ctypes.CDLL(None).connect(descriptor, _NOWHERE, len(_NOWHERE))


def begin_message(descriptor: int) -> None:
    """Write the beginning of a message, shorter than the number with which each message begins."""
    with suppress(OSError):  # the peer has ended, or receives nothing now
        os.write(descriptor, b"\1\0\0")


def cut(descriptor: int) -> None:
    """Make a connection silent: what is written is lost, nothing arrives, and neither end notices a close.

    No process reads, writes to or closes the socket that replaces it. A thread that polls the descriptor, as
    gloo does, finds it registered as before, and gets no event of the connection, which stays open under
    another number.
    """
    ours, silent = (end.detach() for end in socket.socketpair())
    os.set_blocking(ours, os.get_blocking(descriptor))
    os.set_inheritable(silent, False)
    os.dup(descriptor)
    pollers = []
    for number, what in _descriptors():
        if what == "anon_inode:[eventpoll]":
            poller = select.epoll.fromfd(os.dup(number))
            with suppress(FileNotFoundError):  # it polls other descriptors
                poller.unregister(descriptor)
                pollers.append(poller)
    os.dup2(ours, descriptor, inheritable=False)
    os.close(ours)
    for poller in pollers:
        with suppress(FileExistsError):
            poller.register(descriptor, 0)


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield each descriptor of this process, with what it is."""
    for name in os.listdir(_FOLDER):
        with suppress(FileNotFoundError):  # it was the descriptor of the folder
            yield int(name), os.readlink(f"{_FOLDER}/{name}")


# ---- the disk --------------------------------------------------------------------------------------------------------


def writing(file: Any, **place: Any) -> Any:
    """Return ``file``, which a save is about to write, or its replacement where a test wants a full disk."""
    for fault in probe.at("save", action="write", **place):
        if fault.kind == "full disk":
            return _FullDisk(file, fault.room_bytes)
    return file


def written(path: Path, **place: Any) -> None:
    """Flip a bit of the file ``path``, which a save has written, where that fault is armed."""
    for fault in probe.at("save", action="written", **place):
        if fault.kind == "flipped bit":
            byte, bit = divmod(fault.bit % (8 * path.stat().st_size), 8)
            with path.open("r+b") as file:
                file.seek(byte)
                (value,) = file.read(1)
                file.seek(byte)
                file.write(bytes([value ^ 1 << bit]))


class _FullDisk:
    """A file on a disk with room for ``room_bytes`` bytes."""

    def __init__(self, file: Any, room_bytes: int) -> None:
        self._file, self._room_bytes = file, room_bytes

    def write(self, data: Any) -> int:
        taken = memoryview(data).cast("B")[: self._room_bytes]
        self._file.write(taken)
        self._room_bytes -= len(taken)
        if len(taken) < memoryview(data).nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(taken)


# ---- links -----------------------------------------------------------------------------------------------------------


def disturb(links: dict[int, Link], fault: Fault) -> None:
    """Inject a fault into the links of a worker, by replacing them in ``links``."""
    remote = {replica: link for replica, link in links.items() if not isinstance(link, LocalLink)}
    if fault.kind == "cut line":
        links.update({replica: _CutLine(link) for replica, link in remote.items()})
    elif fault.where == "wire":
        sound = remote or dict(links)
        links.update({replica: _Flipping(link, links, sound, fault.bit) for replica, link in sound.items()})


class _CutLine(Link):
    """A link that loses what is sent."""

    def __init__(self, link: Link) -> None:
        self.name = link.name

    def send(self, key: Key, value: Any) -> None:
        pass


class _Flipping(Link):
    """A link that flips a bit of the next message with tensors, then restores the ``sound`` links."""

    def __init__(self, link: Link, links: dict[int, Link], sound: dict[int, Link], bit: int) -> None:
        self.name, self._link, self._bit = link.name, link, bit
        self._links, self._sound = links, sound

    def send(self, key: Key, value: Any) -> None:
        if any(t.nbytes for t in tensors_of(value)):
            self._links.update(self._sound)
            self._link.send_flipped(key, value, self._bit)
        else:
            self._link.send(key, value)
