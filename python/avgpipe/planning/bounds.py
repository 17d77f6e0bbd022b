"""Times in closed form that no run is below: a check on simulations, and a quick answer where one is enough."""

from __future__ import annotations

from dataclasses import dataclass

from avgpipe.planning.arguments import check_arguments
from avgpipe.planning.costs import Costs, StageCosts
from avgpipe.planning.numbers import Each, least, total
from avgpipe.planning.program import workers_of
from avgpipe.planning.randomness import least_factor
from avgpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Bounds:
    """Seconds that a run takes at least; up to its rounding to picoseconds.

    - busiest_device_s: a device's work, of all batches.
    - critical_path_s: a micro-batch goes through all stages and back, and the first stage updates.
    - fill_and_drain_s: a stage's forwards and backwards, of all batches, after the way of the first micro-batch to it,
      before the way of the last one back from it. Of a uniform pipeline without transfers, one batch, this is (M+K-1)
      (t_f + t_b), which GPipe and 1F1B take.
    - busiest_link_s: what a link, or a group of shared links, carries.
    """

    busiest_device_s: float
    critical_path_s: float
    fill_and_drain_s: float
    busiest_link_s: float

    @property
    def makespan_s(self) -> float:
        """The greatest of them."""
        return max(self.busiest_device_s, self.critical_path_s, self.fill_and_drain_s, self.busiest_link_s)


def makespan_bounds(schedule: Schedule, costs: Costs, *, pipelines: int = 1, batches: int = 1) -> Bounds:
    """Bounds of ``simulate`` with the same arguments, of any draws of jitter. Raises as that does."""
    check_arguments(schedule, costs, pipelines, batches)
    return _Bounder(schedule, costs).bounds(batches)


class _Bounder:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._micro_batches, self._stages = schedule.micro_batches, schedule.stages
        self._costs: StageCosts = costs.of_stages(schedule.stages, schedule.micro_batches)
        self._shrink = least_factor(costs.jitter)
        self._gain = max(costs.concurrency_gain)
        self._workers = workers_of(schedule)
        self._gradients = [_gradient(schedule, k) for k in range(schedule.stages)]

    def bounds(self, batches: int) -> Bounds:
        return Bounds(
            batches * self._busiest_device(),
            max(self._path(m) for m in self._varying()),
            self._fill_and_drain(batches),
            batches * self._busiest_link(),
        )

    def _busiest_device(self) -> float:
        work: dict[int, float] = {}
        for k, w in enumerate(self._workers):
            work[w] = work.get(w, 0.0) + self._total("F", k) + self._total("B", k) + self._update(k)
        return max(work.values()) / self._gain

    def _varying(self) -> range:
        """The micro-batches that may differ."""
        costs = self._costs
        every = (costs.forward_s, costs.backward_s, costs.input_backward_s)
        between = (costs.transfer_s, costs.gradient_transfer_s)
        each = any(isinstance(cost, tuple) for costs in (*every, *between) for cost in costs)
        return range(self._micro_batches if each else 1)

    def _path(self, m: int) -> float:
        there = sum(self._time("F", k, m) for k in range(self._stages))
        back = sum(self._time(self._gradients[k], k, m) for k in range(self._stages))
        travel = sum(
            self._travel(self._costs.transfer_s, k, m) + self._travel(self._costs.gradient_transfer_s, k, m)
            for k in range(self._stages - 1)
        )
        return there + travel + back + self._costs.allreduce_s[0] + self._update(0)

    def _fill_and_drain(self, batches: int) -> float:
        costs = self._costs
        most, ways = 0.0, costs.allreduce_s[0] + self._update(0)
        for k, gradient in enumerate(self._gradients):
            work = batches * (self._total("F", k) + self._total(gradient, k)) / self._gain
            most = max(most, ways + work)
            if k + 1 < self._stages:
                ways += self._time("F", k) + self._travel(costs.transfer_s, k)
                ways += self._time(gradient, k) + self._travel(costs.gradient_transfer_s, k)
        return most

    def _busiest_link(self) -> float:
        load: dict[int, float] = {}
        costs = self._costs
        for link, channel in enumerate(costs.channels):
            k = link // 2
            if channel >= 0 and self._workers[k] != self._workers[k + 1]:
                cost = (costs.gradient_transfer_s if link % 2 else costs.transfer_s)[k]
                load[channel] = load.get(channel, 0.0) + self._shrink * total(cost, self._micro_batches)
        return max(load.values(), default=0.0)

    def _time(self, kind: str, k: int, m: int | None = None) -> float:
        return self._shrink * _at(self._costs.seconds(kind, k), m)

    def _total(self, kind: str, k: int) -> float:
        return self._shrink * total(self._costs.seconds(kind, k), self._micro_batches)

    def _update(self, k: int) -> float:
        return self._shrink * self._costs.update_s[k]

    def _travel(self, costs: list[Each], k: int, m: int | None = None) -> float:
        if self._workers[k] == self._workers[k + 1]:
            return 0.0
        return self._shrink * _at(costs[k], m) + self._costs.latency_s[k]


def _at(cost: Each, m: int | None) -> float:
    """Of a micro-batch; None: the least of all."""
    if m is None:
        return least(cost)
    return cost[m] if isinstance(cost, tuple) else cost


def _gradient(schedule: Schedule, k: int) -> str:
    """The kind of action that makes the gradient which stage k sends."""
    rows = [schedule.rows[w] for w in schedule.replicas[k]]
    return "I" if any(a.kind == "I" and a.stage == k for row in rows for a in row.kinds) else "B"
