"""Evaluates a schedule: discrete events on integer times, so equal times are equal and every run is the same.

A device runs one action at a time. Of the actions whose inputs are there it takes backwards and updates before
forwards, then the oldest batch, as the runtime's scheduler does, then the first in the schedule's order; with a single
pipeline the oldest batch and the order alone decide. Transfers occupy links, never devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from avgpipe.schedule.action import Action
from avgpipe.schedule.dry_run import input_of
from avgpipe.schedule.order import Columns
from avgpipe.schedule.schedule import Schedule
from avgpipe.simulation.costs import StageCosts

TICKS_PER_S = 10**12


class Step(NamedTuple):
    """A cell of a schedule as the engine needs it; times in ticks."""

    later: bool  # a forward: gives way to everything else
    rank: int  # its place in the row of its worker
    ticks: int
    holds: int  # micro-batches in flight that it adds when it starts, or gives back (-1) when it ends
    needs_input: bool
    target: tuple[int, int] | None  # stage and position of the action that its tensor goes to
    link: int  # that the tensor travels on: 2k from stage k to k+1, 2k+1 back


class Program(NamedTuple):
    """A schedule with its costs: per stage the steps of a batch; per link the ticks of a tensor, how many more until it
    is there, and the channel that it shares with others.
    """

    schedule: Schedule
    steps: list[list[Step]]
    held_bytes: list[float]  # per stage, by a micro-batch in flight
    link_ticks: list[int]
    latency_ticks: list[int]
    channels: list[int | None]  # None: nothing travels
    link_serial: bool


class Ran(NamedTuple):
    """An action that a device ran. ``position``: in the stage's column. Times in ticks."""

    stage: int
    pipeline: int
    batch: int
    position: int
    start: int
    end: int


class Sent(NamedTuple):
    """A tensor on a link, of the action that made it. Times in ticks."""

    link: int
    pipeline: int
    batch: int
    position: int
    start: int
    end: int


@dataclass
class Outcome:
    """actions, transfers: in order of their start on a device or link. Of all pipelines, peak_in_flight: per stage;
    peak_held_bytes: per worker, by the micro-batches in flight on its stages.
    """

    actions: list[Ran] = field(default_factory=list)
    transfers: list[Sent] = field(default_factory=list)
    peak_in_flight: list[int] = field(default_factory=list)
    peak_held_bytes: list[float] = field(default_factory=list)


