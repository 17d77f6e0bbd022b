"""Evaluates a schedule: discrete events on integer times, so equal times are equal and every run is the same.

A device runs one action at a time. Of the actions whose inputs are there it takes backwards and updates before
forwards, then the oldest batch, as the runtime's scheduler does. Transfers occupy links, never devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from avgpipe.schedule.action import Action
from avgpipe.schedule.dry_run import input_of
from avgpipe.simulation.costs import StageCosts

TICKS_PER_S = 10**12

Columns = Sequence[Sequence[Action]]


class Step(NamedTuple):
    """A cell of a schedule as the engine needs it; times in ticks."""

    later: bool  # a forward: gives way to everything else
    ticks: int
    holds: int  # micro-batches in flight that it adds when it starts, or gives back (-1) when it ends
    needs_input: bool
    target: tuple[int, int] | None  # stage and position of the action that its tensor goes to
    link: int  # that the tensor travels on: 2k from stage k to k+1, 2k+1 back


class Program(NamedTuple):
    """A schedule with its costs: per stage the steps of a batch; per link the ticks of a tensor."""

    steps: list[list[Step]]
    link_ticks: list[int]
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
    """actions, transfers: in order of their start on a device or link. peak_in_flight: per stage, all pipelines."""

    actions: list[Ran] = field(default_factory=list)
    transfers: list[Sent] = field(default_factory=list)
    peak_in_flight: list[int] = field(default_factory=list)


def compile_schedule(columns: Columns, costs: StageCosts) -> Program:
    """The program of a schedule that can be run (``Schedule.validate``)."""
    stages = len(columns)
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
            source = input_of(action, k, stages)
            if source is not None:
                sender = places[source[0]][source[1], action.micro_batch]
                targets[source[0], sender] = (k, position)
    steps = [
        [
            _step(action, k, stages, targets.get((k, position)), costs)
            for position, action in enumerate(column)
        ]
        for k, column in enumerate(columns)
    ]
    link_ticks = [_ticks(seconds) for seconds in costs.transfer_s for _ in range(2)]
    return Program(steps, link_ticks, costs.link_serial)


def _step(action: Action, k: int, stages: int, target: tuple[int, int] | None, costs: StageCosts) -> Step:
    return Step(
        action.kind == "F",
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
    """Each pipeline walks through the column of a stage once per batch of its own. Its cursor counts on from batch
    to batch, so a tensor that arrives a batch early is known by its place.
    """

    def __init__(self, program: Program, pipelines: int, batches: int) -> None:
        self._program, self._pipelines = program, pipelines
        stages = len(program.steps)
        rounds = [len(range(i, batches, pipelines)) for i in range(pipelines)]
        self._cursor = [[0] * pipelines for _ in range(stages)]
        self._end = [[own * len(column) for own in rounds] for column in program.steps]
        self._here = [  # whether the input of the action at a cursor is there
            [bytearray(not step.needs_input for step in column) * own for own in rounds]
            for column in program.steps
        ]
        self._running: list[int | None] = [None] * stages  # the pipeline
        self._held = [0] * stages
        self._link_free = [0] * len(program.link_ticks)
        self._heap: list[
            tuple[int, int, int, int]
        ] = []  # time, stage, and pipeline, cursor of an arrival or -1
        self._outcome = Outcome(peak_in_flight=[0] * stages)

    def run(self) -> Outcome:
        heap, now = self._heap, 0
        for k in range(len(self._program.steps)):
            self._start(k, now)
        while heap:
            now = heap[0][0]
            touched = set()
            # Everything that happens now is known before a device chooses.
            while heap and heap[0][0] == now:
                _, k, i, cursor = heapq.heappop(heap)
                if i < 0:
                    self._finish(k, now)
                else:
                    self._here[k][i][cursor] = True
                touched.add(k)
            for k in sorted(touched):
                if self._running[k] is None:
                    self._start(k, now)
        return self._outcome

    def _start(self, k: int, now: int) -> None:
        """Let the idle device of stage k take the most urgent action that is ready, if there is one."""
        steps, cursors, best = self._program.steps[k], self._cursor[k], None
        for i, cursor in enumerate(cursors):
            if cursor < self._end[k][i] and self._here[k][i][cursor]:
                own, position = divmod(cursor, len(steps))
                urgency = (steps[position].later, own * self._pipelines + i, position)
                if best is None or urgency < best:
                    best = urgency
        if best is None:
            return
        _, batch, position = best
        step = steps[position]
        if step.holds > 0:
            self._held[k] += step.holds
            self._outcome.peak_in_flight[k] = max(self._outcome.peak_in_flight[k], self._held[k])
        self._running[k] = batch % self._pipelines
        end = now + step.ticks
        self._outcome.actions.append(Ran(k, batch % self._pipelines, batch, position, now, end))
        heapq.heappush(self._heap, (end, k, -1, -1))

    def _finish(self, k: int, now: int) -> None:
        """The action on stage k is done: its pipeline goes on, its tensor leaves."""
        i = self._running[k]
        assert i is not None
        own, position = divmod(self._cursor[k][i], len(self._program.steps[k]))
        step = self._program.steps[k][position]
        self._cursor[k][i] += 1
        self._running[k] = None
        self._held[k] += min(step.holds, 0)
        if step.target is not None:
            start = max(now, self._link_free[step.link]) if self._program.link_serial else now
            end = start + self._program.link_ticks[step.link]
            self._link_free[step.link] = end
            batch = own * self._pipelines + i
            self._outcome.transfers.append(Sent(step.link, i, batch, position, start, end))
            neighbour, at = step.target
            cursor = own * len(self._program.steps[neighbour]) + at
            heapq.heappush(self._heap, (end, neighbour, i, cursor))
