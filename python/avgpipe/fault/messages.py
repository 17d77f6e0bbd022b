"""Messages between the processes of a run: JSON of a fixed version; nothing received is unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

VERSION = 2
OVER = "the run is over"  # why a pipeline that joins too late is ended
JOIN = "join"  # first message of another command that starts a pipeline
ENDED = "ended"  # its last message
MOST_BYTES = 2**24  # of a message


def encoded(message: Sequence[Any]) -> bytes:
    """Return a message as it is sent; ValueError for one that its receiver would refuse."""
    text = json.dumps(message).encode()
    if len(text) > MOST_BYTES:
        what = " ".join(str(part) for part in message[:3] if isinstance(part, str | int))
        raise ValueError(f"{what[:200]!r} has {len(text)} bytes as JSON, and a message at most {MOST_BYTES}")
    return text


def received(connection: Connection) -> list[Any]:
    """Read a message; OSError or EOFError for a closed connection, ValueError for an invalid message."""
    try:
        message = json.loads(connection.recv_bytes(MOST_BYTES))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(message, list) or not message:
        raise ValueError(f"not a message: {str(message)[:200]!r}")
    return message
