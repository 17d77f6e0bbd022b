"""Links move messages between the workers of a pipeline.

A link is a file here and a row of ``LINKS``: its name, the devices it works on, and the class that offers it.
What all links share is in `link`, what a message is in `message`, and `choose` finds the link between two
workers.

"auto" takes the first row that both can open. A link may be built on others (``below``), which are then
further down; a link for a special purpose, which "auto" must not take where another one works, is below that
one.
"""

from __future__ import annotations

from typing import NamedTuple


class LinkRow(NamedTuple):
    """A kind of link.

    Attributes:
        name: The name by which it is chosen.
        transport: Module and class (a `avgpipe.links.link.Transport`) that offers it.
        device: The type of the workers' devices, if it works on that one alone.
        below: Other links that it is built on, the best first.
    """

    name: str
    transport: str
    device: str | None = None
    below: tuple[str, ...] = ()


# The best first. The last one works between any two workers.
LINKS = (
    LinkRow("cuda-ipc", "avgpipe.links.cuda:IpcTransport", device="cuda", below=("shm",)),
    LinkRow("nccl", "avgpipe.links.nccl:NcclTransport", device="cuda", below=("shm", "gloo")),
    LinkRow("shm", "avgpipe.links.shared:SharedTransport"),
    LinkRow("gloo", "avgpipe.links.group:GroupTransport"),
)
NAMES = ("auto", *(row.name for row in sorted(LINKS, key=lambda row: row.device is not None)))


def refuse_unverified(link: str, device: str) -> None:
    """Refuse, with ValueError, a link that may keep messages in ``device`` memory, which is not checked."""
    if any(row.device == device and link in ("auto", row.name) for row in LINKS):
        host = " or ".join(repr(row.name) for row in LINKS if row.device is None)
        raise ValueError(
            f"BitChecks(wire=True) checks messages in host memory, and link {link!r} may keep them on {device!r}, "
            f"whose memory and lines have their own checksums: use link {host}"
        )


def refuse_elsewhere(link: str, device: str) -> None:
    """Refuse, with ValueError, a link that does not work on a ``device`` of this type."""
    needed = next((row.device for row in LINKS if row.name == link), None)
    if needed not in (None, device):
        others = " or ".join(
            repr(row.name) for row in (LinkRow("auto", ""), *LINKS) if row.device in (None, device)
        )
        raise ValueError(f"link {link!r} needs device {needed!r}, not {device!r}: use {others}")
