"""Bits that change by themselves are found and named, and looking for them leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import BitChecks, Pipeline, Plan
from avgpipe.errors import PipelineError
from avgpipe.model.context import Carry
from tests.isolated import Isolated
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import Trained, adamw, language_model, momentum, token_batches, train_pipeline
from tests.systems.test_semantics import normed_model, signal_batches

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """As micro-batches run twice on an accelerator only then."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Recurrent(nn.Module):
    """Adds what the batch before has left, and counts in a buffer that no statistics know."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.carry = nn.Linear(8, 8), Carry()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        out = torch.tanh(self.lin(x if before is None else x + before.mean(0)))
        self.carry.set(out.detach())
        self.calls += 1
        return out


def stateful_model() -> nn.Sequential:
    """Dropout, BatchNorm and what is carried on, on both of two stages."""
    torch.manual_seed(5)
    half = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), Recurrent(), nn.Dropout(0.3)]
    torch.manual_seed(6)
    return nn.Sequential(
        *half, nn.Linear(8, 8), nn.BatchNorm1d(8), Recurrent(), nn.Dropout(0.2), nn.Linear(8, 5)
    ).double()


def vectors(count: int, samples: int = 8) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(samples, 8, dtype=torch.float64, generator=draw),
            torch.randint(5, (samples,), generator=draw),
        )
        for _ in range(count)
    ]


def same_bits(ours: Trained, theirs: Trained) -> bool:
    same = all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())
    return ours[0] == theirs[0] and same


PLANS: list[dict[str, Any]] = [
    {"pipelines": 1},
    {"pipelines": 2},
    {"pipelines": 2, "staleness": 0},
    {"pipelines": 2, "batch": "per-pipeline", "rule": "avgpipe"},
    {"pipelines": 2, "batch": "per-pipeline", "staleness": 0},
    {"pipelines": 3, "batch": "per-pipeline", "rule": "easgd", "period": 2},
    {"pipelines": 2, "batch": "per-pipeline", "spread": True},
    {"replication": [2, 1]},
    {"schedule": "zero-bubble-v"},
    {"recompute": "except-last"},
    {"schedule": "pipedream-2bw"},
]


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_training_is_the_same_bit_for_bit(options: dict[str, Any]) -> None:
    stages = 4 if options.get("schedule") == "zero-bubble-v" else 2

    def trained(every: int | None) -> Trained:
        plan = Plan(stages=stages, micro_batches=2, **options)
        others = {"clip_grad_norm": 1.0, "ema_decay": 0.9, "verify_every": every}
        return train_pipeline(stateful_model(), plan, vectors(9), LOSS, adamw, **others)

    assert same_bits(trained(2), trained(None))


@pytest.mark.host
def test_random_numbers_of_the_caller_and_the_loader_stay_in_turn() -> None:
    def drawn(every: int | None) -> list[float]:
        torch.manual_seed(1)

        def loader() -> Any:
            for x, y in vectors(6):
                yield x + torch.rand(()), y

        plan = Plan(stages=2, micro_batches=2)
        with Pipeline(
            stateful_model(), plan, loss_fn=LOSS, optimizer=adamw, extensions=[BitChecks(every=every)]
        ) as p:
            return [r.loss + float(torch.rand(())) for r in p.train(loader())]

    assert drawn(2) == drawn(None)


def test_single_steps_are_verified_too() -> None:
    with Pipeline(
        language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum, extensions=[BitChecks(every=2)]
    ) as p:
        for x, y in token_batches(2, 8):
            p.step(x, y)
        spoil(p, 1)
        (x, y), *_ = token_batches(1, 8)
        p.step(x, y)
        with pytest.raises(PipelineError, match="has other bits on stage 1"):
            p.step(x, y)


def spoil(p: Pipeline, replica: int, pipeline: int = 0) -> None:
    """Flip the lowest bit of one number of the first layer's weight, in a stage's replica."""
    worker = p._session.worker
    place = worker.model.trainable[worker.placement.stage_of(replica)].index("0.weight")
    worker.trained[replica, pipeline].arena.tensors()[place].view(torch.int64).view(-1)[3] ^= 1


def found(p: Pipeline, batches: list[Any], spoils: Any, at: int = 3) -> str:
    """What the error says that training ends with, where something is spoiled after batch ``at``."""

    def train() -> None:
        for result in p.train(batches):
            if result.batch == at:
                p.drain()
                spoils()

    with pytest.raises(PipelineError) as caught:
        train()
    return str(caught.value)


def verified(options: dict[str, Any], model: nn.Module | None = None, **others: Any) -> Pipeline:
    plan = Plan(**{"stages": 2, "micro_batches": 2, **options})
    return Pipeline(
        model or language_model(),
        plan,
        **grouped(loss_fn=LOSS, optimizer=momentum, verify_every=2, timeout_s=30, **others),
    )


def test_a_bit_of_a_tied_weight() -> None:
    with verified({}) as p:
        text = found(p, token_batches(9, 8), lambda: spoil(p, 1))
    assert text.startswith(
        "after batch 5: '0.weight' of pipeline 0 has other bits on stage 1 (rank 0) than on stage 0 (rank 0). "
        "All was well after batch 3: memory or a device has changed bits"
    )


def test_a_bit_of_a_replica() -> None:
    with verified({"replication": [3, 1], "micro_batches": 3}, normed_model()) as p:
        text = found(p, signal_batches(9, 6, None), lambda: spoil(p, 1))
    assert (
        "after batch 5: '0.weight' of pipeline 0 has other bits on stage 0, replica 1 (rank 0) than on "
        in text
    )
    assert "than on stage 0, replica 0 (rank 0) and stage 0, replica 2 (rank 0)" in text


def test_a_bit_of_a_replicas_statistics() -> None:
    def spoils() -> None:
        norm = p._session.worker.trained[1, 0].stage.layers[1]
        norm.running_mean.view(torch.int64)[2] ^= 1 << 40  # which no later batch rounds away

    with verified({"replication": [2, 1]}, normed_model()) as p:
        text = found(p, signal_batches(9, 6, None), spoils)
    assert "'1.running_mean' of pipeline 0, stage 0 has other bits on " in text


def test_a_bit_of_a_frozen_parameter() -> None:
    def spoils() -> None:
        frozen = p._session.worker.trained[0, 1].stage.layers[1].weight
        frozen.data.view(torch.int64)[0, 0] ^= 1

    with verified({"pipelines": 2}, language_model(frozen=True)) as p:
        text = found(p, token_batches(9, 8), spoils)
    assert "'1.weight' of the model has other bits on stage 0 (rank 0)" in text


def on_ranks(options: dict[str, Any], rank: int, what: str) -> str:
    """Spoil something that one rank holds."""
    with verified(options) as p:

        def spoils() -> None:
            worker = p._session.worker
            if worker.world.rank != rank:
                return
            replica, pipeline = next(iter(worker.trained))
            if what == "weights":
                spoil(p, replica, pipeline)
            else:
                reference = worker.references[replica]
                assert reference is not None
                reference.z.flats[0].view(torch.int64)[3] ^= 1

        return found(p, token_batches(9, 8), spoils)


@pytest.mark.ranks
def test_a_bit_of_a_tied_weight_on_another_rank() -> None:
    for text in run(2, on_ranks, options={}, rank=1, what="weights"):
        assert "'0.weight' of pipeline 0 has other bits on stage 1 (rank 1) than on stage 0 (rank 0)" in text


@pytest.mark.ranks
def test_a_bit_of_a_reference_of_dedicated_pipelines() -> None:
    options = {"stages": 1, "pipelines": 3, "spread": True, "batch": "per-pipeline", "rule": "avgpipe"}
    for text in run(3, on_ranks, options=options, rank=1, what="reference"):
        assert (
            "'0.weight' of the reference has other bits on pipeline 1, stage 0 (rank 1) than on "
            "pipeline 0, stage 0 (rank 0) and pipeline 2, stage 0 (rank 2)"
        ) in text


def isolated(options: dict[str, Any], spoiled: int, what: str) -> list[float]:
    """Spoil the reference of a pipeline, or its copy of a tied weight, in its first life."""
    pipeline, group = (int(os.environ[n]) for n in ("AVGPIPE_PIPELINE", "AVGPIPE_GROUP"))
    data = token_batches(24, 12)
    losses = []
    with verified({"isolate": True, **options}) as p:
        for result in p.train(data[p.batches :]):
            losses.append(result.loss)
            if result.batch == 5 and pipeline == group == spoiled and what == "reference":
                reference = p._session.worker.references[p._session.worker.held[0]]
                assert reference is not None
                reference.z.flats[0].view(torch.int64)[3] ^= 1
            if (
                result.batch == 5
                and pipeline == group == spoiled
                and what == "weights"
                and 1 in p._session.worker.held
            ):
                spoil(p, 1, pipeline)
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"batch": "per-pipeline", "rule": "avgpipe"}], ids=str)
def test_of_isolated_pipelines_the_one_with_another_reference_is_lost_alone(options: dict[str, Any]) -> None:
    options = {"stages": 1, "pipelines": 3, **options}
    run = Isolated(3, 1, isolated, restarts=0, options=options, spoiled=1, what="reference")
    ((_, output),) = run.failures.values()
    assert (
        "PipelineError: the reference of pipeline 1 has other bits than that of pipeline 0 and 2 on stage 0"
        in output
    )
    assert {pipeline for pipeline, _ in run.results} == {0, 2}


@pytest.mark.ranks
def test_an_isolated_pipeline_compares_its_own_copies() -> None:
    options = {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "rule": "avgpipe"}
    run = Isolated(2, 2, isolated, restarts=0, options=options, spoiled=1, what="weights")
    outputs = [output for _, output in run.failures.values()]
    assert any("'0.weight' of pipeline 1 has other bits on stage" in output for output in outputs), outputs
    assert {pipeline for pipeline, _ in run.results} == {0}


# ---- the same again ----------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Computes something a little different every time, from its call ``first`` on: forward, or backward."""

    def __init__(self, where: str, first: int = 0) -> None:
        super().__init__()
        self.where, self.first, self.calls = where, first, 0
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noise = 1 + 1e-12 * max(0, self.calls - self.first)
        if self.where == "forward":
            return x * self.scale * noise
        x = x * self.scale
        if x.requires_grad:
            x.register_hook(lambda grad: grad * noise)
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_layer_that_is_not_deterministic_is_named(where: str) -> None:
    model = stateful_model()
    model[7] = nn.Sequential(Restless(where), nn.Dropout(0.1))
    with verified({}, model) as p, pytest.raises(PipelineError) as caught:
        list(p.train(vectors(4)))
    what = "the output of layer 7 (Sequential)" if where == "forward" else "the gradient of '7.0.scale'"
    text = str(caught.value)
    assert text.startswith(
        f"after batch 1: {what} has other bits when micro-batch 0 of batch 1 (pipeline 0) runs again on stage 1 (rank 0"
    )
    assert "Nothing was verified before" in text


def test_what_makes_its_own_noise_in_recomputation_is_named_too() -> None:
    model = stateful_model()
    model[7] = Restless("forward", first=10)
    with (
        verified({"recompute": "always"}, model) as p,
        pytest.raises(PipelineError, match=r"layer 7 \(Restless\)"),
    ):
        list(p.train(vectors(20)))


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused() -> None:
    for every in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"BitChecks\(every\)"):
            Pipeline(
                language_model(),
                Plan(),
                loss_fn=LOSS,
                optimizer=momentum,
                extensions=[BitChecks(every=every)],
            )  # type: ignore[arg-type]


def disagreeing() -> str:
    every = 2 + int(os.environ["RANK"])
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        Pipeline(
            language_model(),
            Plan(stages=2),
            loss_fn=LOSS,
            optimizer=momentum,
            extensions=[BitChecks(every=every)],
        )
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_disagree_are_refused() -> None:
    assert all("verify_every" in text for text in run(2, disagreeing))
