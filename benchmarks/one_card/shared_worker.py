"""A model, without a measurement: what lanes gain on one worker of K whose kernels fill it.

    python -m benchmarks.one_card.shared_worker

The rows of ``one_worker.py``: each lane has neighbours of its own, and all lanes share the device, so each of two takes
twice as long. They begin together, or an N-th of a batch after one another. Whatever is measured beyond these gains is
room that kernels leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.one_card.neighbours import Act, Worker
from benchmarks.tables.markdown import table

STAGES = 4
_FORWARD_S, _BACKWARD_S = 1.0, 2.0
_BATCHES = 40  # of each lane: the first and the last count for little
_LITTLE = 1e-9


@dataclass
class _Lane:
    """A lane's place in its batches, and when messages arrive for it."""

    worker: Worker
    begun_s: float
    done: int = 0
    left_s: list[float] = field(default_factory=list)  # of this batch: when activations left

    @property
    def next(self) -> Act | None:
        row = self.worker.row
        return row[self.done % len(row)] if self.done < _BATCHES * len(row) else None

    @property
    def takes_s(self) -> float:
        return _FORWARD_S if self.next and self.next.kind == "F" else _BACKWARD_S

    def ready_s(self) -> float:
        act = self.next
        assert act is not None
        if act.kind == "F":
            arrivals, causes = self.worker.inputs, [self.begun_s] * self.worker.micro_batches
        else:
            arrivals, causes = self.worker.gradients, self.left_s
        if arrivals is None:
            return self.begun_s
        return arrivals.times(causes)[act.micro_batch]

    def end(self, now: float) -> None:
        act = self.next
        assert act is not None
        if act.kind == "F":
            self.left_s.append(now)
        self.done += 1
        if self.done % len(self.worker.row) == 0:
            self.begun_s, self.left_s = now, []


def makespan_s(lanes: int, stage: int, micro_batches: int, apart: bool) -> float:
    """Return the seconds in which each lane does ``_BATCHES`` batches."""
    worker = Worker(STAGES, stage, micro_batches, STAGES, _FORWARD_S, _BACKWARD_S)
    between_s = worker.batch_s() / lanes if apart else 0.0
    every = [_Lane(worker, number * between_s) for number in range(lanes)]
    running: dict[int, float] = {}  # seconds that are left, of a device of one's own
    now = 0.0
    while True:
        waiting = [n for n, lane in enumerate(every) if n not in running and lane.next is not None]
        for n in waiting:
            if every[n].ready_s() <= now + _LITTLE:
                running[n] = every[n].takes_s
        arrivals = [every[n].ready_s() - now for n in waiting if n not in running]
        ends = [left * len(running) for left in running.values()]
        if not arrivals and not ends:
            return now
        step, sharing = min(arrivals + ends), len(running)
        now += step
        for n in list(running):
            running[n] -= step / sharing
            if running[n] < _LITTLE:
                del running[n]
                every[n].end(now)


def gain(lanes: int, stage: int, micro_batches: int, apart: bool) -> float:
    """Return batches per second relative to one lane."""
    one_s = makespan_s(1, stage, micro_batches, False)
    return lanes * one_s / makespan_s(lanes, stage, micro_batches, apart)


def shared_worker_table() -> str:
    """Return the gains of two and four lanes, by stage and micro-batches."""
    rows = [
        (m, stage, *(f"{gain(n, stage, m, apart):.2f}" for n in (2, 4) for apart in (False, True)))
        for m in (4, 8)
        for stage in (0, 1, 3)
    ]
    return table("M: | stage: | N = 2: | N = 2, apart: | N = 4: | N = 4, apart:", rows)


if __name__ == "__main__":
    print(shared_worker_table())
