"""Our rows as values: the plan of each, what its stages cost, and how long the simulation says that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from avgpipe.bench.schedules.rows import Unavailable
from avgpipe.bench.schedules.settings import CHUNKS, SYSTEMS, ScheduleSettings
from avgpipe.plan import Plan
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.schedule import Schedule, build_schedule

_SEVERAL_STAGES = ("interleaved-1f1b", "zero-bubble-v")  # CHUNKS of them on each worker
_WHOLE_BATCHES = ("pipedream-2bw", "data-parallel")  # the other systems' batches are one micro-batch


@dataclass(frozen=True)
class OurCase:
    """A row: ``plan``, on all workers. ``per_batch``: how many of the plan's batches are one of the comparison, which
    has M micro-batches.
    """

    name: str
    plan: Plan
    per_batch: int = 1

    @property
    def pipelines(self) -> int:
        """Batches of the comparison that are under way at once, or as many more as make whole rounds of the plan's
        pipelines.
        """
        plan = self.plan
        under_way = plan.pipelines
        if plan.weights != "flush":  # as many as 1F1B over the batches needs to end the oldest
            under_way = 1 + -(-(plan.stages - 1) // plan.micro_batches)
        most = 1 + -(-(under_way - 1) // self.per_batch)
        while most * self.per_batch % plan.pipelines:
            most += 1
        return most


def our_cases(settings: ScheduleSettings) -> list[OurCase | Unavailable]:
    """Those that are asked for, in the order of the table."""
    return [_case(name, row, settings, n) for row in settings.rows for name, n in _named(row, settings)]


def _named(row: str, settings: ScheduleSettings) -> Iterator[tuple[str, int]]:
    """What a name of the settings stands for: rows of the table, and how many pipelines they have."""
    if row.startswith("torch-"):
        return
    if row == "advance-forward":
        yield from ((f"avgpipe {row}, N = {n}", n) for n in settings.pipelines)
    else:
        yield f"avgpipe {row}{f', {CHUNKS} a rank' if row in _SEVERAL_STAGES else ''}", 1


def _case(name: str, row: str, settings: ScheduleSettings, pipelines: int) -> OurCase | Unavailable:
    try:
        plan = _plan(row, settings, pipelines)
    except ValueError as error:
        return Unavailable(name, " ".join(str(error).split()))
    plan = replace(plan, partition=list(range(1, plan.stages)))  # a stage for each module
    return OurCase(name, plan, settings.micro_batches // plan.micro_batches)


def _plan(row: str, settings: ScheduleSettings, pipelines: int) -> Plan:
    workers, micro_batches = settings.stages, settings.micro_batches
    if row in SYSTEMS:
        given = {"micro_batches": micro_batches} if row in _WHOLE_BATCHES else {}
        return Plan.for_system(row, stages=workers, **given)
    stages = workers * (CHUNKS if row in _SEVERAL_STAGES else 1)
    return Plan(stages=stages, pipelines=pipelines, micro_batches=micro_batches, schedule=row)


def stage_costs(settings: ScheduleSettings, stages: int) -> tuple[float, float]:
    """Seconds of a forward and a backward of a stage where the model is cut into so many: all rows do the same work."""
    share = settings.stages / stages
    return settings.forward_s * share, settings.backward_s * share


def simulated_s(
    case: OurCase,
    settings: ScheduleSettings,
    line_bytes_per_s: float | None = None,
    actions: Mapping[str, Sequence[float]] | None = None,
) -> float:
    """Seconds per batch in the steady state. A limited line carries all that its worker sends, one tensor after
    another, at the rate measured, by default at the limit; without a limit transfers take nothing. Actions take what
    was measured, by default what was set, where updates and the host take nothing. Of replicas, each runs its share of
    the micro-batches, and the sum of gradients is not part of it.
    """
    plan = case.plan
    own = -(-plan.micro_batches // max(plan.replication or [1]))
    schedule = build_schedule(plan.schedule, plan.stages, own, plan.advance, plan.stages_per_worker)
    limited = settings.rate_bits_per_s is not None
    transfer_s = settings.transfer_s
    if limited and line_bytes_per_s is not None:
        transfer_s = settings.activation_bytes / line_bytes_per_s
    costs = replace(
        _as_set(settings, plan.stages) if actions is None else _as_measured(actions, plan.stages),
        transfer_s=transfer_s,
        shared_links=_lines(schedule) if limited else (),
    )
    return case.per_batch * steady_batch_s(schedule, costs, pipelines=plan.pipelines)


def _as_set(settings: ScheduleSettings, stages: int) -> Costs:
    forward_s, backward_s = stage_costs(settings, stages)
    # The first stage spends its backward on the weights alone.
    return Costs(forward_s, backward_s, input_backward_s=[0.0, *[backward_s / 2] * (stages - 1)])


def _as_measured(actions: Mapping[str, Sequence[float]], stages: int) -> Costs:
    update_s = actions.get("U", [0.0] * stages)
    if "B" in actions:
        return Costs(actions["F"], actions["B"], update_s=update_s)
    backward_s = [i + w for i, w in zip(actions["I"], actions["W"])]
    return Costs(actions["F"], backward_s, update_s=update_s, input_backward_s=actions["I"])


def _lines(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Per worker, all links by which its stages send."""
    last = schedule.stages - 1
    return [
        [(k, to) for k in stages for to in (k - 1, k + 1) if 0 <= to <= last and to not in stages]
        for stages in schedule.placement
    ]
