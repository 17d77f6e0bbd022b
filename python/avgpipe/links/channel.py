"""Channels: streams of messages of one kind, of one pipeline, between two seats. Each keeps its order."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from avgpipe.runtime.message import Key

KINDS = "FBXYTNCERALV"  # of messages, see avgpipe.runtime.message


class Channel(NamedTuple):
    kind: str
    pipeline: int
    source: int  # seat
    seat: int  # destination

    @classmethod
    def of(cls, key: Key) -> Channel:
        return cls(*key[:4])


class Link(Protocol):
    """This worker's connection to the seats of one other place.

    ``send`` never blocks, and has taken its copy when it returns. What arrives goes into the mailbox.
    """

    name: str

    def send(self, key: Key, value: object) -> None: ...

    def close(self, patience_s: float) -> None:
        """``patience_s``: how long the other end may take to receive what was sent last."""
