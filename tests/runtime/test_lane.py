"""Lanes and rows: which steps are queued for a batch, and when the next one may run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Plan
from avgpipe.elastic.flat import Arena
from avgpipe.links.link import Key, Mailbox, Message
from avgpipe.model.batch import LossWeights, split
from avgpipe.model.model import trainable_parameters
from avgpipe.ranks.world import World
from avgpipe.runtime.compute import Compute, Work
from avgpipe.runtime.lane import Lane, PipelineRow, Queue
from avgpipe.runtime.loss import NonfiniteNotice
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.route import Port, Route
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.update import Update

CPU = torch.device("cpu")


class Outbox:
    """A link that keeps what is sent."""

    name = "kept"

    def __init__(self) -> None:
        self.sent: list[Key] = []

    def send(self, key: Key, value: object) -> None:
        self.sent.append(key)

    def close(self, patience_s: float) -> None:
        pass


class Bench:
    """One pipeline's row of a plan on one worker, alone, with its mailbox and what it sends."""

    def __init__(self, plan: Plan, worker: int) -> None:
        placement = Placement.of(plan, plan.workers)
        options = TrainingOptions(nn.MSELoss(), lambda ps: torch.optim.SGD(ps, lr=0.1), recompute="never")
        self.mailbox, self.outbox = Mailbox(), Outbox()
        self.plan = plan
        links = dict.fromkeys(range(len(placement.replicas)), self.outbox)
        self.lanes = [self._lane(Route(placement, n, 0), options, links) for n in placement.workers[worker]]
        schedule = plan.build_schedule()
        self.row = PipelineRow(self.lanes, schedule.rows[worker], plan.weights or "flush", schedule.rows[0])

    def _lane(self, route: Route, options: TrainingOptions, links: dict[int, Any]) -> Lane:
        torch.manual_seed(route.stage)
        stage = Stage([nn.Linear(2, 2)], route.stage, route.stage, 0, CPU)
        arena = Arena(trainable_parameters(stage))
        trained = TrainedStage(stage, 0, options.optimizer, None, None, arena, self.plan)
        port = Port(route, self.mailbox, links)
        notice = NonfiniteNotice(World(10), route.placement, True)
        update = Update(trained, route, {}, options, port, None, notice)
        overlaps = self.plan.weights in ("vertical-sync", "double-buffer")
        return Lane(trained, route, port, Compute(trained, route, options, port, None), update, overlaps)

    def start(self, batch: int, micro_batches: int | None = None) -> None:
        m = micro_batches or self.plan.micro_batches
        x = torch.ones(m, 2)
        self.row.start(Work(batch, m, split(x, m), split(x, m), LossWeights([1 / m] * m, m)))

    def deliver(self, kind: Message, batch: int, m: int, value: Any, source: int, target: int) -> None:
        self.mailbox.put(Key(kind, 0, source, target, batch, m), value)

    def steps(self, queue: Queue) -> list[str]:
        """The steps of a queue, taken out of it."""
        found = []
        while queue.head is not None:
            found.append(f"{queue.head.stage}:{queue.head}")
            queue.pop()
        return found

    def run(self, queue: Queue) -> str:
        lane, step = queue.next
        assert lane.is_ready(step)
        lane.advance(step)
        queue.pop()
        return str(step)


def test_a_batch_queues_its_row_of_the_schedule() -> None:
    bench = Bench(Plan(stages=2, micro_batches=3, schedule="1f1b"), 0)
    bench.start(7)
    assert bench.steps(bench.row.computing) == [
        f"0:{s} of batch 7" for s in ("F0", "F1", "B0", "F2", "B1", "B2")
    ]


def test_a_short_batch_leaves_out_the_micro_batches_that_it_lacks() -> None:
    bench = Bench(Plan(stages=2, micro_batches=3, schedule="1f1b"), 0)
    bench.start(0, micro_batches=2)
    assert bench.steps(bench.row.computing) == [f"0:{s} of batch 0" for s in ("F0", "F1", "B0", "B1")]


def test_a_worker_with_several_stages_queues_them_as_its_row_mixes_them() -> None:
    plan = Plan(stages=4, micro_batches=2, schedule="interleaved-1f1b")
    bench = Bench(plan, 0)
    bench.start(0)
    row = [
        f"{a.stage}:{a.kind.value}{a.micro_batch} of batch 0"
        for a in plan.build_schedule().rows[0]
        if a.kind != "U"
    ]
    assert bench.steps(bench.row.computing) == row


