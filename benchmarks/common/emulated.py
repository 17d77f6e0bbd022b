"""The emulated cluster: `avgpipe bench schedules` with a limited line between workers, and more of what it means.

Every row runs in the same processes, in turn. A row at which they fail is left out, and the others begin anew.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PipelineError
from avgpipe.planning import Costs, steady_batch_s
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.schedule.row import ACTIONS, EventKind
from avgpipe.timeline.timeline import Timeline, occupations
from avgpipe_lab.bench.namespaces import check_namespaces, network
from avgpipe_lab.bench.schedules import precise_sleeps
from benchmarks.common.rows import Unavailable, measure_rows
from benchmarks.common.schedules import PlanCase, ScheduleSettings, build, our_cases, timed

_PROBE_BYTES, _PROBES = 16 * 2**20, 4
_WORKER = f"{__name__}:worker"
_MOST_FAILURES = 5  # rows, after which something else must be wrong
_HOST = (EventKind.SEND, EventKind.HOST, EventKind.AVERAGE)


@dataclass(frozen=True)
class EmulatedSettings(ScheduleSettings):
    """rate_bits_per_s: of each worker's line in each direction; None: the machine's own loopback."""

    rate_bits_per_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_bits_per_s is not None:
            if self.link == "shm":
                raise ValueError("link shm with a rate: shared memory passes no limited line; use gloo")
            object.__setattr__(self, "link", "gloo")  # what would be chosen between hosts

    @property
    def transfer_s(self) -> float:
        """Of an activation, or its gradient, on a line."""
        return 0.0 if self.rate_bits_per_s is None else 8 * self.activation_bytes / self.rate_bits_per_s

    @property
    def budget_s(self) -> float:
        fill_s = 2 * (self.stages - 1) * self.transfer_s
        batch_s = 2 * self.link_s(self.transfer_s) + fill_s
        return super().budget_s + 6 * 20 * (self.rounds + 1) * (self.batches + 5) * batch_s

    def link_s(self, transfer_s: float) -> float:
        """What the busiest worker sends in a batch: an inner one's activations and gradients share its line."""
        return self.micro_batches * transfer_s * min(self.stages - 1, 2)

    def bounds(self, measured_bytes_per_s: float | None) -> list[dict[str, Any]]:
        """What no schedule can beat; measured: what a plain transfer reached, if one was made."""
        found = {
            "no bubble: M (t_f + t_b)": self.no_bubble_s,
            "flush: (M+K-1) (t_f + t_b)": self.flush_s,
        }
        if self.rate_bits_per_s is not None:
            fill_s = 2 * (self.stages - 1) * self.transfer_s
            found["flush and transfers: + 2 (K-1) t"] = self.flush_s + fill_s
            found["link time at line rate"] = self.link_s(self.transfer_s)
        if measured_bytes_per_s is not None:
            found["link time as measured"] = self.link_s(self.activation_bytes / measured_bytes_per_s)
        return [{"name": name, "seconds": seconds} for name, seconds in found.items()]


def check(settings: EmulatedSettings) -> None:
    """ValueError for what this machine or this user cannot do."""
    if settings.rate_bits_per_s is not None:
        check_namespaces("a limited line")


