"""Build the published schedules by name. A further schedule is a builder, and a row of the table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from avgpipe.errors import check_count, nearest
from avgpipe.schedule.one_stage import Asked
from avgpipe.schedule.schedule import Schedule

MOST_WORKERS, MOST = 2**12, 2**20
"""The most workers of a pipeline; and the most micro-batches, pipelines, and forwards in advance."""

Advance = int | Sequence[int] | str | None

WEIGHTS = ("flush", "stash", "vertical-sync", "double-buffer", "predicted")
"""The version of the weights that a batch runs on, see ``Plan.weights``."""

RECOMPUTE = ("never", "except-last", "always")
"""The micro-batches that run their forward again, see ``Plan.recompute``."""


class PublishedSchedule(NamedTuple):
    """A row of the table of schedules.

    Attributes:
        name: Name of the schedule.
        build: Builder of the schedule: a module of this package and a function.
        weights: Weight versions that the schedule was published with, see ``Plan.weights``.
        takes: Options of :func:`build_schedule` besides stages and micro_batches.
        alias: Another name of the schedule.
        advance: Default advance of every stage; None: K-1-k of stage k.
    """

    name: str
    build: str
    weights: str = "flush"
    takes: tuple[str, ...] = ()
    alias: str = ""
    advance: int | None = None


_SCHEDULES = (
    PublishedSchedule(
        "all-forward-all-backward",
        "one_stage:all_forward_all_backward",
        takes=("replication",),
        alias="gpipe",
    ),
    PublishedSchedule("1f1b", "one_stage:one_f_one_b", takes=("replication",), alias="dapple"),
    PublishedSchedule("advance-forward", "one_stage:advance_forward", takes=("replication", "advance")),
    PublishedSchedule("pipedream", "one_stage:endless", "stash", takes=("replication", "advance"), advance=0),
    PublishedSchedule(
        "pipedream-2bw", "one_stage:endless", "double-buffer", takes=("replication", "advance"), advance=0
    ),
    PublishedSchedule("interleaved-1f1b", "several_stages:interleaved_1f1b", takes=("stages_per_worker",)),
    PublishedSchedule("looped-bfs", "several_stages:looped_bfs", takes=("stages_per_worker",)),
    PublishedSchedule("zero-bubble-h1", "several_stages:zero_bubble_h1"),
    PublishedSchedule(
        "interleaved-zero-bubble", "several_stages:interleaved_zero_bubble", takes=("stages_per_worker",)
    ),
    PublishedSchedule("zero-bubble-v", "several_stages:zero_bubble_v"),
    PublishedSchedule("dualpipe-v", "several_stages:dualpipe_v"),
)


def schedule_names() -> list[str]:
    """Return the names that :func:`build_schedule` knows, without the aliases "gpipe" and "dapple"."""
    return [row.name for row in _SCHEDULES]


def published(name: str) -> PublishedSchedule:
    """Return the row of a schedule in the table; ValueError for an unknown name."""
    rows = {row.name: row for row in _SCHEDULES} | {row.alias: row for row in _SCHEDULES if row.alias}
    if name not in rows:
        raise ValueError(f"unknown schedule {name!r}: {nearest(str(name), list(rows))}")
    return rows[name]


def checked_replication(replication: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    """Return the workers of each stage, by default one."""
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
    """Build the schedule of batches of ``micro_batches`` on ``stages`` stages.

    - "all-forward-all-backward", alias "gpipe" (Huang et al. 2019): every forward, then every backward.
    - "1f1b", alias "dapple" (Fan et al. 2021): stage k runs K-k forwards, then alternates one backward, one
      forward.
    - "advance-forward" (Chen et al. 2023): as 1f1b, with ``advance`` more forwards in front: an int for every
      stage or a list with one int per stage; None means K-1-k on stage k, which makes 7, 5, 3, 1 forwards on
      4 stages. "auto" is replaced by :func:`avgpipe.planning.choose_advance` from measurements; here, without
      any, it means the same as None.
    - "pipedream" (Narayanan et al. 2019) and "pipedream-2bw" (Narayanan et al. 2021): 1f1b that continues
      across batches without a flush. They differ in their weight versions, which are not part of a schedule.
      ``advance``, here 0 by default, puts forwards in front as above, which hides transfers and makes
      gradients older.
    - "interleaved-1f1b" (Narayanan et al. 2021, Megatron-LM): ``stages_per_worker`` stages on each worker, None: 2.
    - "looped-bfs" (Lamy-Poirier 2022): as many stages on each worker, and all micro-batches go through one of
      them before the next. Backwards return the same way, the last micro-batch first.
    - "zero-bubble-h1" (Qi et al. 2024): as 1f1b, with split backwards and delayed weight parts.
    - "interleaved-zero-bubble": zero-bubble-h1 with ``stages_per_worker`` stages on each worker, None: 2.
    - "zero-bubble-v" (Qi et al., NeurIPS 2024): the same with 2 stages on each worker, which turn back in a V.
    - "dualpipe-v" (DeepSeek): the V again; forwards of one stage and backwards of the other alternate, and
      backwards are split only while the pipeline fills and empties. DualPipeV runs each forward and backward
      of such a pair at the same time; here, the backward follows the forward. It is designed for at least as
      many micro-batches as stages; with fewer, workers are idle for longer.

    Any number of micro-batches can be run. "interleaved-1f1b" and "interleaved-zero-bubble" are least idle
    with a multiple of the number of workers.

    ``replication`` gives stages several workers each, in schedules that run forwards and whole backwards of
    one stage on a worker: micro-batch m is for number m % R of them (PipeDream: Narayanan et al. 2019,
    section 3.2; DAPPLE: Fan et al. 2021). ``advance`` then counts each replica's own micro-batches.

    Raises ValueError for an unknown name, counts that are not ints of at least 1, an option that the schedule
    does not have, a number of stages that cannot be divided among the workers, and an advance that would
    deadlock, where a stage wants to start more forwards than the stage before sends.
    """
    row = published(name)
    check_count("stages", stages, most=MOST)
    check_count("micro_batches", micro_batches, most=MOST)
    _check_taken(
        row, {"advance": advance, "stages_per_worker": stages_per_worker, "replication": replication}
    )
    if stages_per_worker is not None and (type(stages_per_worker) is not int or stages_per_worker < 2):
        raise ValueError(
            f"stages_per_worker={stages_per_worker!r}: must be an int of at least 2; '1f1b' has 1 stage per worker"
        )
    workers = checked_replication(replication, stages)
    ahead = _advance_per_stage(advance, stages, row.advance)
    module, _, function = row.build.partition(":")
    build = getattr(import_module(f"avgpipe.schedule.{module}"), function)
    return _built(build, Asked(row.name, micro_batches, workers, ahead, stages_per_worker or 2))


def _check_taken(row: PublishedSchedule, given: Mapping[str, Any]) -> None:
    """Refuse options that a schedule does not have."""
    for option, value in given.items():
        if value is not None and option not in row.takes:
            takers = [repr(other.name) for other in _SCHEDULES if option in other.takes]
            raise ValueError(
                f"{option}={value!r}: {row.name} takes none, leave it out or choose {' or '.join(takers)}"
            )


@lru_cache(maxsize=128)  # checking the rows takes long, and many plans have the same schedule
def _built(build: Callable[[Asked], Schedule], asked: Asked) -> Schedule:
    check_count("workers", workers := sum(asked.replication), most=MOST_WORKERS)
    if workers * asked.micro_batches > 8 * MOST:
        raise ValueError(
            f"{workers} workers with micro_batches={asked.micro_batches}: the product must be at most {8 * MOST}"
        )
    return build(asked)


def _advance_per_stage(advance: Advance, stages: int, published: int | None) -> tuple[int, ...]:
    """Return the a_k of ``advance``, see :func:`build_schedule`; ``published``: default; None: K-1-k."""
    advance = published if advance is None else advance
    if advance is None or advance == "auto":
        return tuple(range(stages - 1, -1, -1))
    each: tuple[Any, ...] = tuple(advance) if isinstance(advance, (list, tuple)) else (advance,) * stages
    if len(each) == stages and all(type(a) is int and 0 <= a <= MOST for a in each):
        return each
    wrong = "" if len(each) == stages else f" has {len(each)} entries for {stages} stages"
    raise ValueError(
        f"advance={advance!r}{wrong}: pass None (K-1-k on stage k), 'auto' (the same until there are measurements), "
        f"an int of 0 to {MOST} for all stages, or a list of one per stage"
    )
