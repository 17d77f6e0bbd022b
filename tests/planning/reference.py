"""A slow simulator, written from the rules alone: at each instant it looks at everything again.

Times are whole ticks (picoseconds). A problem is a `Problem`: plain numbers, from which `Costs` are made too.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from avgpipe.planning import Costs
from avgpipe.schedule import Action

MS = 10**9  # ticks
ALONE = 2**20  # the speed of an action that has its device for itself


@dataclass
class Problem:
    """ms: of F, I, W per stage and micro-batch; of U and the all-reduce per stage; of the links' "there" and "back"
    per boundary and micro-batch; of latency per boundary. ``groups``: of shared links.
    """

    ms: dict
    serial: bool = True
    groups: tuple = ()
    gain: tuple = (1.0,)
    jitter: float = 0.0
    stragglers: tuple | None = None
    seed: int = 0
    held: list = field(default_factory=list)

    def costs(self):
        ms = {name: _seconds(rows) for name, rows in self.ms.items()}
        backward = [[i + w for i, w in zip(*rows)] for rows in zip(self.ms["I"], self.ms["W"])]
        return Costs(
            ms["F"],
            _seconds(backward),
            ms["there"],
            self.held,
            link_serial=self.serial,
            update_s=ms["U"],
            input_backward_s=ms["I"],
            gradient_transfer_s=ms["back"],
            latency_s=ms["latency"],
            shared_links=self.groups,
            allreduce_s=ms["sum"],
            concurrency_gain=self.gain,
            jitter=self.jitter,
            stragglers=self.stragglers,
            seed=self.seed,
        )

    def action_ticks(self, k, batch, action):
        m = action.micro_batch or 0
        if action.kind == "U":
            ms = self.ms["U"][k]
        elif action.kind == "B":
            ms = self.ms["I"][k][m] + self.ms["W"][k][m]
        else:
            ms = self.ms[action.kind][k][m]
        return self._shaken(ms * MS, 8 * k + "FBIWU".index(action.kind), batch, m)

    def transfer_ticks(self, boundary, way, batch, m):
        what = 8 * boundary + 5 + ("there", "back").index(way)
        return self._shaken(self.ms[way][boundary][m] * MS, what, batch, m)

    def _shaken(self, ticks, what, batch, m):
        bits = _mix(_mix(_mix(_mix(self.seed) ^ what) ^ batch) ^ m)
        total = sum(bits >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070
        ticks += ticks * total * round(self.jitter / 37837.2 * 2**48) >> 48
        if self.stragglers is not None and _mix(bits) >> 32 < round(self.stragglers[0] * 2**32):
            ticks = ticks * round(self.stragglers[1] * 2**16) >> 16
        return ticks


def _seconds(rows):
    return [[entry / 1000 for entry in row] if isinstance(row, list) else row / 1000 for row in rows]


def _mix(x):
    """SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


class Ran(NamedTuple):
    worker: int
    stage: int
    batch: int
    action: Action  # without stage and ahead
    start: int
    end: int


@dataclass
class Running:
    worker: int
    pipeline: int
    batch: int
    action: Action
    start: int
    work: int  # that is left, in ticks / 2^20


