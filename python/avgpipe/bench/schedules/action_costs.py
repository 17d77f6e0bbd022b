"""How long the actions of a row took, the host's share included."""

from __future__ import annotations

import statistics
from collections import defaultdict

from avgpipe.timeline.timeline import ACTIONS, EventKind, Timeline, occupations

_HOST = (EventKind.SEND, EventKind.HOST, EventKind.AVERAGE)


def action_costs(timeline: Timeline, stages: int, first_batch: int = 0) -> dict[str, list[float]]:
    """By kind, the mean seconds of a stage's actions since ``first_batch``; of kinds that no stage has run, nothing.

    A worker is occupied until it has sent what an action made and has done what its host had to do, so that belongs to
    the action before. Of replicas it is the mean.
    """
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action in occupations((e for e in timeline.events if e.batch >= first_batch), _HOST):
        samples[action.kind, action.stage].append(action.seconds)
    return {
        kind: [statistics.fmean(samples[kind, k]) if (kind, k) in samples else 0.0 for k in range(stages)]
        for kind in map(str, ACTIONS)
        if any((kind, k) in samples for k in range(stages))
    }
