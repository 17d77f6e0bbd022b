"""Timeline and costs of a running pipeline, gathered from all ranks."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from avgpipe.links.link import Message
from avgpipe.planning import AdvanceChoice, Costs, choose_advance
from avgpipe.runtime.session import Session
from avgpipe.runtime.worker import Worker
from avgpipe.schedule.row import Event, EventKind
from avgpipe.timeline.timeline import Timeline, occupations


def gather_timeline(worker: Worker) -> Timeline:
    """Return the last events of all ranks, in seconds from the first of them; every rank calls this."""
    found = [Event(*row) for rows in worker.world.gather(worker.scheduler.events()) for row in rows]
    begin = min((e.start_s for e in found), default=0.0)
    placement = worker.placement
    events = [e._replace(start_s=e.start_s - begin, end_s=e.end_s - begin) for e in found]
    workers = range(len(placement.workers))
    labels = () if placement.is_plain else tuple(map(placement.label, workers))
    return Timeline(len(workers), tuple(sorted(events, key=lambda e: e.start_s)), labels=labels)


def gather_busy(worker: Worker, first_batch: int) -> list[float]:
    """Return the computing share of each worker's time, 0..1, since ``first_batch`` or the start of its record.

    Each share is computed from the worker's own record of these batches, so only a number per worker is sent.
    Every rank calls this.
    """
    events: dict[int, list[Event]] = defaultdict(list)
    for event in worker.scheduler.events():
        if event.batch >= first_batch:
            events[event.worker].append(event._replace(worker=0))
    own = {row: Timeline(1, tuple(of_row)).worker_busy_fraction[0] for row, of_row in events.items()}
    shares = {row: share for found in worker.world.gather(list(own.items())) for row, share in found}
    return [shares.get(row, 0.0) for row in range(len(worker.placement.workers))]


def measured_costs(worker: Worker) -> Costs:
    """Return median times of the actions so far, and the memory of a micro-batch, of every stage.

    For stages without replicas. The memory of a micro-batch is 0 unless it was requested. Every rank calls
    this.
    """
    gathered = worker.world.gather([_costs_of(worker, k) for k in worker.held])
    rows = sorted((row for rows in gathered for row in rows), key=lambda row: row["stage"])
    # The clocks of the two ends differ: forwards appear shorter by what gradients appear longer, so take the
    # mean.
    transfers = [
        max(0.0, (after["activation_s"] + before["gradient_s"]) / 2) for before, after in pairwise(rows)
    ]
    return Costs(
        [row["F"] for row in rows],
        [row["B"] for row in rows],
        transfers or 0.0,
        [row["activation_bytes"] for row in rows],
        [row["weight_bytes"] for row in rows],
        update_s=[row["U"] for row in rows],
    )


def _costs_of(worker: Worker, k: int) -> dict[str, float]:
    """Return the costs of stage ``k``: seconds of its actions and of messages from its neighbours, and bytes."""
    reference, trained = worker.references[k], worker.trained[k, 0]
    shared = sum(t.nbytes for t in reference.parameters) if reference is not None else 0
    shared += sum(t.nbytes for t in worker.emas[k].flats) if k in worker.emas else 0
    lanes = [lane for (replica, _), lane in worker.lanes.items() if replica == k]
    return {
        "stage": k,
        **_action_seconds(e for e in worker.scheduler.events() if e.stage == k),
        "activation_bytes": max(lane.compute.saved_bytes for lane in lanes),
        "weight_bytes": trained.bytes + shared / len(lanes),
        "activation_s": _latency_s(worker, k - 1, Message.ACTIVATION),
        "gradient_s": _latency_s(worker, k + 1, Message.GRADIENT),
    }


def _action_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Return medians for F, B and U, with the sends that follow, which occupy the worker too.

    A backward in two parts takes both. The first batches are left out.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    first: dict[int, int] = {}
    for action in occupations(events, (EventKind.SEND,)):
        if action.batch != first.setdefault(action.pipeline, action.batch):
            samples[action.kind].append(action.seconds)
    typical = {kind: statistics.median(samples[kind]) if samples[kind] else 0.0 for kind in "FBIWU"}
    return {"F": typical["F"], "B": typical["B"] or typical["I"] + typical["W"], "U": typical["U"]}


def _latency_s(worker: Worker, source: int, message: Message) -> float:
    """Return the seconds of a message from a neighbour; 0 in shared memory, where arrival is immediate."""
    link = worker.links.get(source)
    return float(getattr(link, "latency_s", {}).get(message, 0.0))


# ---- advance="auto" --------------------------------------------------------------------------------------------------


_MEASURED_BATCHES = 4  # per pipeline, the first of which is left out


class AutoAdvance:
    """Chooses the advance once, after the first batches; all ranks make the same choice.

    Args:
        memory_limit_bytes: Memory of a worker; None: no limit.

    Attributes:
        choice: The choice; None before it.
    """

    def __init__(self, memory_limit_bytes: int | None) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self.choice: AdvanceChoice | None = None

    def look(self, session: Session) -> None:
        """Make the choice, once enough batches are measured."""
        plan = session.spec.running
        if self.choice is not None or session.feed.begun < _MEASURED_BATCHES * plan.batches_per_round:
            return
        with session.idle():
            costs = measured_costs(session.worker)
        self.choice = choose_advance(
            plan.stages,
            plan.micro_batches_each,
            costs,
            pipelines=plan.pipelines,
            memory_limit_bytes=self._memory_limit_bytes,
        )
        session.worker.follow(replace(plan, advance=self.choice.advance).build_schedule())
        if session.world.rank == 0:
            print(f"avgpipe: {self.choice}", file=sys.stderr)