def run(settings: EmulatedSettings, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Start the workers and measure; the result as one JSON object.

    PipelineError when workers fail outside of rows or at too many of them, or namespaces cannot be made.
    """
    rate = settings.rate_bits_per_s
    hosts = nullcontext() if rate is None else network(settings.stages, rate)
    failed: list[Unavailable] = []
    with hosts as net:
        while True:
            at = _Place(say)
            try:
                found = run_on_ranks(
                    _WORKER,
                    settings.stages,
                    {"settings": asdict(settings), "without": [row.name for row in failed]},
                    timeout_s=settings.budget_s,
                    say=at,
                    **(net.launching() if net is not None else {}),
                )
                break
            except PipelineError as error:
                if at.row is None or len(failed) == _MOST_FAILURES:
                    raise
                failed.append(Unavailable(at.row, str(error)))
                say(f"{at.row} failed; restarting the others without it: {error}")
    if failed and not found[0]["rows"]:
        raise PipelineError(f"no row is left; {failed[-1].name}: {failed[-1].reason}")
    return summarise(settings, found[0], failed)


class _Place:
    """Listens to what rank 0 says it is at. row: the row, None between them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.row: str | None = None

    def __call__(self, line: str) -> None:
        self.row = line.partition(": ")[2] or None
        self._say(line)


def worker(settings: dict[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """A rank: measures the line, builds all rows but those named, and measures them."""
    asked = EmulatedSettings(**settings)
    torch.set_num_threads(1)
    precise_sleeps()
    join(asked.timeout_s, "gloo")  # nobody may wait forever, neither in our rows nor in torch's
    progress("measuring the line")
    line = plain_bytes_per_s() if asked.stages > 1 else None
    built = list(build(asked, without))
    rows = [row for row in built if not isinstance(row, Unavailable)]
    measured = measure_rows(rows, asked.rounds, asked.batches, progress)
    actions = [None if row.timeline is None else action_costs(row.timeline) for row in rows]
    progress("ending")
    for row in rows:
        row.close()
    return {
        "line_bytes_per_s": line,
        "rows": [{**item._asdict(), "actions": costs} for item, costs in zip(measured, actions)],
        "unavailable": [row._asdict() for row in built if isinstance(row, Unavailable)],
    }


def plain_bytes_per_s() -> float | None:
    """What a plain send of gloo reaches from rank 0 to rank 1, the receive being there already; known to both."""
    rank, tensor = dist.get_rank(), torch.zeros(_PROBE_BYTES // 4)
    best = None
    for probe in range(_PROBES + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(torch.empty(1), 1)  # it has arrived, not merely left
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(torch.empty(1), 0)
        taken = time.perf_counter() - begin
        if probe and rank < 2:  # the first one finds the speed of the connection
            best = max(best or 0.0, _PROBE_BYTES / taken)
    return best


def action_costs(timeline: Timeline, first_batch: int | None = None) -> dict[str, list[float]]:
    """By kind, the mean seconds of a stage's actions; of kinds that no stage has run, nothing.

    A worker is occupied until it has sent what an action made and has done what its host had to do, so that belongs to
    the action before. Of replicas it is the mean. first_batch: those before are left out; None: the first of each
    pipeline.
    """
    if first_batch is None:
        first_batch = 1 + max(event.pipeline for event in timeline.events)
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action in occupations((e for e in timeline.events if e.batch >= first_batch), _HOST):
        samples[action.kind, action.stage].append(action.seconds)
    stages = range(1 + max(stage for _, stage in samples))
    return {
        kind: [statistics.fmean(samples.get((kind, k), [0.0])) for k in stages]
        for kind in map(str, ACTIONS)
        if any((kind, k) in samples for k in stages)
    }


def simulated_s(
    case: PlanCase,
    settings: EmulatedSettings,
    line_bytes_per_s: float | None = None,
    actions: Mapping[str, Sequence[float]] | None = None,
) -> float:
    """Seconds per batch in the steady state.

    A limited line carries all that its worker sends, one tensor after another, at the rate measured, by default at the
    limit; without a limit transfers take nothing. Actions take what was measured, by default what was set, where
    updates and the host take nothing. Of replicas, each runs its share of the micro-batches, and the sum of gradients
    is not part of it.
    """
    limited, transfer_s = settings.rate_bits_per_s is not None, settings.transfer_s
    if limited and line_bytes_per_s is not None:
        transfer_s = settings.activation_bytes / line_bytes_per_s
    costs = case.costs(settings) if actions is None else _as_measured(actions, case.plan.stages)
    lines = _lines(case.schedule) if limited else ()
    costs = replace(costs, transfer_s=transfer_s, shared_links=lines)
    return case.shares * steady_batch_s(case.schedule, costs, pipelines=case.plan.pipelines)


def _as_measured(actions: Mapping[str, Sequence[float]], stages: int) -> Costs:
    update_s = actions.get("U", [0.0] * stages)
    if "B" in actions:
        return Costs(actions["F"], actions["B"], update_s=update_s)
    backward_s = [i + w for i, w in zip(actions["I"], actions["W"])]
    return Costs(actions["F"], backward_s, update_s=update_s, input_backward_s=actions["I"])


def _lines(schedule: Any) -> list[list[tuple[int, int]]]:
    """Per worker, all links by which its stages send."""
    last = schedule.stages - 1
    return [
        [(k, to) for k in stages for to in (k - 1, k + 1) if 0 <= to <= last and to not in stages]
        for stages in schedule.placement
    ]


def summarise(
    settings: EmulatedSettings, found: dict[str, Any], failed: Sequence[Unavailable] = ()
) -> dict[str, Any]:
    """found: what rank 0 measured."""
    line = found["line_bytes_per_s"]
    cases = {case.name: case for case in our_cases(settings) if isinstance(case, PlanCase)}
    bounds = settings.bounds(line)
    limits = [b["seconds"] for b in bounds if b["name"].startswith("no bubble") or "line rate" in b["name"]]
    rows = []
    for measured in found["rows"]:
        case, actions = cases.get(measured["name"]), measured["actions"]
        row = timed(measured, None if case is None else simulated_s(case, settings, line))
        if case is not None and actions is not None:
            row["simulated_as_measured_s"] = simulated_s(case, settings, line, actions)
            row["over_simulated_as_measured"] = row["median_s"] / row["simulated_as_measured_s"]
        rows.append(row)
    return {
        "emulated": True,
        "settings": asdict(settings),
        "line_bytes_per_s": line,
        "limit_s": max(limits),
        "bounds": bounds,
        "rows": rows,
        "unavailable": [*found["unavailable"], *(row._asdict() for row in failed)],
    }
