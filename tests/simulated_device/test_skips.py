"""Updates that are left out on a device are those that the CPU leaves out, and the host waits for none of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import avgpipe.runtime.loss_scale
from avgpipe import Pipeline, Plan
from tests.options import grouped
from tests.runtime.test_loss_scale import Bursts
from tests.simulated_device import simulate
from tests.simulated_device.training import Results, adam, batches_for, differences, on_host, sgd, small_model

COUNT = 10
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adam": adam,
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "scaled": {"loss_scale": "dynamic"},
    "scaled, without a trace": {"loss_scale": "dynamic", "skip_nonfinite": True},
    "scaled, clipped": {"loss_scale": "dynamic", "clip_grad_norm": 0.05},
}
TWO = {"stages": 2, "pipelines": 2, "micro_batches": 2}
PLANS: dict[str, dict[str, Any]] = {
    "elastic, staleness 1": {**TWO, "batch": "per-pipeline", "staleness": 1},
    "elastic, staleness 0": {**TWO, "batch": "per-pipeline", "staleness": 0},
    "easgd": {**TWO, "batch": "per-pipeline", "rule": "easgd"},
    "one": {"stages": 2, "micro_batches": 2},
    "double buffer": {"stages": 2, "micro_batches": 2, "schedule": "pipedream-2bw"},
}


def model() -> nn.Sequential:
    """Gradients of the first stage overflow where the scale of the loss is high."""
    layers = list(small_model())
    return nn.Sequential(*layers[:4], Bursts(64.0), *layers[4:])


def train(plan: Plan, device: str, sim: Any = None, **options: Any) -> tuple[Results, list[int]]:
    """Return results, and how often the host waited from each batch's to the next."""
    chosen = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": sgd, **options}
    grows_soon = mock.patch.object(avgpipe.runtime.loss_scale, "GROWTH_INTERVAL", 3)
    with grows_soon, Pipeline(model(), plan, **grouped(device=device, timeout_s=60, **chosen)) as p:
        results, waits = [], []
        for r in p.train(batches_for(plan, COUNT)):
            norm = -1.0 if r.grad_norm is None or not math.isfinite(r.grad_norm) else r.grad_norm
            results.append([r.loss, norm, float(r.skipped)])
            waits.append(sim.counters.host_waits if sim is not None else 0)
        held = [t.loss_scale for t in p._session.worker.trained.values() if t.loss_scale is not None]
        scales = [scale.state_dict() for scale in held]
        found = {"results": results, "scales": scales, "skipped": p.skipped_updates, "state": p.state_dict()}
        return on_host(found), [later - earlier for earlier, later in pairwise(waits)]


def compare(plan: Plan, **options: Any) -> list[int]:
    """Compare a device, in several orders, with the CPU; return how often the host waited in the last of them."""
    expected, _ = train(plan, "cpu", **options)
    assert COUNT > expected[".skipped"] / plan.pipelines > 0
    waits = []
    for policy, seed in (("late", 0), ("random", 1), ("random", 2)):
        with simulate(policy, seed) as sim:
            found, waits = train(plan, "sim:0", sim, **options)
        assert differences(found, expected) == [], (plan, policy, seed)
    return waits


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", [name for name in PLANS if "pipelines" in PLANS[name]])
def test_pipelines_leave_out_the_same_without_a_wait(name: str, optimizer: str, options: str) -> None:
    waits = compare(Plan(**PLANS[name]), optimizer=OPTIMIZERS[optimizer], **OPTIONS[options])
    assert waits == [1] * (COUNT - 1)  # the loss


@pytest.mark.parametrize("optimizer", ["fused sgd", "fused adam"])
@pytest.mark.parametrize("name", ["one", "double buffer"])
def test_so_does_one_with_a_fused_optimizer(name: str, optimizer: str) -> None:
    waits = compare(Plan(**PLANS[name]), optimizer=OPTIMIZERS[optimizer], **OPTIONS["scaled"])
    assert waits[-2:] == [1, 1]
    if optimizer == "fused adam":
        assert waits == [1] * (COUNT - 1)  # a momentum's first step is one that the host must know


@pytest.mark.parametrize("optimizer", ["fused sgd", "fused adam"])
def test_so_do_pipelines_that_share_a_step(optimizer: str) -> None:
    """Of each pipeline's share the host reads a loss."""
    plan = Plan(**TWO, staleness=0)
    waits = compare(plan, optimizer=OPTIMIZERS[optimizer], **OPTIONS["scaled, without a trace"])
    assert waits[-2:] == [2, 2]
    if optimizer == "fused adam":
        assert waits == [2] * (COUNT - 1)


def test_an_optimizer_that_cannot_leave_a_step_out_has_the_host_wait() -> None:
    """Two stages ask for the norm, beside the loss."""
    assert compare(Plan(**PLANS["one"]), optimizer=adam, **OPTIONS["scaled"])[:-1] == [3] * (COUNT - 2)


@pytest.mark.parametrize("name", ["elastic, staleness 1", "one"])
def test_a_run_goes_on_with_what_the_device_has_counted(name: str, tmp_path: Any) -> None:
    plan, batches = Plan(**PLANS[name]), batches_for(Plan(**PLANS[name]), COUNT)
    options = {"loss_fn": nn.CrossEntropyLoss(), "timeout_s": 60, "optimizer": OPTIMIZERS["fused adam"]}

    def run(first: str, then: str) -> Results:
        folder = tmp_path / f"{first}{then}"
        with Pipeline(model(), plan, **grouped(device=first, **options, **OPTIONS["scaled"])) as p:
            list(p.train(batches[:6]))
            p.save(folder)
        with Pipeline(model(), plan, **grouped(device=then, **options, **OPTIONS["scaled"])) as p:
            p.load(folder)
            list(p.train(batches[6:]))
            return on_host({"skipped": p.skipped_updates, "state": p.state_dict()})

    with mock.patch.object(avgpipe.runtime.loss_scale, "GROWTH_INTERVAL", 3):
        expected = run("cpu", "cpu")
        assert 0 < expected[".skipped"] < COUNT
        for first, then in (("sim:0", "cpu"), ("cpu", "sim:0"), ("sim:0", "sim:0")):
            with simulate("random", 3):
                assert differences(run(first, then), expected) == [], (first, then)
