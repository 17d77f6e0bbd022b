"""Whether two processes can share memory here: tried, not looked up."""

from __future__ import annotations

import subprocess
import sys

_PATIENCE_S = 20.0
_GREETING = b"here"
# Another process opens the memory as a peer would, and without torch, which takes seconds to load.
_PEER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, int(sys.argv[2]))
memory[-4:] = b"here"
"""


def try_shared_memory() -> str | None:
    """None if memory made here is seen by another process, and a bell in it rings; else the reason."""
    from avgpipe_ext import ring

    if not ring.supported():
        return "needs Linux, with /proc"
    size = 4096
    try:
        mine = ring.Memory.create(size)
        theirs = ring.Memory.open(mine.path, size)
        reason = _peer_opens(mine.path, size)
    except (OSError, MemoryError) as error:
        return str(error)
    if reason is not None:
        return reason
    bell = ring.Bell(mine, 0)
    seen = bell.count()
    ring.Bell(theirs, 0).ring()
    if bell.wait(seen, _PATIENCE_S) == seen:
        return "a bell that was rung is not heard"
    return (
        None
        if memoryview(mine)[-len(_GREETING) :] == _GREETING
        else "what another process writes is not seen"
    )


def _peer_opens(path: str, size: int) -> str | None:
    command = [sys.executable, "-S", "-c", _PEER, path, str(size)]
    try:
        peer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"another process could not open it within {_PATIENCE_S:g} s"
    if peer.returncode == 0:
        return None
    lines = peer.stderr.strip().splitlines()
    return f"another process cannot open it: {lines[-1] if lines else f'exit code {peer.returncode}'}"
