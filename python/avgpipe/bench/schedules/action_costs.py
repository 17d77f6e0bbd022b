"""How long the actions of a row took, the host's share included."""

from __future__ import annotations

import re
from collections import defaultdict

from avgpipe.report.timeline import Event, Timeline

_ACTIONS = ("F", "B", "I", "W", "U")
_STAGE = re.compile(r"stage (\d+)")


def action_costs(timeline: Timeline, stages: int, first_batch: int = 0) -> dict[str, list[float]]:
    """By kind, the mean seconds of a stage's actions since ``first_batch``; of kinds that no stage has run, nothing.

    A worker is occupied until it has sent what an action made and has done what its host had to do, so that belongs to
    the action before. Of replicas it is the mean.
    """
    total: dict[tuple[str, int], float] = defaultdict(float)
    count: dict[tuple[str, int], int] = defaultdict(int)
    at: dict[int, tuple[str, int]] = {}  # by worker, the action that it ran last
    for event in sorted(timeline.events, key=lambda e: e.start_s):
        if event.batch < first_batch:
            continue
        if event.kind in _ACTIONS:
            at[event.stage] = event.kind, _stage_of(event)
            count[at[event.stage]] += 1
        if event.kind != "recv" and event.stage in at:
            total[at[event.stage]] += event.end_s - event.start_s
    return {
        kind: [total[kind, k] / count[kind, k] if count[kind, k] else 0.0 for k in range(stages)]
        for kind in _ACTIONS
        if any(count[kind, k] for k in range(stages))
    }


def _stage_of(event: Event) -> int:
    """Where a worker is not a stage, the detail names it."""
    named = _STAGE.search(event.detail)
    return int(named[1]) if named else event.stage
