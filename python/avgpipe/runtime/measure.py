"""What a running pipeline did, and what its actions cost, gathered from all ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

import torch

from avgpipe.links.group import GroupLink
from avgpipe.planning import Costs
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.worker import Worker
from avgpipe.timeline.actions import occupations
from avgpipe.timeline.timeline import Event, Timeline

_KINDS = ("F", "B", "I", "W", "U", "average", "send", "host", "recv")
_DETAILS = ("", "F", "B", "T", "N", "C", "average", "caller", "loader", "A", "Z", "L")

_COLUMNS = 8  # of a row: stage, seconds of F, B and U, bytes held and kept, seconds for F from before and B from after


def gather_timeline(worker: Worker) -> Timeline:
    """The last events of all ranks, in seconds from the first of them; every rank calls this."""
    rows = [
        [
            *(e.stage, e.pipeline, e.batch, -1 if e.micro_batch is None else e.micro_batch),
            *(_KINDS.index(e.kind), e.start_s, e.end_s, _DETAILS.index(e.detail)),
        ]
        for e in worker.scheduler.events()
    ]
    table = worker.world.gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 8))
    begin = float(table[:, 5].min()) if len(table) else 0.0
    placement = worker.placement
    events = [
        Event(
            *(placement.worker_of(int(seat)), int(i), int(j), int(m) if m >= 0 else None, _KINDS[int(kind)]),
            *(start - begin, end - begin, _detail(placement, int(seat), int(kind), int(detail))),
        )
        for seat, i, j, m, kind, start, end, detail in table.tolist()
    ]
    workers = range(len(placement.workers))
    labels = () if _is_plain(placement) else tuple(map(placement.label, workers))
    return Timeline(len(workers), tuple(sorted(events, key=lambda e: e.start_s)), labels=labels)


def _is_plain(placement: Placement) -> bool:
    """Whether worker k is stage k."""
    return len(placement.seats) == placement.stages == len(placement.workers)


def _detail(placement: Placement, seat: int, kind: int, detail: int) -> str:
    """Where a worker is not a stage, an action says which it is of."""
    if not _is_plain(placement) and _KINDS[kind] in "FBIWU":
        return placement.name(seat)
    return _DETAILS[detail]


def measured_costs(worker: Worker, stages: int) -> Costs:
    """Median times of the actions so far, and the memory of a micro-batch, of every stage; every rank calls this.

    For stages without replicas, so that a seat is a stage.
    """
    own = torch.tensor([_row(worker, k) for k in worker.seats], dtype=torch.float64)
    table = worker.world.gather_rows(own)
    rows = {int(row[0]): row for row in table.tolist()}
    # The ends' clocks differ by what forwards gain and gradients lose: the mean of both is the time of either.
    transfers = [max(0.0, (rows[k + 1][6] + rows[k][7]) / 2) for k in range(stages - 1)]
    columns = [[rows[k][c] for k in range(stages)] for c in range(_COLUMNS)]
    return Costs(columns[1], columns[2], transfers or 0.0, columns[4], columns[5], update_s=columns[3])


def _row(worker: Worker, k: int) -> list[float]:
    seconds = _action_seconds(e for e in worker.scheduler.events() if e.stage == k)
    replica = worker.replicas[k, 0]
    reference = worker.references[k]
    shared = sum(t.nbytes for t in reference.parameters) if reference is not None else 0
    kept = replica.bytes + shared / len({i for _, i in worker.replicas})
    held = max(lane.compute.held_bytes for (stage, _), lane in worker.lanes.items() if stage == k)
    return [k, *seconds, held, kept, _latency(worker, k - 1, "F"), _latency(worker, k + 1, "B")]


def _action_seconds(events: Iterable[Event]) -> list[float]:
    """Medians for F, B and U, with the sends that follow, which occupy the worker too; without the first batches."""
    samples: dict[str, list[float]] = defaultdict(list)
    first: dict[int, int] = {}
    for action in occupations(events, ("send",)):
        if action.batch != first.setdefault(action.pipeline, action.batch):
            samples[action.kind].append(action.seconds)
    return [statistics.median(samples[kind]) if samples[kind] else 0.0 for kind in "FBU"]


def _latency(worker: Worker, source: int, kind: str) -> float:
    """How long a message from a neighbour takes; 0 in shared memory, where arrival is immediate."""
    link = worker.links.get(source)
    return link.latency_s.get(kind, 0.0) if isinstance(link, GroupLink) else 0.0
