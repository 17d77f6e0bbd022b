"""How long actions occupied their worker, from what a run recorded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from avgpipe.timeline.timeline import Event

ACTIONS = ("F", "B", "I", "W", "U")
_STAGE = re.compile(r"stage (\d+)")


class Occupation(NamedTuple):
    """stage: of the model, which an event's worker is where each has one."""

    kind: str
    stage: int
    pipeline: int
    batch: int
    seconds: float


def occupations(events: Iterable[Event], beside: Collection[str]) -> list[Occupation]:
    """Of each action, with what its worker did next of the kinds ``beside``: it has to be done before the next one."""
    found: list[Occupation] = []
    last: dict[int, int] = {}  # by worker, the action that it ran last
    for event in sorted(events, key=lambda e: e.start_s):
        seconds = event.end_s - event.start_s
        if event.kind in ACTIONS:
            last[event.stage] = len(found)
            found.append(Occupation(event.kind, _stage_of(event), event.pipeline, event.batch, seconds))
        elif event.kind in beside and event.stage in last:
            n = last[event.stage]
            found[n] = found[n]._replace(seconds=found[n].seconds + seconds)
    return found


def _stage_of(event: Event) -> int:
    """Where a worker is not a stage, the detail names it."""
    named = _STAGE.search(event.detail)
    return int(named[1]) if named else event.stage
