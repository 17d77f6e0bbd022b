"""Builds the published schedules from each stage's number of forwards before its first backward."""

from __future__ import annotations

from collections.abc import Sequence

from avgpipe.errors import nearest
from avgpipe.schedule.action import Action
from avgpipe.schedule.schedule import Schedule

_NAMES = ("all-forward-all-backward", "1f1b", "advance-forward")
_ALIASES = {"gpipe": "all-forward-all-backward", "dapple": "1f1b"}


def schedule_names() -> list[str]:
    """The names that :func:`build_schedule` knows, without the aliases "gpipe" and "dapple"."""
    return list(_NAMES)


def build_schedule(
    name: str, stages: int, micro_batches: int, advance: int | Sequence[int] | str | None = None
) -> Schedule:
    """The schedule of one batch of ``micro_batches`` on ``stages`` stages.

    - "all-forward-all-backward", alias "gpipe" (Huang et al. 2019): every forward, then every backward.
    - "1f1b", alias "dapple" (Fan et al. 2021): stage k runs K-k forwards, then alternates one backward, one
      forward.
    - "advance-forward" (Chen et al. 2023): as 1f1b, with ``advance`` more forwards in front: an int for every
      stage or a list with one int per stage; None means K-1-k on stage k, which makes 7, 5, 3, 1 forwards on
      4 stages. "auto" is for :func:`avgpipe.simulation.choose_advance` to replace by what measurements say; here,
      without any, it means the same as None.

    Raises ValueError for an unknown name, counts that are not ints of at least 1, an advance that the
    schedule does not take, and an advance that would deadlock, where a stage wants to start more forwards
    than the one before sends.
    """
    canonical = _ALIASES.get(name, name)
    if canonical not in _NAMES:
        raise ValueError(f"unknown schedule {name!r}: {nearest(str(name), [*_NAMES, *_ALIASES])}")
    _check_count("stages", stages)
    _check_count("micro_batches", micro_batches)
    if advance is not None and canonical != "advance-forward":
        raise ValueError(
            f"advance={advance!r}: {canonical} takes none, leave it out or choose 'advance-forward'"
        )
    if canonical == "all-forward-all-backward":
        forwards = [micro_batches] * stages
    else:
        ahead = _advance_per_stage(advance, stages) if canonical == "advance-forward" else [0] * stages
        forwards = warm_ups(stages, micro_batches, ahead)
        _check_reachable(forwards, ahead)
    return Schedule(canonical, micro_batches, tuple(_column(w, micro_batches) for w in forwards))


def warm_ups(stages: int, micro_batches: int, advance: Sequence[int]) -> list[int]:
    """Per stage k, the forwards before the first backward: min(M, K - k + a_k), with ``advance`` the a_k."""
    return [min(micro_batches, stages - k + a) for k, a in enumerate(advance)]


def _column(warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    """Warm-up forwards; one backward, one forward, in turn; the remaining backwards; the update."""
    actions = [Action("F", m) for m in range(warm_up)]
    for m in range(micro_batches):
        actions.append(Action("B", m))
        if warm_up + m < micro_batches:
            actions.append(Action("F", warm_up + m))
    return (*actions, Action("U"))


def _check_count(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what}={value!r}: must be an int of at least 1")


def _advance_per_stage(advance: int | Sequence[int] | str | None, stages: int) -> list[int]:
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
