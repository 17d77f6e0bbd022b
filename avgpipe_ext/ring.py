"""Messages between processes of one host through shared memory, read in place.

The receiving process makes a `Memory` that holds a `Bell` and, for each sender, a ring's control block
(`Sender.RING_BYTES`), and sends `path`, `bytes` and the offsets to the others. A sender opens it, writes each
message into a slot from `Sender.reserve`, and announces it with `Sender.publish`; the receiver sleeps on the
bell and calls `Receiver.take`. The slot stays with the receiver until its `Lease` is deleted.

Nothing has a name in a file system, so a killed process leaves nothing behind. Addresses are those of this
process, offsets are multiples of 64. Objects keep the memory alive that they are in. Both processes must be
visible to each other in /proc and belong to one user.

Not promised: that a sender survives a memory limit of its control group, which the kernel enforces by
killing.
"""

from __future__ import annotations

import os

from avgpipe_ext._native import Bell, Lease, Memory, Receiver, Sender, copy

__all__ = ["Bell", "Lease", "Memory", "Receiver", "Sender", "copy", "supported"]


def supported() -> bool:
    """Return whether this system has what is needed: Linux, with /proc."""
    return os.path.isdir("/proc/self/fd")