def test_without_a_flush_a_batch_queues_what_is_certain_and_the_end_the_rest() -> None:
    bench = Bench(Plan(stages=2, schedule="pipedream"), 0)
    bench.start(0)
    assert bench.steps(bench.row.computing) == ["0:F0 of batch 0"]
    bench.start(1)
    assert bench.steps(bench.row.computing) == ["0:F0 of batch 1", "0:B0 of batch 0"]
    bench.row.drain()
    assert bench.steps(bench.row.computing) == ["0:B0 of batch 1"]


def test_a_step_is_ready_when_its_messages_are_there() -> None:
    bench = Bench(Plan(stages=2, schedule="1f1b"), 1)
    bench.start(0)
    lane, head = bench.row.computing.next
    assert not lane.is_ready(head)
    assert lane.missing(head) == [Key(Message.ACTIVATION, 0, 0, 1, 0, 0)]
    bench.deliver(Message.ACTIVATION, 0, 0, torch.ones(1, 2, requires_grad=True), 0, 1)
    assert lane.is_ready(head)
    assert lane.missing(head) == []


def test_an_update_is_queued_behind_the_last_backward_of_its_batch() -> None:
    bench = Bench(Plan(stages=1, micro_batches=2, schedule="1f1b"), 0)
    bench.start(0)
    updates = bench.lanes[0].updates
    for expected in ("F0", "B0", "F1", "B1"):
        assert updates.head is None
        assert bench.run(bench.row.computing) == f"{expected} of batch 0"
    assert bench.run(updates) == "U of batch 0"
    assert bench.lanes[0].has_ended(0)
    assert bench.lanes[0].oldest_batch == 0
    assert bench.lanes[0].finish(0).outcome.dim() == 0
    assert bench.lanes[0].oldest_batch is None


def two_batches_in_flight(weights: str) -> Bench:
    """The last of two stages, of which batch 0 has only its update left while batch 1 has its inputs."""
    bench = Bench(Plan(stages=2, micro_batches=2, schedule="pipedream-2bw", weights=weights), 1)
    for batch in (0, 1):
        bench.start(batch)
        for m in (0, 1):
            bench.deliver(Message.ACTIVATION, batch, m, torch.ones(1, 2, requires_grad=True), 0, 1)
    for _ in range(4):
        bench.run(bench.row.computing)
    return bench


@pytest.mark.parametrize("weights", ["vertical-sync", "double-buffer"])
def test_forwards_go_on_beside_an_update_that_no_batch_in_flight_needs(weights: str) -> None:
    bench = two_batches_in_flight(weights)
    assert bench.run(bench.row.computing) == "F0 of batch 1"
    assert bench.run(bench.row.computing) == "B0 of batch 1"
    before = bench.lanes[0].trained.arena.weights[0].clone()
    assert bench.run(bench.lanes[0].updates) == "U of batch 0"
    assert not torch.equal(before, bench.lanes[0].trained.arena.weights[0])


def test_a_batch_that_runs_on_the_newest_weights_waits_for_the_update_before() -> None:
    bench = two_batches_in_flight("stash")
    lane, head = bench.row.computing.next
    assert str(head) == "F0 of batch 1"
    assert not lane.is_ready(head)
    bench.run(bench.lanes[0].updates)
    assert lane.is_ready(head)


def test_what_a_stage_computes_goes_to_its_neighbours() -> None:
    bench = Bench(Plan(stages=3, schedule="1f1b"), 1)
    bench.start(0)
    bench.deliver(Message.ACTIVATION, 0, 0, torch.ones(1, 2, requires_grad=True), 0, 1)
    bench.run(bench.row.computing)
    loss = torch.tensor(0.5, dtype=torch.float64)
    bench.deliver(Message.GRADIENT, 0, 0, [torch.ones(1, 2), loss], 2, 1)
    bench.run(bench.row.computing)
    assert bench.outbox.sent == [
        Key(Message.ACTIVATION, 0, 1, 2, 0, 0),
        Key(Message.GRADIENT, 0, 1, 0, 0, 0),
    ]
    bench.run(bench.lanes[0].updates)
    assert bench.lanes[0].finish(0).outcome is loss


def test_backwards_and_updates_go_before_forwards_and_older_batches_first() -> None:
    bench = Bench(Plan(stages=1, micro_batches=2, schedule="all-forward-all-backward"), 0)
    bench.start(3)
    _, forward = bench.row.computing.next
    for _ in range(2):
        bench.run(bench.row.computing)
    _, backward = bench.row.computing.next
    for _ in range(2):
        bench.run(bench.row.computing)
    _, update = bench.lanes[0].updates.next
    assert max(backward.priority, update.priority) < forward.priority
    assert backward.priority < backward._replace(batch=4).priority
