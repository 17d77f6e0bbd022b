"""Our rows, all workers in one process and no time taken."""

import math

import pytest
import torch

from avgpipe.bench.schedules.emulation import EmulatedStage, MeanLoss
from avgpipe.bench.schedules.our_plans import our_cases
from avgpipe.bench.schedules.our_rows import OurRow, our_row
from avgpipe.bench.schedules.rows import Task
from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.plan import Plan

SETTINGS = ScheduleSettings(
    stages=2, micro_batches=4, forward_s=0, backward_s=0, pipelines=(1, 2), only=("all",)
)


def task(inputs=None):
    inputs = torch.ones(4, 16) if inputs is None else inputs
    return Task(inputs, torch.zeros(4, 1), MeanLoss(), lambda p: torch.optim.SGD(p, lr=1e-3))


@pytest.mark.parametrize("case", our_cases(SETTINGS), ids=lambda case: case.name)
def test_every_row_trains_batch_after_batch(case):
    row = our_row(case, task(), SETTINGS)
    assert (row.name, row.pipelines) == (case.name, case.pipelines)
    for _ in range(2):
        losses = list(row.losses(3))
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))


def test_a_row_is_there_only_while_it_trains(monkeypatch):
    closed = []
    close = OurRow.close
    monkeypatch.setattr(OurRow, "close", lambda row: closed.append(row.pipeline.batches) or close(row))
    row = our_row(our_cases(SETTINGS)[0], task(), SETTINGS)
    assert closed == [0]
    for _ in row.losses(2):
        assert closed == [0]
    assert closed == [0, 3]  # one batch before those that are asked for
    next(row.losses(2))  # abandoned
    assert closed[2:] == [2]


def test_the_loss_of_a_batch_in_parts_is_that_of_the_whole():
    modules = [EmulatedStage(0, 0), EmulatedStage(0, 0)]
    still = task(torch.arange(64.0).reshape(4, 16))
    still = Task(still.inputs, still.targets, still.loss_fn, lambda p: torch.optim.SGD(p, lr=0.0))
    row = OurRow("a row", still, modules, Plan.for_system("pipedream", stages=2), per_batch=4)
    assert list(row.losses(2)) == pytest.approx([31.5, 31.5])
    assert row.pipeline.batches == 8
    row.close()


def test_what_a_pipeline_refuses_is_left_out_with_the_reason(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no such\nluck")

    monkeypatch.setattr("avgpipe.bench.schedules.our_rows.Pipeline", refuse)
    row = our_row(our_cases(SETTINGS)[0], task(), SETTINGS)
    assert (row.name, row.reason) == ("avgpipe 1f1b", "no such luck")
