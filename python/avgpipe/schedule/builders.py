"""Builds the published schedules by name. A new one is a builder, and a row of the table of names at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from avgpipe.errors import ScheduleError, check_count, nearest
from avgpipe.schedule.row import Action, Kind, Loop, Row
from avgpipe.schedule.schedule import Schedule

Advance = int | Sequence[int] | str | None
_F, _B, _I, _W, _U = Kind


class Asked(NamedTuple):
    """What a schedule is built for: the arguments of :func:`build_schedule`, checked."""

    name: str
    micro_batches: int
    replication: tuple[int, ...]  # workers of each stage
    advance: tuple[int, ...]  # the a_k
    stages_per_worker: int

    @property
    def stages(self) -> int:
        return len(self.replication)


# ---- one stage on each worker --------------------------------------------------------------------------------------


def warm_ups(stages: int, micro_batches: int, advance: Sequence[int]) -> list[int]:
    """Per stage k, the forwards before the first backward: min(M, K - k + a_k), with ``advance`` the a_k."""
    return [min(micro_batches, stages - k + a) for k, a in enumerate(advance)]


def from_warm_ups(
    name: str,
    micro_batches: int,
    warm_ups: Sequence[int],
    replication: Sequence[int] | None = None,
    flush: bool = True,
) -> Schedule:
    """Each replica of stage k runs ``warm_ups[k]`` forwards, then one backward, one forward in turn.

    Replica r of R has the micro-batches m with m % R = r. Without a flush the forwards go on over the batches. Raises
    ValueError where that would deadlock; as rows are made of loops, there may be millions of actions.
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
    """Forwards first, ``warm_up`` of them; one backward, one forward, in turn; the remaining backwards; the update."""
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
    """One backward, one forward, in turn, the forwards ``warm_up`` micro-batches ahead; an update ends each batch."""
    if not own:
        return Row([Action(_U, None, stage)])
    count = len(own)
    first = warm_up % count
    switch = count - first  # from there on the forwards are of yet another batch

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


def _all_forward_all_backward(asked: Asked) -> Schedule:
    return from_warm_ups(
        asked.name, asked.micro_batches, [asked.micro_batches] * asked.stages, asked.replication
    )


def _one_f_one_b(asked: Asked) -> Schedule:
    return from_warm_ups(asked.name, asked.micro_batches, _least(asked), asked.replication)


def _endless(asked: Asked) -> Schedule:
    forwards = _advanced(asked)
    return from_warm_ups(asked.name, asked.micro_batches, forwards, asked.replication, flush=False)


def _advance_forward(asked: Asked) -> Schedule:
    forwards = _advanced(asked, most=asked.micro_batches)
    return from_warm_ups(asked.name, asked.micro_batches, forwards, asked.replication)


def _advanced(asked: Asked, most: float = math.inf) -> list[int]:
    """Per stage, the forwards before the first backward, ``most`` at most."""
    ahead = list(asked.advance)
    forwards = [int(min(w + a, most)) for w, a in zip(_least(asked), ahead)]
    for k in range(1, asked.stages):
        # A stage's first backward needs all warm-ups of the next stage, and these need as many of its own.
        if max(asked.replication) == 1 and forwards[k] > forwards[k - 1]:
            raise ValueError(
                f"advance={ahead} would deadlock: stage {k} runs {forwards[k]} forwards before a backward, "
                f"stage {k - 1} sends it only {forwards[k - 1]}; "
                f"give stage {k} at most {ahead[k - 1] + 1}, one more than stage {k - 1}"
            )
    return forwards


