"""Our rows, all workers in one process and no time taken."""

import math

import pytest
import torch

from avgpipe.plan import Plan
from avgpipe_lab.bench.schedules import EmulatedStage, mean_loss
from benchmarks.common.rows import OurRow, PassingRow, Task, batches_in_flight, our_plan


def task(inputs=None):
    inputs = torch.ones(4, 16) if inputs is None else inputs
    return Task(inputs, torch.zeros(4, 1), mean_loss, lambda p: torch.optim.SGD(p, lr=1e-3))


def stages():
    return [EmulatedStage(0, 0), EmulatedStage(0, 0)]


@pytest.mark.parametrize("pipelines", [1, 2])
def test_a_row_trains_batch_after_batch(pipelines):
    row = PassingRow(lambda: OurRow("a row", task(), stages(), our_plan(2, 4, pipelines=pipelines)))
    assert (row.name, row.pipelines) == ("a row", pipelines)
    for _ in range(2):
        losses = list(row.losses(3))
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))
    assert {event.kind for event in row.timeline.events} >= {"F", "B", "U"}


def test_a_row_is_there_only_while_it_trains(monkeypatch):
    closed = []
    close = OurRow.close
    monkeypatch.setattr(OurRow, "close", lambda row: closed.append(row.pipeline.batches) or close(row))
    row = PassingRow(lambda: OurRow("a row", task(), stages(), our_plan(2, 4)))
    assert closed == [0]
    for _ in row.losses(2):
        assert closed == [0]
    assert closed == [0, 3]  # one batch before those that are asked for
    next(row.losses(2))  # abandoned
    assert closed[2:] == [2]


def test_the_loss_of_a_batch_in_parts_is_that_of_the_whole():
    still = task(torch.arange(64.0).reshape(4, 16))
    still = Task(still.inputs, still.targets, still.loss_fn, lambda p: torch.optim.SGD(p, lr=0.0))
    row = OurRow("a row", still, stages(), Plan.for_system("pipedream", stages=2), per_batch=4)
    assert list(row.losses(2)) == pytest.approx([31.5, 31.5])
    assert row.pipeline.batches == 8
    row.close()


@pytest.mark.parametrize(
    ("plan", "per_batch", "pipelines"),
    [
        (Plan(stages=6, schedule="pipedream"), 1, 6),
        (
            Plan(stages=6, schedule="pipedream"),
            2,
            4,
        ),  # 6 batches of the plan: 3, and what of a fourth is begun
        (Plan(stages=6, schedule="pipedream-2bw", micro_batches=6), 1, 2),
        (Plan(stages=6, schedule="pipedream-2bw", micro_batches=6, weights="stash"), 1, 2),
        (Plan(stages=1, schedule="pipedream"), 1, 1),
        # 12 batches are two rounds of the pipelines
        (Plan(stages=6, pipelines=6, batch="per-pipeline"), 4, 3),
        (Plan(stages=6, pipelines=6, batch="per-pipeline"), 5, 6),
        (Plan(stages=6, pipelines=6), 1, 2),
    ],
)
def test_batches_in_flight(plan, per_batch, pipelines):
    assert batches_in_flight(plan, per_batch) == pipelines
