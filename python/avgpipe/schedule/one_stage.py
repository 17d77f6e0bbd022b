"""Schedules with one stage on each worker: built from the forwards that a stage runs before its first backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from avgpipe.errors import ScheduleError
from avgpipe.schedule.row import Action, Kind, Loop, Row
from avgpipe.schedule.schedule import Schedule

_F, _B, _, _, _U = Kind


class Asked(NamedTuple):
    """The checked arguments of :func:`build_schedule`."""

    name: str
    micro_batches: int
    replication: tuple[int, ...]  # workers of each stage
    advance: tuple[int, ...]  # the a_k
    stages_per_worker: int

    @property
    def stages(self) -> int:
        return len(self.replication)


def warm_ups(stages: int, micro_batches: int, advance: Sequence[int]) -> list[int]:
    """Return for each stage k the forwards before the first backward: min(M, K - k + a_k), with ``advance`` the a_k."""
    return [min(micro_batches, stages - k + a) for k, a in enumerate(advance)]


def from_warm_ups(
    name: str,
    micro_batches: int,
    warm_ups: Sequence[int],
    replication: Sequence[int] | None = None,
    flush: bool = True,
) -> Schedule:
    """Make rows in which each replica of stage k runs ``warm_ups[k]`` forwards, then alternates B and F.

    Replica r of R has the micro-batches m with m % R = r. Without a flush the forwards continue into the next
    batch. Raises ValueError where that would deadlock; rows are made of loops, so there may be millions of
    actions.
    """
    counts = replication or [1] * len(warm_ups)
    build = _flushing_row if flush else _endless_row
    rows = tuple(
        build(k, warm_ups[k], range(r, micro_batches, replicas))
        for k, replicas in enumerate(counts)
        for r in range(replicas)
    )
    forwards = [min(w, micro_batches) for w in warm_ups] if flush else warm_ups
    falls = all(before >= after for before, after in pairwise(forwards))
    schedule = Schedule(name, micro_batches, rows, trusted=falls and max(counts) == 1)
    if max(counts) > 1:
        try:
            schedule.validate()
        except ScheduleError as error:
            raise ValueError(
                f"replication {list(counts)}: {error}: use another advance, or 'all-forward-all-backward'"
            ) from None
    return schedule


def _flushing_row(stage: int, warm_up: int, own: range) -> Row:
    """Make a row: ``warm_up`` forwards; one backward, one forward, in turn; the remaining backwards; the update."""
    step, warm_up = own.step, min(warm_up, len(own))
    rest = len(own) - warm_up

    def at(kind: Kind, n: int) -> Action:
        return Action(kind, own.start + n * step, stage)

    return Row(
        loops=(
            Loop((at(_F, 0),), warm_up, step),
            Loop((at(_B, 0), at(_F, warm_up)), rest, step),
            Loop((at(_B, rest),), warm_up, step),
            Loop((Action(_U, None, stage),)),
        )
    )


def _endless_row(stage: int, warm_up: int, own: range) -> Row:
    """Make a row of one backward, one forward, in turn, forwards ``warm_up`` ahead; an update ends each batch."""
    if not own:
        return Row([Action(_U, None, stage)])
    count = len(own)
    first = warm_up % count
    switch = count - first  # from here on the forwards are of one batch later

    def pair(n: int) -> tuple[Action, Action]:
        ahead, forward = divmod(warm_up + n, count)
        return Action(_B, own[n], stage), Action(_F, own[forward], stage, ahead)

    last, forward = pair(count - 1)
    return Row(
        loops=(
            Loop(pair(0), min(switch, count - 1), own.step),
            Loop(pair(switch) if first else (), max(0, first - 1), own.step),
            Loop((last, Action(_U, None, stage), forward)),
        )
    )


def all_forward_all_backward(asked: Asked) -> Schedule:
    return from_warm_ups(
        asked.name, asked.micro_batches, [asked.micro_batches] * asked.stages, asked.replication
    )


def one_f_one_b(asked: Asked) -> Schedule:
    return from_warm_ups(asked.name, asked.micro_batches, _least(asked), asked.replication)


def endless(asked: Asked) -> Schedule:
    forwards = _advanced(asked)
    return from_warm_ups(asked.name, asked.micro_batches, forwards, asked.replication, flush=False)


def advance_forward(asked: Asked) -> Schedule:
    forwards = _advanced(asked, most=asked.micro_batches)
    return from_warm_ups(asked.name, asked.micro_batches, forwards, asked.replication)


def _advanced(asked: Asked, most: float = math.inf) -> list[int]:
    """Return for each stage the forwards before the first backward, ``most`` at most."""
    ahead = list(asked.advance)
    forwards = [int(min(w + a, most)) for w, a in zip(_least(asked), ahead)]
    for k in range(1, asked.stages):
        # A stage's first backward needs all warm-ups of the next stage, and these need as many of the stage
        # itself.
        if max(asked.replication) == 1 and forwards[k] > forwards[k - 1]:
            raise ValueError(
                f"advance={ahead} would deadlock: stage {k} runs {forwards[k]} forwards before a backward, "
                f"stage {k - 1} sends it only {forwards[k - 1]}; "
                f"give stage {k} at most {ahead[k - 1] + 1}, one more than stage {k - 1}"
            )
    return forwards


def _least(asked: Asked) -> list[int]:
    """Return the micro-batches in flight on each replica of a stage that keep it and all later ones busy in 1F1B."""
    return [-(-sum(asked.replication[k:]) // own) for k, own in enumerate(asked.replication)]
