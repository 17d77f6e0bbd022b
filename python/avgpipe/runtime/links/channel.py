"""Channels: streams of messages of one kind, of one pipeline, between two stages. Each keeps its order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from avgpipe.runtime.message import Key

KINDS = "FBTNCER"  # of messages, see avgpipe.runtime.message


class Channel(NamedTuple):
    kind: str
    pipeline: int
    source: int  # stage
    stage: int  # destination

    @classmethod
    def of(cls, key: Key) -> Channel:
        return cls(*key[:4])


class Link(Protocol):
    """This worker's connection to the stages of one other place.

    ``send`` never blocks, and has taken its copy when it returns. What arrives goes into the mailbox.
    """

    name: str

    def send(self, key: Key, value: object) -> None: ...

    def close(self, patience_s: float) -> None:
        """``patience_s``: how long the other end may take to receive what was sent last."""


def channels_into(
    stage: int, stages: int, pipelines: int, shared: Iterable[int], clipping: bool
) -> list[Channel]:
    """All channels that end at ``stage``, in an order that every rank finds alike.

    ``shared``: other stages that hold some of its parameters.
    """
    before, after, last = stage - 1, stage + 1, stages - 1
    found = []
    for i in range(pipelines):
        if stage > 0:
            found.append(Channel("F", i, before, stage))
        if stage < last:
            found.append(Channel("B", i, after, stage))
        found += [Channel("T", i, other, stage) for other in sorted(shared)]
        if clipping and stage < last:
            found.append(Channel("N", i, after, stage))
        if clipping and stage > 0:
            found.append(Channel("C", i, before, stage))
    if stage > 0:
        found.append(Channel("E", 0, before, stage))
    if stage < last:
        found.append(Channel("R", 0, last, stage))
    return found
