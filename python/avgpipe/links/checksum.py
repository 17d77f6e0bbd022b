"""Checksums of messages: the receiver finds bits that were flipped in transit, and names the message."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from avgpipe.errors import PipelineError
from avgpipe.links.message import Key

_ROW_BYTES = 512


def checksum(data: Any, start: int = 0) -> int:
    """Return 32 bits computed from a buffer, and from the checksum ``start`` of earlier data.

    The CRC-32 of a table's column sums: the buffer's 64-bit words form rows of 64. It is several times as
    fast as a CRC-32 of all bytes, and detects a single flipped bit as surely (except in one of 2^32 cases).
    """
    whole = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    end = whole.size // _ROW_BYTES * _ROW_BYTES
    if end > _ROW_BYTES:
        table = whole[:end].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
        start, whole = zlib.crc32(np.add.reduce(table, axis=0).data, start), whole[end:]
    return zlib.crc32(whole.data, start)


class Verifier(NamedTuple):
    """The names, in messages, of the ends of a link that verifies its messages."""

    sender: str
    receiver: str

    def damaged(self, key: Key | None) -> PipelineError:
        """Return the error for a message that changed in transit; ``key`` is None if it is unreadable."""
        what = "a message that cannot be read" if key is None else f"{key} (pipeline {key.pipeline})"
        return PipelineError(
            f"{self.receiver} received {what} from {self.sender}, and not as it was sent: a bit was flipped in "
            "transit, in the memory of either or between them. Resume from the last checkpoint, and without that host "
            "or line if it happens again"
        )
