"""Builds the published schedules by name; those of one stage per worker that need no module of their own."""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe.errors import nearest
from avgpipe.schedule.interleaved import interleaved_1f1b
from avgpipe.schedule.schedule import Schedule
from avgpipe.schedule.zero_bubble import zero_bubble_h1, zero_bubble_v

_NAMES = (
    "all-forward-all-backward",
    "1f1b",
    "advance-forward",
    "pipedream",
    "pipedream-2bw",
    "interleaved-1f1b",
    "zero-bubble-h1",
    "zero-bubble-v",
)
_ALIASES = {"gpipe": "all-forward-all-backward", "dapple": "1f1b"}
_NO_FLUSH = ("pipedream", "pipedream-2bw")


def schedule_names() -> list[str]:
    """The names that :func:`build_schedule` knows, without the aliases "gpipe" and "dapple"."""
    return list(_NAMES)


def build_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    advance: int | Sequence[int] | str | None = None,
    stages_per_worker: int | None = None,
) -> Schedule:
    """The schedule of one batch of ``micro_batches`` on ``stages`` stages.

    - "all-forward-all-backward", alias "gpipe" (Huang et al. 2019): every forward, then every backward.
    - "1f1b", alias "dapple" (Fan et al. 2021): stage k runs K-k forwards, then alternates one backward, one
      forward.
    - "advance-forward" (Chen et al. 2023): as 1f1b, with ``advance`` more forwards in front: an int for every
      stage or a list with one int per stage; None means K-1-k on stage k, which makes 7, 5, 3, 1 forwards on
      4 stages. "auto" is for :func:`avgpipe.planning.choose_advance` to replace by what measurements say; here,
      without any, it means the same as None.
    - "pipedream" (Narayanan et al. 2019) and "pipedream-2bw" (Narayanan et al. 2021): 1f1b that goes on over batches
      without a flush. They differ in their weight versions, which are no part of a schedule.
    - "interleaved-1f1b" (Narayanan et al. 2021, Megatron-LM): ``stages_per_worker`` stages on each worker, None: 2.
    - "zero-bubble-h1" (Qi et al. 2024): as 1f1b, with backwards split and their weights part put off.
    - "zero-bubble-v" (Qi et al., NeurIPS 2024): the same with 2 stages on each worker, which turn back in a V.

    Raises ValueError for an unknown name, counts that are not ints of at least 1, an advance or stages_per_worker that
    the schedule does not take, stages that do not divide over the workers, and an advance that would deadlock, where
    a stage wants to start more forwards than the one before sends.
    """
    canonical = canonical_name(name)
    _check_count("stages", stages)
    _check_count("micro_batches", micro_batches)
    _check_taken("advance", advance, canonical, "advance-forward")
    _check_taken("stages_per_worker", stages_per_worker, canonical, "interleaved-1f1b")
    if canonical == "zero-bubble-h1":
        return zero_bubble_h1(canonical, stages, micro_batches)
    if canonical == "zero-bubble-v":
        _check_multiple(canonical, stages, 2)
        return zero_bubble_v(canonical, stages, micro_batches)
    if canonical == "interleaved-1f1b":
        per_worker = 2 if stages_per_worker is None else _per_worker(stages_per_worker)
        _check_multiple(canonical, stages, per_worker)
        return interleaved_1f1b(canonical, stages, micro_batches, per_worker)
    if canonical == "all-forward-all-backward":
        forwards = [micro_batches] * stages
    else:
        ahead = advance_per_stage(advance, stages) if canonical == "advance-forward" else [0] * stages
        forwards = warm_ups(stages, micro_batches, ahead)
        _check_reachable(forwards, ahead)
    return Schedule.from_warm_ups(canonical, micro_batches, forwards, flush=canonical not in _NO_FLUSH)


def canonical_name(name: str) -> str:
    """Without aliases; ValueError for an unknown name."""
    canonical = _ALIASES.get(name, name)
    if canonical not in _NAMES:
        raise ValueError(f"unknown schedule {name!r}: {nearest(str(name), [*_NAMES, *_ALIASES])}")
    return canonical


def warm_ups(stages: int, micro_batches: int, advance: Sequence[int]) -> list[int]:
    """Per stage k, the forwards before the first backward: min(M, K - k + a_k), with ``advance`` the a_k."""
    return [min(micro_batches, stages - k + a) for k, a in enumerate(advance)]


def _check_count(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what}={value!r}: must be an int of at least 1")


def _check_taken(what: str, value: object, name: str, taker: str) -> None:
    if value is not None and name != taker:
        raise ValueError(f"{what}={value!r}: {name} takes none, leave it out or choose {taker!r}")


def _per_worker(value: int) -> int:
    if type(value) is not int or value < 2:
        raise ValueError(
            f"stages_per_worker={value!r}: must be an int of at least 2; '1f1b' has 1 stage per worker"
        )
    return value


def _check_multiple(name: str, stages: int, per_worker: int) -> None:
    if stages % per_worker:
        raise ValueError(
            f"stages={stages}: {name} has {per_worker} stages on each worker, give a multiple of {per_worker}, "
            f"{max(1, stages // per_worker) * per_worker} for example"
        )


def advance_per_stage(advance: int | Sequence[int] | str | None, stages: int) -> list[int]:
    """The a_k that ``advance`` of :func:`build_schedule` means."""
    wanted = (
        "pass None (K-1-k on stage k), 'auto' (the same until there are measurements), an int of at least 0 for all "
        "stages, or a list of one per stage"
    )
    if advance is None or (isinstance(advance, str) and advance == "auto"):
        return [stages - 1 - k for k in range(stages)]
    if isinstance(advance, int):
        per_stage = [advance] * stages
    elif isinstance(advance, (list, tuple)):
        per_stage = list(advance)
    else:
        raise ValueError(f"advance={advance!r}: {wanted}")
    if len(per_stage) != stages:
        raise ValueError(f"advance={advance!r} has {len(per_stage)} entries for {stages} stages: {wanted}")
    for k, a in enumerate(per_stage):
        if type(a) is not int or a < 0:
            raise ValueError(f"advance={advance!r} is {a!r} on stage {k}: {wanted}")
    return per_stage


def _check_reachable(forwards: list[int], advance: list[int]) -> None:
    """A stage's first backward needs all warm-ups of the next stage, and these need as many of its own."""
    for k in range(1, len(forwards)):
        if forwards[k] > forwards[k - 1]:
            raise ValueError(
                f"advance={advance} would deadlock: stage {k} runs {forwards[k]} forwards before a backward, "
                f"stage {k - 1} sends it only {forwards[k - 1]}; "
                f"give stage {k} at most {advance[k - 1] + 1}, one more than stage {k - 1}"
            )