def _least(asked: Asked) -> list[int]:
    """Micro-batches in flight on each replica of a stage: as many as keep it and all behind it busy in 1F1B."""
    return [-(-sum(asked.replication[k:]) // own) for k, own in enumerate(asked.replication)]


def _advance_per_stage(advance: Advance, stages: int, published: int | None) -> tuple[int, ...]:
    """The a_k that ``advance`` of :func:`build_schedule` means. ``published``: on every stage; None: K-1-k."""
    advance = published if advance is None else advance
    if advance is None or advance == "auto":
        return tuple(range(stages - 1, -1, -1))
    each: tuple[Any, ...] = tuple(advance) if isinstance(advance, (list, tuple)) else (advance,) * stages
    if len(each) == stages and all(type(a) is int and a >= 0 for a in each):
        return each
    wrong = "" if len(each) == stages else f" has {len(each)} entries for {stages} stages"
    raise ValueError(
        f"advance={advance!r}{wrong}: pass None (K-1-k on stage k), 'auto' (the same until there are measurements), "
        "an int of at least 0 for all stages, or a list of one per stage"
    )


def _zero_bubble_h1(asked: Asked) -> Schedule:
    """1F1B in the memory of its first stage: K micro-batches in flight on every stage (Qi et al. 2024, section 2.2.1).

    Stage k needs only K-k of them for 1F1B; the other k are micro-batches whose W is put off until k more I have run.
    """
    count, rows = asked.micro_batches, []
    for k, warm_up in enumerate(range(asked.stages, 0, -1)):
        row = [Action(_F, m, k) for m in range(warm_up)]
        for m in range(count + k):
            late = [Action(_W, m - k, k)] if m >= k else []
            row += [Action(_I, m, k), *late, Action(_F, warm_up + m, k)]
        rows.append(_existing(row, count, [k]))
    return Schedule(asked.name, count, tuple(rows))


# ---- several stages on each worker -----------------------------------------------------------------------------------


def _interleaved_1f1b(asked: Asked) -> Schedule:
    """Worker w of W has the stages w, w+W, w+2W, ... (Narayanan et al. 2021, Megatron-LM, section 2.2).

    Groups of W micro-batches go through the worker's first stage, then through its second, and so on; backwards from
    the last stage to the first. Worker w begins with 2 (W-1-w) + (V-1) W + 1 forwards, V stages per worker, then
    alternates one backward, one forward. The published order is of whole groups: where the last one is smaller, the
    actions of the micro-batches that it lacks are left out, which nothing waits for.
    """
    per_worker = asked.stages_per_worker
    _check_multiple(asked, per_worker)
    workers = asked.stages // per_worker
    forwards = [
        (turn, m)
        for first in range(0, asked.micro_batches, workers)
        for turn in range(per_worker)
        for m in range(first, first + workers)
    ]
    rows = []
    for w in range(workers):
        own = list(range(w, asked.stages, workers))
        forward = [Action(_F, m, own[turn]) for turn, m in forwards]
        backward = [Action(_B, m, own[-1 - turn]) for turn, m in forwards]
        warm_up = 2 * (workers - 1 - w) + (per_worker - 1) * workers + 1
        pairs = zip_longest(backward, forward[warm_up:])
        row = [*forward[:warm_up], *(action for pair in pairs for action in pair if action)]
        rows.append(_existing(row, asked.micro_batches, own))
    return Schedule(asked.name, asked.micro_batches, tuple(rows))


def _zero_bubble_v(asked: Asked) -> Schedule:
    """Build the schedule of W workers in a V, where worker w has the stages w and 2W-1-w.

    ZB-V of Qi et al., NeurIPS 2024, "Pipeline Parallelism with Controllable Memory". At most 2W activations are held
    by a worker, of stages half as large as with one per worker: as much as by the first stage of 1F1B.
    """
    _check_multiple(asked, 2)
    workers = asked.stages // 2
    rows = tuple(_v_row(w, workers, asked.micro_batches) for w in range(workers))
    return Schedule(asked.name, asked.micro_batches, rows)


def _v_row(worker: int, workers: int, micro_batches: int) -> Row:
    """The phases, each some actions repeated; the n-th time of an action is of micro-batch n.

    The first phases fill the pipeline. With less than 2W-1 micro-batches they have too many actions: those of
    micro-batches that there are not are left out, which nothing waits for.
    """
    down, up = worker, 2 * workers - 1 - worker
    steady = max(0, micro_batches - workers)
    phases = [
        (2 * (workers - worker) - 1, [(down, _F)]),
        (worker, [(up, _F), (down, _F)]),
        (workers - worker, [(up, _F), (up, _I), (up, _W)]),
        (steady, [(down, _F), (down, _I), (down, _W), (up, _F), (up, _I), (up, _W)]),
        (worker, [(down, _I), (up, _I)]),
        (workers - worker, [(down, _I), (down, _W)]),
        (worker, [(up, _W)]),
        (worker, [(down, _W)]),
    ]
    times: Counter[tuple[int, Kind]] = Counter()
    row = []
    for repeats, actions in phases:
        for stage, kind in actions * repeats:
            row.append(Action(kind, times[stage, kind], stage))
            times[stage, kind] += 1
    return _existing(row, micro_batches, (down, up))


def _existing(actions: Iterable[Action], micro_batches: int, stages: Iterable[int]) -> Row:
    """The row of those actions whose micro-batch exists, and of the stages' updates."""
    row = [action for action in actions if (action.micro_batch or 0) < micro_batches]
    return Row([*row, *(Action(_U, None, k) for k in stages)])


def _check_multiple(asked: Asked, per_worker: int) -> None:
    if asked.stages % per_worker:
        raise ValueError(
            f"stages={asked.stages}: {asked.name} has {per_worker} stages on each worker, give a multiple of "
            f"{per_worker}, {max(1, asked.stages // per_worker) * per_worker} for example"
        )


# ---- by name ---------------------------------------------------------------------------------------------------------


WEIGHTS = ("flush", "stash", "vertical-sync", "double-buffer", "predicted")
"""Which version of the weights a batch runs on, see ``Plan.weights``."""

RECOMPUTE = ("never", "except-last", "always")
"""Which micro-batches run their forward again, see ``Plan.recompute``."""


class Published(NamedTuple):
    """A row of the table of schedules.

    Attributes:
        name: Its name.
        build: Its builder.
        weights: The weight versions that it was published with, see ``Plan.weights``.
        takes: The options of :func:`build_schedule` that it takes beside stages and micro_batches.
        alias: Another name for it.
        advance: Of every stage where none is given; None: K-1-k of stage k.
    """

    name: str
    build: Callable[[Asked], Schedule]
    weights: str = "flush"
    takes: tuple[str, ...] = ()
    alias: str = ""
    advance: int | None = None


_SCHEDULES = (
    Published("all-forward-all-backward", _all_forward_all_backward, takes=("replication",), alias="gpipe"),
    Published("1f1b", _one_f_one_b, takes=("replication",), alias="dapple"),
    Published("advance-forward", _advance_forward, takes=("replication", "advance")),
    Published("pipedream", _endless, "stash", takes=("replication", "advance"), advance=0),
    Published("pipedream-2bw", _endless, "double-buffer", takes=("replication", "advance"), advance=0),
    Published("interleaved-1f1b", _interleaved_1f1b, takes=("stages_per_worker",)),
    Published("zero-bubble-h1", _zero_bubble_h1),
    Published("zero-bubble-v", _zero_bubble_v),
)


def schedule_names() -> list[str]:
    """The names that :func:`build_schedule` knows, without the aliases "gpipe" and "dapple"."""
    return [row.name for row in _SCHEDULES]


def published(name: str) -> Published:
    """The row of a schedule in the table; ValueError for an unknown name."""
    rows = {row.name: row for row in _SCHEDULES} | {row.alias: row for row in _SCHEDULES if row.alias}
    if name not in rows:
        raise ValueError(f"unknown schedule {name!r}: {nearest(str(name), list(rows))}")
    return rows[name]


def checked_replication(replication: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    """The workers of each stage, one where that is left open."""
    if replication is None:
        return (1,) * stages
    if (
        not isinstance(replication, (list, tuple))
        or len(replication) != stages
        or not all(type(r) is int and r >= 1 for r in replication)
    ):
        raise ValueError(
            f"replication={replication!r}: must be a list of {stages} numbers of at least 1, one for each stage"
        )
    return tuple(replication)


def build_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    advance: Advance = None,
    stages_per_worker: int | None = None,
    replication: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of batches of ``micro_batches`` on ``stages`` stages.

    - "all-forward-all-backward", alias "gpipe" (Huang et al. 2019): every forward, then every backward.
    - "1f1b", alias "dapple" (Fan et al. 2021): stage k runs K-k forwards, then alternates one backward, one
      forward.
    - "advance-forward" (Chen et al. 2023): as 1f1b, with ``advance`` more forwards in front: an int for every
      stage or a list with one int per stage; None means K-1-k on stage k, which makes 7, 5, 3, 1 forwards on
      4 stages. "auto" is for :func:`avgpipe.planning.choose_advance` to replace by what measurements say; here,
      without any, it means the same as None.
    - "pipedream" (Narayanan et al. 2019) and "pipedream-2bw" (Narayanan et al. 2021): 1f1b that goes on over batches
      without a flush. They differ in their weight versions, which are no part of a schedule. ``advance``, 0 here where
      it is None, puts forwards in front as above, which hides transfers and makes gradients older.
    - "interleaved-1f1b" (Narayanan et al. 2021, Megatron-LM): ``stages_per_worker`` stages on each worker, None: 2.
    - "zero-bubble-h1" (Qi et al. 2024): as 1f1b, with backwards split and their weights part put off.
    - "zero-bubble-v" (Qi et al., NeurIPS 2024): the same with 2 stages on each worker, which turn back in a V.

    ``replication`` gives stages several workers each, in schedules that run forwards and whole backwards of one stage
    on a worker: micro-batch m goes to number m % R of them (PipeDream: Narayanan et al. 2019, section 3.2; DAPPLE: Fan
    et al. 2021). ``advance`` then counts each replica's own micro-batches.

    Raises ValueError for an unknown name, counts that are not ints of at least 1, an option that the schedule does not
    take, stages that do not divide over the workers, and an advance that would deadlock, where a stage wants to start
    more forwards than the one before sends.
    """
    row = published(name)
    check_count("stages", stages)
    check_count("micro_batches", micro_batches)
    given = {"advance": advance, "stages_per_worker": stages_per_worker, "replication": replication}
    for option, value in given.items():
        if value is not None and option not in row.takes:
            takers = [repr(other.name) for other in _SCHEDULES if option in other.takes]
            raise ValueError(
                f"{option}={value!r}: {row.name} takes none, leave it out or choose {' or '.join(takers)}"
            )
    if stages_per_worker is not None and (type(stages_per_worker) is not int or stages_per_worker < 2):
        raise ValueError(
            f"stages_per_worker={stages_per_worker!r}: must be an int of at least 2; '1f1b' has 1 stage per worker"
        )
    workers = checked_replication(replication, stages)
    ahead = _advance_per_stage(advance, stages, row.advance)
    return _built(row.build, Asked(row.name, micro_batches, workers, ahead, stages_per_worker or 2))


@lru_cache(maxsize=128)  # to check the rows of one that many plans have takes longest
def _built(build: Callable[[Asked], Schedule], asked: Asked) -> Schedule:
    return build(asked)
