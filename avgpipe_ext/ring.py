"""Messages between processes of one host through shared memory, read where they were written.

The receiving process makes a `Memory` that holds a `Bell` and, for each sender, a ring's control block
(`Sender.RING_BYTES`), and tells the others `path`, `bytes` and the offsets. A sender opens it, writes each message
into a slot that `Sender.reserve` gives, and announces it with `Sender.publish`; the receiver sleeps on the bell and
calls `Receiver.take`. The slot stays with the receiver until its `Lease` dies.

Nothing is named in a file system, so nothing is left behind by a process that is killed. Addresses are those of this
process, offsets are multiples of 64. Objects keep the memory that they lie in. Both processes must see each other in
/proc and belong to one user.

Not promised: that a sender survives a memory limit of its control group, which the kernel enforces by killing.
"""

from __future__ import annotations

import os

from avgpipe_ext._native import Bell, Lease, Memory, Receiver, Sender, copy

__all__ = ["Bell", "Lease", "Memory", "Receiver", "Sender", "copy", "supported"]


def supported() -> bool:
    """Whether this system has what is needed: Linux, with /proc."""
    return os.path.isdir("/proc/self/fd")
