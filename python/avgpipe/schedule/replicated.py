"""1F1B and its relatives where stages have replicas: micro-batches go round robin over those of each stage.

PipeDream (Narayanan et al. 2019, section 3.2) and DAPPLE (Fan et al. 2021) replicate stages so.
"""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe.schedule.action import Action
from avgpipe.schedule.builders import advance_per_stage, canonical_name
from avgpipe.schedule.stream import one_batch

Columns = tuple[tuple[Action, ...], ...]


def warm_up(replication: Sequence[int], stage: int) -> int:
    """Micro-batches in flight on each replica of a stage: as many as keep it and all behind it busy in 1F1B."""
    return -(-sum(replication[stage:]) // replication[stage])


def replicated_warm_ups(
    name: str, replication: Sequence[int], micro_batches: int, advance: int | Sequence[int] | str | None
) -> list[int]:
    """The warm-up of each stage's replicas under a schedule; ``advance`` counts each replica's own micro-batches.

    ValueError for a schedule that has none with replicas.
    """
    name, stages = canonical_name(name), len(replication)
    if name == "all-forward-all-backward":
        return [micro_batches] * stages
    least = [warm_up(replication, k) for k in range(stages)]
    if name == "advance-forward":
        return [w + a for w, a in zip(least, advance_per_stage(advance, stages))]
    if name in ("1f1b", "pipedream", "pipedream-2bw"):
        return least
    raise ValueError(
        f"schedule {name!r} is for stages without replicas: use '1f1b' or another one of its kind"
    )


def replicated_columns(warm_ups: Sequence[int], replication: Sequence[int], micro_batches: int) -> Columns:
    """The columns of all replicas, stage after stage, for warm-ups of each stage's replicas.

    Stage k's replica r runs the micro-batches m with m % R_k = r, in order. Raises ValueError where that would
    deadlock.
    """
    columns = []
    for stage, replicas in enumerate(replication):
        for r in range(replicas):
            own = range(r, micro_batches, replicas)
            actions = one_batch(warm_ups[stage], len(own)) if own else (Action("U"),)
            columns.append(
                tuple(a if a.micro_batch is None else Action(a.kind, own[a.micro_batch]) for a in actions)
            )
    _check(columns, replication)
    return tuple(columns)


def _check(columns: Sequence[tuple[Action, ...]], replication: Sequence[int]) -> None:
    """Run all columns on paper; ValueError for one that does not come to its end."""
    seats = [(k, r) for k, replicas in enumerate(replication) for r in range(replicas)]
    done: set[tuple[str, int, int | None]] = set()
    cursors = [0] * len(columns)
    moved = True
    while moved:
        moved = False
        for seat, column in enumerate(columns):
            stage = seats[seat][0]
            while cursors[seat] < len(column):
                action = column[cursors[seat]]
                before = {"F": stage - 1, "B": stage + 1}.get(action.kind, -1)
                if 0 <= before < len(replication) and (action.kind, before, action.micro_batch) not in done:
                    break
                done.add((action.kind, stage, action.micro_batch))
                cursors[seat] += 1
                moved = True
    for seat, column in enumerate(columns):
        if cursors[seat] < len(column):
            stage, r = seats[seat]
            raise ValueError(
                f"replication {list(replication)}: stage {stage}, replica {r} would wait for ever before "
                f"{column[cursors[seat]]}: use another advance, or 'all-forward-all-backward'"
            )