class Reference:
    """``ran``: every action. ``in_flight``: per stage the most held at once by a worker; ``held_bytes``: per worker."""

    def __init__(self, schedule, problem, pipelines, batches):
        self.schedule, self.problem, self.pipelines = schedule, problem, pipelines
        self.stages = schedule.stages
        self.todo = {
            (w, i): [
                (own * pipelines + i, action)
                for own, action in steps_of(row, len(range(i, batches, pipelines)))
            ]
            for w, row in enumerate(schedule.rows)
            for i in range(pipelines)
        }
        self.arrived = {}  # (stage, batch, F or B, micro-batch): when
        self.backwards = Counter()  # (stage, batch): how many have ended, on all replicas
        self.summed = {}  # (stage, batch): when the gradients of its replicas are added up
        self.channel_free = Counter()
        self.running, self.ran = [], []
        self.held = Counter()  # (worker, stage)
        self.in_flight = [0] * self.stages
        self.held_bytes = [0] * schedule.workers
        self._run()

    def _run(self):
        now = 0
        while True:
            for running in sorted(self.running, key=lambda r: (r.worker, r.pipeline)):
                if running.work <= 0:
                    self._end(running, now)
            for w in range(self.schedule.workers):
                while self._start_one(w, now):
                    pass
            times = [now + -(-r.work // self._rate(r.worker)) for r in self.running]
            times += [t for t in (*self.arrived.values(), *self.summed.values()) if t > now]
            if not times:
                assert not any(self.todo.values()), "everything runs"
                return
            for r in self.running:
                r.work -= self._rate(r.worker) * (min(times) - now)
            now = min(times)

    def _rate(self, w):
        count = sum(r.worker == w for r in self.running)
        return round(self.problem.gain[count - 1] / count * ALONE)

    def _start_one(self, w, now):
        if sum(r.worker == w for r in self.running) == len(self.problem.gain):
            return False
        ready = []
        for i in range(self.pipelines):
            active = any((r.worker, r.pipeline) == (w, i) for r in self.running)
            if self.todo[w, i] and not active and self._is_ready(*self.todo[w, i][0], now):
                batch, action = self.todo[w, i][0]
                ready.append((self.pipelines > 1 and action.kind == "F", batch, i))
        if not ready:
            return False
        i = min(ready)[2]
        batch, action = self.todo[w, i].pop(0)
        work = ALONE * self.problem.action_ticks(action.stage, batch, action)
        self.running.append(Running(w, i, batch, action, now, work))
        if action.kind == "F":
            self._hold(w, action.stage)
        return True

    def _is_ready(self, batch, action, now):
        if action.kind == "U":
            return self.summed.get((action.stage, batch), now + 1) <= now
        source = source_of(action.stage, action, self.stages)
        kind = "B" if action.kind == "I" else action.kind
        return (
            source is None
            or self.arrived.get((action.stage, batch, kind, action.micro_batch), now + 1) <= now
        )

    def _hold(self, w, k):
        self.held[w, k] += 1
        self.in_flight[k] = max(self.in_flight[k], self.held[w, k])
        held_bytes = sum(self.held[w, j] * self.problem.held[j] for j in range(self.stages))
        self.held_bytes[w] = max(self.held_bytes[w], held_bytes)

    def _end(self, r, now):
        self.running.remove(r)
        k, m = r.action.stage, r.action.micro_batch
        self.ran.append(Ran(r.worker, k, r.batch, Action(r.action.kind, m), r.start, now))
        if r.action.kind in "BW":
            self.held[r.worker, k] -= 1
            self.backwards[k, r.batch] += 1
            if self.backwards[k, r.batch] == self.schedule.micro_batches:
                self.summed[k, r.batch] = now + self.problem.ms["sum"][k] * MS
        if r.action.kind == "F" and k + 1 < self.stages:
            self._send(r, k + 1, now)
        elif r.action.kind in "BI" and k > 0:
            self._send(r, k - 1, now)

    def _send(self, r, to, now):
        k, m = r.action.stage, r.action.micro_batch
        boundary, there = min(k, to), now
        if r.worker != self.schedule.worker_of(to, m):
            ticks = self.problem.transfer_ticks(boundary, "there" if to > k else "back", r.batch, m)
            channel = next((g for g in self.problem.groups if (k, to) in g), (r.worker, k, to))
            begin = max(now, self.channel_free[channel]) if self.problem.serial else now
            self.channel_free[channel] = begin + ticks
            there = begin + ticks + self.problem.ms["latency"][boundary] * MS
        self.arrived[to, r.batch, "F" if r.action.kind == "F" else "B", m] = there


def source_of(k, action, stages):
    """Stage and kinds of what an action waits for, or None."""
    if action.kind == "F":
        return (k - 1, "F") if k > 0 else None
    if action.kind in "BI":
        return (k + 1, "BI") if k < stages - 1 else None
    return None


def steps_of(row, batches):
    """What a worker does with the batches of a pipeline, in turn: (number of the batch, action)."""
    ahead = max(action.ahead for action in row)
    return [
        (turn + action.ahead, action)
        for turn in range(-ahead, batches)
        for action in row
        if 0 <= turn + action.ahead < batches
    ]
