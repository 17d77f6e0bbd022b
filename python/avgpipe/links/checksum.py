"""Checksums of messages: bits that are flipped on the way are found where they arrive, and named."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from avgpipe.errors import PipelineError
from avgpipe.links.message import Key

_ROW_BYTES = 512


def checksum(data: Any, start: int = 0) -> int:
    """Return 32 bits that follow from a buffer, and from the checksum ``start`` of what belongs to it.

    The CRC-32 of a table's columns, each summed up: its words of 64 bits stand in rows of 64. It is several times as
    quick as a CRC-32 of all, and changes with a single bit as surely as that (but for one of 2^32 cases).
    """
    whole = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    end = whole.size // _ROW_BYTES * _ROW_BYTES
    if end > _ROW_BYTES:
        table = whole[:end].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
        start, whole = zlib.crc32(np.add.reduce(table, axis=0).data, start), whole[end:]
    return zlib.crc32(whole.data, start)


class Verifier(NamedTuple):
    """Names, for people, of the ends of what arrives by a link that verifies its messages."""

    sender: str
    receiver: str

    def damaged(self, key: Key | None) -> PipelineError:
        """Return the error for a message that is not what was sent. ``key``: as far as its record can be read."""
        what = "a message that cannot be read" if key is None else f"{key} (pipeline {key.pipeline})"
        return PipelineError(
            f"{self.receiver} received {what} from {self.sender}, and not as it was sent: a bit was flipped on the "
            "way, in the memory of either or between them. Go on from the last checkpoint, and without that host or "
            "line if it happens again"
        )
