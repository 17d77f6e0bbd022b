"""Training on the simulated device is training on the CPU, to the bit, whatever order the device works in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Plan
from avgpipe.systems import SYSTEMS
from tests.runtime.cases import token_batches
from tests.simulated_device import simulate
from tests.simulated_device.training import adam, batches_for, differences, on_host, pipeline_of, train

ORDERS = [("late", 0), ("random", 1), ("starved", 2)]


def compare(plan: Plan, orders: list[tuple[str, int]] = ORDERS, **options: Any) -> None:
    expected = train(plan, "cpu", **options)
    for policy, seed in orders:
        with simulate(policy, seed):
            found = train(plan, "sim:0", **options)
        assert differences(found, expected) == [], (plan, policy, seed)


def plan_of(system: str, workers: int, **options: Any) -> Plan:
    free = {"micro_batches": 3 * workers} if "micro_batches" not in SYSTEMS[system] else {}
    return Plan.for_system(system, stages=workers, **{**free, **options})


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system(system: str, workers: int) -> None:
    compare(plan_of(system, workers))


def shapes() -> list[Any]:
    """N, K, staleness, what a batch is, and the rule; some of them quick."""
    found = []
    for pipelines in (2, 3):
        for stages in (1, 2, 3):
            for staleness in (0, 1):
                for batch in ("global", "per-pipeline"):
                    for rule in (None, "avgpipe", "easgd"):
                        quick = stages == 2 and (pipelines == 2) == (batch == "per-pipeline")
                        marks = () if quick else pytest.mark.slow
                        found.append(pytest.param(pipelines, stages, staleness, batch, rule, marks=marks))
    return found


@pytest.mark.parametrize(("pipelines", "stages", "staleness", "batch", "rule"), shapes())
def test_every_shape(pipelines: int, stages: int, staleness: int, batch: str, rule: str | None) -> None:
    plan = Plan(
        stages=stages,
        pipelines=pipelines,
        micro_batches=3 if batch == "per-pipeline" else 6,
        staleness=staleness,
        batch=batch,
        rule=rule,
    )
    compare(plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_in_many_orders(system: str, seed: int) -> None:
    compare(plan_of(system, 2), [("random", seed), ("starved", seed)])


VARIANTS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": adam},
    "no clipping": {"clip_grad_norm": None},
    "skip": {"skip_nonfinite": True},
    "sum": {"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "clip_grad_norm": 0.1},
    "ignore": {"loss_fn": nn.CrossEntropyLoss(ignore_index=3)},
}


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option(variant: str, pipelines: int) -> None:
    plan = Plan(stages=2, pipelines=pipelines, micro_batches=2, batch="per-pipeline")
    compare(plan, **VARIANTS[variant])


@pytest.mark.parametrize("recompute", ["always", "except-last"])
def test_recomputation(recompute: str) -> None:
    compare(Plan(stages=2, pipelines=2, micro_batches=4, recompute=recompute))


@pytest.mark.parametrize("schedule", ["zero-bubble-v", "dualpipe-v", "looped-bfs", "interleaved-zero-bubble"])
def test_several_stages_on_a_worker_and_split_backwards(schedule: str) -> None:
    compare(Plan(stages=4, micro_batches=4, schedule=schedule))


GOING_ON: dict[str, Plan] = {
    "one": Plan(stages=2, micro_batches=2),
    "two": Plan(stages=2, pipelines=2, micro_batches=2),
    "elastic": Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline", rule="avgpipe"),
    "predicted": Plan(stages=2, schedule="pipedream", weights="predicted", micro_batches=2),
    "error-feedback": Plan(stages=2, schedule="pipedream-2bw", correction="error-feedback", micro_batches=2),
    "nesterov": Plan(stages=2, schedule="pipedream-2bw", correction="nesterov", micro_batches=2),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_evaluation_prediction_and_a_state_that_goes_on(name: str, tmp_path: Any) -> None:
    """Train, evaluate, predict, save, load into another pipeline, and train on.

    What was loaded is replaced in the first step by what lies in flat memory, while it may still be read.
    """
    plan = GOING_ON[name]
    batches = batches_for(plan)

    def run(device: str, folder: Any) -> Any:
        with pipeline_of(plan, device) as p:
            losses = [result.loss for result in p.train(batches)]
            evaluated = p.evaluate(batches[:2])
            predicted = p.predict(batches[-1][0])
            losses += [result.loss for result in p.train(batches)]
            p.save(folder)
        with pipeline_of(plan, device) as p:
            p.load(folder)
            losses += [result.loss for result in p.train(batches)]
            return on_host([losses, evaluated.loss, predicted, p.state_dict()])

    expected = run("cpu", tmp_path / "cpu")
    for policy, seed in [*ORDERS, ("random", 2)]:
        with simulate(policy, seed):
            assert differences(run("sim:0", tmp_path / f"{policy}{seed}"), expected) == [], (policy, seed)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_host_waits_for_nothing_but_losses(staleness: int) -> None:
    """While a pipeline trains, one value is read from the device for each batch."""
    plan = Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline", staleness=staleness)
    with simulate("late") as sim, pipeline_of(plan, "sim:0") as p:
        waits = [sim.counters.host_waits for _ in p.train(token_batches(8, 8))]
    assert [later - earlier for earlier, later in pairwise(waits)] == [1] * 7


def test_two_devices_train_side_by_side() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    expected = train(plan, "cpu")
    with simulate("random", 5):
        found = [train(plan, device) for device in ("sim:1", "sim:0")]
        torch.accelerator.set_device_index(0)
    assert [differences(each, expected) for each in found] == [[], []]


def test_what_a_step_tells_and_averages_are_the_hosts() -> None:
    """Accumulated, with metrics and an average of the reference, in orders that a device may choose."""

    def loss_fn(output: Any, target: Any) -> Any:
        loss = nn.functional.cross_entropy(output, target)
        return loss, {"largest": output.detach().max(), "one": 1.0}

    def told(device: str) -> Any:
        plan = Plan(stages=2, pipelines=2, micro_batches=2)
        options = {"loss_fn": loss_fn, "optimizer": adam, "accumulate": 2, "ema_decay": 0.5}
        with pipeline_of(plan, device, **options) as p:
            found = [(r.loss, r.metrics, r.grad_norm) for r in p.train(token_batches(7, 8))]
            return on_host({"results": found, "ema": p.state_dict("ema"), "state": p.state_dict()})

    expected = told("cpu")
    for seed in range(3):
        with simulate("random", seed):
            assert differences(told("sim:0"), expected) == []
    with simulate("late"):
        assert differences(told("sim:0"), expected) == []