def compile_schedule(schedule: Schedule, costs: StageCosts) -> Program:
    """The program of a schedule that can be run (``Schedule.validate``)."""
    columns, stages = schedule.columns, schedule.stages
    targets, ranks = _targets(columns), _ranks(schedule)
    steps = [
        [
            _step(action, k, stages, ranks[k][position], targets.get((k, position)), costs)
            for position, action in enumerate(column)
        ]
        for k, column in enumerate(columns)
    ]
    worker = [schedule.worker_of(k) for k in range(stages)]
    # Between two stages of one worker nothing travels.
    travels = [worker[link // 2] != worker[link // 2 + 1] for link in range(2 * (stages - 1))]
    return Program(
        schedule,
        steps,
        costs.activation_bytes or [0.0] * stages,
        [_ticks(costs.transfer_s[link // 2]) if away else 0 for link, away in enumerate(travels)],
        [_ticks(costs.latency_s[link // 2]) if away else 0 for link, away in enumerate(travels)],
        [channel if away else None for channel, away in zip(costs.channels, travels)],
        costs.link_serial,
    )


def _targets(columns: Columns) -> dict[tuple[int, int], tuple[int, int]]:
    """Stage and position of the action that needs the tensor of another, by the other's."""
    places = [
        {
            ("B" if action.kind == "I" else action.kind, action.micro_batch): position
            for position, action in enumerate(column)
            if action.kind != "W"
        }
        for column in columns
    ]
    targets: dict[tuple[int, int], tuple[int, int]] = {}
    for k, column in enumerate(columns):
        for position, action in enumerate(column):
            source = input_of(action, k, len(columns))
            if source is not None:
                sender = places[source[0]][source[1], action.micro_batch]
                targets[source[0], sender] = (k, position)
    return targets


def _ranks(schedule: Schedule) -> list[list[int]]:
    """Per stage, the places of its actions in its worker's row."""
    ranks: list[list[int]] = [[] for _ in range(schedule.stages)]
    for row in schedule.rows().cells:
        for rank, cell in enumerate(row):
            ranks[cell.stage].append(rank)
    return ranks


def _step(
    action: Action, k: int, stages: int, rank: int, target: tuple[int, int] | None, costs: StageCosts
) -> Step:
    return Step(
        action.kind == "F",
        rank,
        _ticks(costs.seconds(action.kind, k)),
        {"F": 1, "B": -1, "W": -1}.get(action.kind, 0),
        input_of(action, k, stages) is not None,
        target,
        2 * k if action.kind == "F" else 2 * k - 1,
    )


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def run(program: Program, pipelines: int, batches: int) -> Outcome:
    """Run ``batches`` batches, batch j on pipeline j % pipelines."""
    return _Engine(program, pipelines, batches).run()


class _Engine:
    """Each pipeline walks on every stage through a line of cells: the column once per batch of its own, or what a
    stream makes of them. A cell is known by its number, batch of the pipeline x length of the column + position, so a
    tensor that arrives early waits at its cell.
    """

    def __init__(self, program: Program, pipelines: int, batches: int) -> None:
        self._program, self._pipelines = program, pipelines
        rounds = [len(range(i, batches, pipelines)) for i in range(pipelines)]
        schedule = program.schedule
        stages = schedule.stages
        self._placement = schedule.placement
        self._worker = [schedule.worker_of(k) for k in range(stages)]
        self._line = [[_line(schedule, k, own) for own in rounds] for k in range(stages)]
        self._cursor = [[0] * pipelines for _ in range(stages)]  # in the line
        self._here = [  # whether the input of a cell is there
            [bytearray(not step.needs_input for step in column) * own for own in rounds]
            for column in program.steps
        ]
        self._running: list[tuple[int, int] | None] = [None] * schedule.workers  # stage and pipeline
        self._held = [0] * stages
        self._channel_free = [0] * len(program.channels)
        self._heap: list[
            tuple[int, int, int, int]
        ] = []  # time, stage, and pipeline, cell of an arrival or -1
        self._outcome = Outcome(peak_in_flight=[0] * stages, peak_held_bytes=[0.0] * schedule.workers)

    def run(self) -> Outcome:
        heap, now = self._heap, 0
        for w in range(len(self._placement)):
            self._start(w, now)
        while heap:
            now = heap[0][0]
            touched = set()
            # Everything that happens now is known before a device chooses.
            while heap and heap[0][0] == now:
                _, k, i, cell = heapq.heappop(heap)
                if i < 0:
                    self._finish(k, now)
                else:
                    self._here[k][i][cell] = True
                touched.add(self._worker[k])
            for w in sorted(touched):
                if self._running[w] is None:
                    self._start(w, now)
        return self._outcome

    def _start(self, w: int, now: int) -> None:
        """Let the idle device of worker w take the most urgent action that is ready, if there is one."""
        best = None
        for k in self._placement[w]:
            steps = self._program.steps[k]
            for i, line in enumerate(self._line[k]):
                cursor = self._cursor[k][i]
                if cursor < len(line) and self._here[k][i][line[cursor]]:
                    own, position = divmod(line[cursor], len(steps))
                    later, rank = steps[position].later and self._pipelines > 1, steps[position].rank
                    urgency = (later, own * self._pipelines + i, rank, k, position)
                    if best is None or urgency < best:
                        best = urgency
        if best is None:
            return
        _, batch, _, k, position = best
        step = self._program.steps[k][position]
        if step.holds > 0:
            self._hold(w, k)
        self._running[w] = k, batch % self._pipelines
        end = now + step.ticks
        self._outcome.actions.append(Ran(k, batch % self._pipelines, batch, position, now, end))
        heapq.heappush(self._heap, (end, k, -1, -1))

    def _hold(self, w: int, k: int) -> None:
        """One more micro-batch is in flight on stage k of worker w."""
        self._held[k] += 1
        peaks, bytes_each = self._outcome, self._program.held_bytes
        peaks.peak_in_flight[k] = max(peaks.peak_in_flight[k], self._held[k])
        held_bytes = sum(self._held[j] * bytes_each[j] for j in self._placement[w])
        peaks.peak_held_bytes[w] = max(peaks.peak_held_bytes[w], held_bytes)

    def _finish(self, k: int, now: int) -> None:
        """The action on stage k is done: its pipeline goes on, its tensor leaves."""
        running = self._running[self._worker[k]]
        assert running is not None
        _, i = running
        own, position = divmod(self._line[k][i][self._cursor[k][i]], len(self._program.steps[k]))
        step = self._program.steps[k][position]
        self._cursor[k][i] += 1
        self._running[self._worker[k]] = None
        self._held[k] += min(step.holds, 0)
        if step.target is not None:
            channel, start = self._program.channels[step.link], now
            if channel is not None and self._program.link_serial:
                start = max(now, self._channel_free[channel])
            end = start + self._program.link_ticks[step.link]
            if channel is not None:
                self._channel_free[channel] = end
            batch = own * self._pipelines + i
            self._outcome.transfers.append(Sent(step.link, i, batch, position, start, end))
            neighbour, at = step.target
            cell = own * len(self._program.steps[neighbour]) + at
            heapq.heappush(self._heap, (end + self._program.latency_ticks[step.link], neighbour, i, cell))


def _line(schedule: Schedule, k: int, rounds: int) -> Sequence[int]:
    """The cells of a pipeline with so many batches, in the order in which stage k runs them."""
    column = schedule.columns[k]
    if schedule.flush:
        return range(rounds * len(column))
    place = {(a.kind, -1 if a.micro_batch is None else a.micro_batch): at for at, a in enumerate(column)}
    stream = schedule.stream(k)
    steps = [step for own in range(rounds) for step in stream.add(own, schedule.micro_batches)]
    steps += stream.drain()
    return [step.batch * len(column) + place[step.kind, step.micro_batch] for step in steps]
