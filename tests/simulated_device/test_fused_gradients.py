"""FusedGradients on a device: the CPU's numbers, by fewer launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.options import grouped
from tests.runtime.test_fused_gradients import batches, model
from tests.simulated_device import simulate
from tests.simulated_device.training import Results, adam, differences, on_host


def train(plan: Plan, device: str, **options: Any) -> Results:
    chosen = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adam, "fuses_gradients": True, **options}
    with Pipeline(model(), plan, **grouped(device=device, timeout_s=60, **chosen)) as p:
        losses = [result.loss for result in p.train(batches())]
        return on_host({"losses": losses, "state": p.state_dict()})


PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batches": 4},
    "elastic": {"pipelines": 2, "micro_batches": 2, "batch": "per-pipeline"},
    "shared": {"pipelines": 2, "micro_batches": 4, "staleness": 0},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_device_adds_up_what_the_cpu_does(name: str) -> None:
    plan = Plan(stages=2, **PLANS[name])
    expected = train(plan, "cpu", clip_grad_norm=0.5)
    for policy, seed in (("late", 0), ("random", 1), ("starved", 2)):
        with simulate(policy, seed):
            found = train(plan, "sim:0", clip_grad_norm=0.5)
        assert differences(found, expected) == [], (policy, seed)


def launched(fuses: bool) -> Counter[str]:
    """What a batch of four micro-batches launches on two linear layers."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batch = torch.randn(8, 5), torch.randint(3, (8,))
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adam, "check": "off", "fuses_gradients": fuses}
    with (
        simulate("eager", keeps_log=True) as sim,
        Pipeline(layers, Plan(stages=1, micro_batches=4), **grouped(device="sim:0", **options)) as p,
    ):
        p.step(*batch)
        before = len(sim.log)
        p.step(*batch)
        return Counter(line.split()[-1] for line in sim.log[before:])


def test_no_gradient_of_a_weight_is_added_by_itself() -> None:
    fused, plain = launched(True), launched(False)
    added = 2 * 3  # weights, and micro-batches after the first
    assert plain["aten::add"] - fused["aten::add"] == added
    assert plain["aten::mm"] - fused["aten::mm"] == added
    assert fused["aten::addmm"] - plain["aten::addmm"] == added
