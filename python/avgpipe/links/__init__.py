"""Links move messages between the workers of a pipeline.

A link is a file here and a row of ``LINKS``: what it is called, where it works, and which class offers it. What all of
them have in common is in `link`, what a message is in `message`, and `choose` finds the one that serves two workers.

"auto" takes the first row that both can open. A link may be built on others (``below``), which then stand further down;
one that is made for a purpose, and not to be taken by "auto" where another one works, stands below that one.
"""

from __future__ import annotations

from typing import NamedTuple


class LinkRow(NamedTuple):
    """A kind of link.

    Attributes:
        name: How it is asked for.
        transport: Module and class (a `avgpipe.links.link.Transport`) that offers it.
        on_cuda: Whether it is for workers on CUDA devices alone.
        below: Other links that it is built on, the best first.
    """

    name: str
    transport: str
    on_cuda: bool = False
    below: tuple[str, ...] = ()


# The best first. Any two workers can have the last one.
LINKS = (
    LinkRow("cuda-ipc", "avgpipe.links.cuda:IpcTransport", on_cuda=True, below=("shm",)),
    LinkRow("nccl", "avgpipe.links.cuda:NcclTransport", on_cuda=True, below=("shm", "gloo")),
    LinkRow("shm", "avgpipe.links.shared:SharedTransport"),
    LinkRow("gloo", "avgpipe.links.group:GroupTransport"),
)
ON_CUDA = tuple(row.name for row in LINKS if row.on_cuda)
ON_HOST = tuple(row.name for row in LINKS if not row.on_cuda)
NAMES = ("auto", *ON_HOST, *ON_CUDA)
