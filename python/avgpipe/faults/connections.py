"""The TCP connections of this process, and faults of them. It needs no privileges but those of the process."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

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
