"""Trainings on several ranks, as GPUs of their own would be, that are hard to get right on shared queues."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.device import backend
from tests.options import grouped
from tests.runtime.cases import token_batches
from tests.simulated_device import Hardware, simulate
from tests.simulated_device.ranks import SimulatedWorld, run
from tests.simulated_device.training import Results, adam, differences, on_host


class Case(NamedTuple):
    """A plan on ``ranks``, with batches of so many samples.

    ``earlier``: streams that earlier pipelines of the process have taken from the pool, of which the first ones are now
    the lanes'.
    """

    ranks: int
    plan: Plan
    samples: list[int]
    earlier: int = 0


def _shared(pipelines: int, micro_batches: int, replication: tuple[int, ...], samples: list[int]) -> Case:
    plan = Plan(
        stages=len(replication),
        pipelines=pipelines,
        micro_batches=micro_batches,
        replication=replication,
        warmup_rounds=0,
    )
    return Case(sum(replication), plan, samples)


def _own(stages: int, pipelines: int, replication: tuple[int, ...] | None = None, **options: Any) -> Case:
    plan = Plan(
        stages=stages,
        pipelines=pipelines,
        micro_batches=4,
        replication=replication,
        batch="per-pipeline",
        warmup_rounds=0,
        **options,
    )
    return Case(sum(replication or [1] * stages), plan, [8] * 6)


# Of a short batch some pipelines have one micro-batch, and the second replica nothing to do for them: it comes to the
# sums of these before those of the others, which the first replica has earlier.
CASES: dict[str, Case] = {
    "replicas": _shared(2, 4, (2,), [3, 8, 3, 3, 8, 3]),
    "many replicas": _shared(4, 8, (2,), [5, 5, 16, 6, 5, 5]),
    "replicas and a stage": _shared(2, 4, (2, 1), [3, 8, 3, 3, 8, 3]),
    "a chain": _own(2, 4),
    "a long chain": _own(3, 2),
    "all forwards first": _own(2, 2, schedule="all-forward-all-backward"),
    "replicas of both": _own(2, 2, (2, 2)),
    "a stage and replicas": _own(2, 2, (1, 2)),
}

CASES["replicas after other pipelines"] = CASES["replicas and a stage"]._replace(earlier=32)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [
        nn.Embedding(11, 8),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(8, 8),
        nn.Linear(8, 11),
    ]
    return nn.Sequential(*layers).double()


def _pipeline(case: Case, device: str) -> Pipeline:
    # Without a comparison with the model, which waits for the device and loads kernels.
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adam, "clip_grad_norm": 0.5, "check": "off"}
    return Pipeline(model(), case.plan, **grouped(device=device, timeout_s=60, **options))


def _train(p: Pipeline, case: Case) -> Results:
    batches = [token_batches(1, samples, seed=n)[0] for n, samples in enumerate(case.samples)]
    losses = [result.loss for result in p.train(batches)]
    return on_host({"losses": losses, "state": p.state_dict()})


def on_one(case: Case) -> Results:
    """What the CPU makes of it."""
    with _quiet(), _pipeline(case, "cpu") as p:
        return _train(p, case)


def a_pipeline(case: Case, rank: int) -> Pipeline:
    """The part of a rank."""
    device = torch.device("sim", rank)
    taken = [torch.Stream(device) for _ in range(case.earlier)]
    backend.idle[device] += taken[: case.plan.pipelines]
    return _pipeline(case, str(device))


def on_ranks(case: Case, policy: str, seed: int, hardware: Hardware) -> list[Results]:
    """What each rank has in the end; ``Deadlock`` or RuntimeError where a device or all hosts wait for ever."""

    def host(rank: int, world: SimulatedWorld) -> Results:
        with a_pipeline(case, rank) as p:
            found = _train(p, case)
            world.barrier()
            world.machine.hosts.set_free()
            return found

    with simulate(policy, seed, hardware=hardware):
        return run(case.ranks, host, seed)


def _quiet() -> Any:
    """Without what is said of short batches."""
    return mock.patch.object(logging.getLogger("avgpipe"), "disabled", True)


def wrong(case: Case, policy: str, seed: int, hardware: Hardware, expected: Results) -> str:
    """What is wrong: "" if nothing is."""
    try:
        with _quiet():
            found = on_ranks(case, policy, seed, hardware)
    except RuntimeError as error:
        return str(error)
    return ", ".join(name for each in found for name in differences(each, expected))
