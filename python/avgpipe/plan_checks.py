"""Checks of options that few plans have: versions of weights, corrections, replicas of stages, isolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from avgpipe.errors import check_name
from avgpipe.rules import CORRECTIONS
from avgpipe.schedule import WEIGHTS, Schedule


class CheckedOptions(Protocol):
    """The options of a Plan that are checked here, which is below it: a Plan imports this module, not the reverse."""

    @property
    def stages(self) -> int: ...
    @property
    def pipelines(self) -> int: ...
    @property
    def shares(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def advance(self) -> int | Sequence[int] | str | None: ...
    @property
    def weights(self) -> str | None: ...
    @property
    def correction(self) -> str | None: ...
    @property
    def replication(self) -> Sequence[int] | None: ...
    @property
    def spread(self) -> bool: ...
    @property
    def isolate(self) -> bool: ...
    @property
    def staleness(self) -> int | str: ...


def check(plan: CheckedOptions, schedule: Schedule) -> bool:
    """Raise ValueError for options that do not fit each other; return whether the weights are predicted."""
    _check_weights(plan, schedule)
    _check_correction(plan)
    if plan.replication is not None:
        _check_replication(plan, schedule, plan.replication)
    if plan.isolate:
        _check_isolation(plan)
    return plan.weights == "predicted"


def _check_weights(plan: CheckedOptions, schedule: Schedule) -> None:
    check_name("weights", plan.weights, WEIGHTS)
    if schedule.flush != (plan.weights == "flush"):
        fitting = "'flush'" if schedule.flush else f"one of {', '.join(map(repr, WEIGHTS[1:]))}"
        raise ValueError(
            f"weights {plan.weights!r} with schedule {plan.schedule!r}, which "
            f"{'flushes' if schedule.flush else 'does not flush'}: give weights {fitting}"
        )
    if plan.weights != "flush" and plan.pipelines > 1:
        raise ValueError(
            f"weights {plan.weights!r} is for one pipeline, not {plan.pipelines}: several pipelines already have "
            "several batches in flight, use one pipeline or a schedule that flushes"
        )
    if plan.weights == "double-buffer" and plan.micro_batches < plan.stages:
        raise ValueError(
            f"weights 'double-buffer' needs at least as many micro-batches as stages: {plan.micro_batches} are "
            f"fewer than {plan.stages}, and two versions would not be enough"
        )
    if plan.weights == "double-buffer" and schedule.lookahead > 1:
        raise ValueError(
            f"micro_batches {plan.micro_batches} with schedule {plan.schedule!r} and replication "
            f"{plan.replication}: a batch would have to begin before the version of the weights that it runs on "
            "is made, use more micro-batches"
        )
    if plan.advance == "auto" and not schedule.flush:
        raise ValueError(
            f"advance 'auto' is for schedules that flush, not for {plan.schedule!r}, whose gradients it makes "
            "older: give numbers"
        )


def _check_correction(plan: CheckedOptions) -> None:
    if plan.correction is not None:
        check_name("correction", plan.correction, tuple(CORRECTIONS))
    if plan.weights == "flush" and plan.correction is not None:
        raise ValueError(
            f"correction {plan.correction!r} with schedule {plan.schedule!r}, whose gradients are of the newest "
            "weights: leave it out, or use a schedule without a flush, such as 'pipedream-2bw'"
        )
    if plan.weights == "predicted" and plan.correction not in (None, "predicted"):
        raise ValueError(
            f"weights 'predicted' with correction {plan.correction!r}: give weights 'stash', or leave the "
            "correction out"
        )


def _check_replication(plan: CheckedOptions, schedule: Schedule, replication: Sequence[int]) -> None:
    least = max(replication) * plan.shares
    if least > plan.micro_batches:
        raise ValueError(
            f"replication {replication} with micro_batches {plan.micro_batches}: some replicas would have nothing "
            f"to do, use at least {least} micro-batches"
        )
    if plan.weights == "vertical-sync" or plan.advance == "auto":
        what = "weights 'vertical-sync'" if plan.weights == "vertical-sync" else "advance 'auto'"
        raise ValueError(f"{what} is for stages without replicas: leave out replication {replication}")
    uneven = [r for r in replication if plan.micro_batches % r]
    if uneven and not schedule.flush:
        raise ValueError(
            f"micro_batches {plan.micro_batches} with replication {replication}: without a flush all replicas need "
            f"as many, use a multiple of {uneven[0]}"
        )


def _check_isolation(plan: CheckedOptions) -> None:
    if not isinstance(plan.isolate, bool):
        raise ValueError(f"isolate must be True or False, not {plan.isolate!r}")
    if plan.pipelines == 1:
        raise ValueError(
            "isolate=True with pipelines=1: there is no other pipeline that could go on, use at least two"
        )
    if plan.spread:
        raise ValueError(
            "isolate=True with spread=True: use one of the two, isolated pipelines have processes of their own"
        )
    if plan.staleness == "asynchronous":
        raise ValueError("isolate=True cannot have staleness 'asynchronous': use 0 or 1")
