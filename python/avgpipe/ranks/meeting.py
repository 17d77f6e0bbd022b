"""Where workers meet that a command starts on this host: what it adds to their environment. Without torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STORE_FILE = "AVGPIPE_STORE"  # the variable with the path of the file that is their store


def private_meeting(folder: str) -> dict[str, str]:
    """The environment of ranks that meet in ``folder``, which is closed to other users, on this host alone."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ()
    listening = {name: str(loopback) for name in variables if name not in os.environ}
    # A worker that starts torchrun hands this environment on; there the variable is not empty, and the file not theirs.
    return {STORE_FILE: os.path.join(folder, "store"), "TORCHELASTIC_RUN_ID": "", **listening}


@contextmanager
def loopback_meeting() -> Iterator[dict[str, str]]:
    """The environment of ranks that join torch's process group by themselves: a store that this process holds, and that
    any process of this host can reach.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store
