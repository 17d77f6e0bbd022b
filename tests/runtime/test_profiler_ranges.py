"""torch.profiler sees the runtime's actions as ranges, and only it pays for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from avgpipe import Pipeline, Plan
from avgpipe.runtime import scheduler


def pipeline():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    plan = Plan(stages=2, pipelines=2, micro_batches=4)
    return Pipeline(layers, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def batches(count):
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=draw), torch.randn(8, 4, generator=draw)) for _ in range(count)]


def test_each_action_is_a_range_of_its_stage_pipeline_and_batch():
    with pipeline() as trained:
        list(trained.train(batches(1)))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            list(trained.train(batches(2)))
    found = {event.key for event in profiled.key_averages() if event.key.startswith("avgpipe: ")}
    places = [f"stage {k} pipeline {i} batch {j}" for k in range(2) for i in range(2) for j in (1, 2)]
    actions = [f"{kind}{m}" for kind in "FB" for m in range(2)]
    assert {f"avgpipe: {action} {place}" for action in actions for place in places} <= found
    assert {f"avgpipe: U {place}" for place in places} <= found


def test_operators_lie_within_the_ranges():
    with pipeline() as trained, profile(activities=[ProfilerActivity.CPU]) as profiled:
        list(trained.train(batches(1)))
    forwards = [event for event in profiled.events() if event.name.startswith("avgpipe: F0 stage 0")]
    assert forwards
    inside = {child.name for event in forwards for child in event.cpu_children}
    assert any("linear" in name or "addmm" in name for name in inside)


def test_without_a_profiler_no_range_is_made(monkeypatch):
    def record_function(name):
        pytest.fail(f"a range was made: {name}")

    monkeypatch.setattr(scheduler, "record_function", record_function)
    with pipeline() as trained:
        assert len(list(trained.train(batches(2)))) == 2
