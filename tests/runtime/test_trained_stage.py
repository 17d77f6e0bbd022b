"""Rounds of staleness 0 that are one pass over memory train as steps in turn do, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import avgpipe_ext
from avgpipe import Pipeline, Plan
from avgpipe.elastic.reference import Reference
from tests.runner import run
from tests.runtime.cases import adamw, language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
OPTIMIZERS = {"momentum": momentum, "adamw": adamw}
HELD_OUT = token_batches(2, 6, seed=9)


class Idle(nn.Module):
    """Holds a parameter that never gets a gradient, and one that gets it only from some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sometimes if float(x.detach().sum()) > 0 else x


def model(dtype: torch.dtype) -> nn.Sequential:
    layers = list(language_model(dropout=0.1))
    return nn.Sequential(*layers[:2], Idle(), *layers[2:]).to(dtype)


def make(K: int, N: int, optimizer: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Pipeline:
    return Pipeline(
        model(dtype),
        Plan(stages=K, pipelines=N, batch="per-pipeline", micro_batches=2, staleness=0),
        loss_fn=LOSS,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        timeout_s=60,
        **options,
    )


def everything(p: Pipeline) -> list[Any]:
    """Weights of the reference and all pipelines, and what the optimizers remember."""
    states = [p.state_dict(), *(p.state_dict(weights=i) for i in range(p.plan.pipelines))]
    remembered = [
        value for opt in p.optimizers for s in opt.state_dict()["state"].values() if s for value in s.values()
    ]
    return [*(t.clone() for s in states for t in s.values()), *remembered]


def assert_bitwise(mine: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def train(K: int, N: int, optimizer: Any, together: bool, dtype: torch.dtype, clip: float | None) -> Any:
    joins = Reference._joins
    if not together:
        Reference._joins = property(lambda self: False)  # type: ignore[method-assign]
    try:
        with make(K, N, optimizer, dtype, clip_grad_norm=clip) as p:
            losses = [r.loss for r in p.train(token_batches(3 * N + 1, 6, last=3))]
            middle = everything(p)
            losses += [r.loss for r in p.train(token_batches(2 * N, 6, seed=5))]
            return losses, middle, everything(p)
    finally:
        Reference._joins = joins  # type: ignore[method-assign]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("K", "N"), [(1, 2), (2, 3)])
def test_trains_as_in_turn(K: int, N: int, name: str, clip: float | None) -> None:
    dtype = torch.float32 if K == 1 else torch.float64
    mine, theirs = (train(K, N, OPTIMIZERS[name], together, dtype, clip) for together in (True, False))
    assert mine[0] == theirs[0]
    assert_bitwise(mine[1], theirs[1])
    assert_bitwise(mine[2], theirs[2])


def on_two_ranks() -> Any:
    return [train(2, 2, adamw, together, torch.float32, 0.1) for together in (True, False)]


@pytest.mark.ranks
def test_trains_as_in_turn_on_two_ranks() -> None:
    for mine, theirs in run(2, on_two_ranks):
        assert mine[0] == theirs[0]
        assert_bitwise(mine[2], theirs[2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counted(name: str, own: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            names.append(name)
            return own(*args, **options)

        return call

    for name in ("elastic_round_", "elastic_adamw_", "elastic_pull_", "reference_apply_"):
        monkeypatch.setattr(avgpipe_ext, name, counted(name, getattr(avgpipe_ext, name)))
    return names


def pipeline(N: int = 2, **options: Any) -> Pipeline:
    """Of a model all of whose parameters get gradients."""
    plan = Plan(stages=2, pipelines=N, batch="per-pipeline", micro_batches=2, **{"staleness": 0, **options})
    return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw)


def test_a_round_is_one_call_for_each_stage(calls: list[str]) -> None:
    with pipeline(3) as p:
        list(p.train(token_batches(9, 6)))
        updates = [e for e in p.timeline().events if e.kind == "U"]
    assert calls == ["elastic_round_"] * 3 * 2
    assert {(e.stage, e.pipeline, e.batch) for e in updates} == {
        (k, j % 3, j) for k in range(2) for j in range(9)
    }
    assert len(updates) == 18


def test_staleness_1_steps_in_turn(calls: list[str]) -> None:
    with pipeline(staleness=1) as p:
        list(p.train(token_batches(4, 6)))
    assert "elastic_round_" not in calls


def test_a_look_in_the_middle_of_a_round_finds_the_steps_done(calls: list[str]) -> None:
    batches = token_batches(5, 6)
    with pipeline() as p, pipeline() as q:
        list(p.train(batches))
        assert calls == ["elastic_round_"] * 2 * 2  # the fifth batch waits
        before = {n: t.clone() for n, t in p.state_dict(weights=1).items()}
        assert calls == ["elastic_round_"] * 2 * 2
        p.state_dict(weights=0)
        assert calls[4:] == ["elastic_adamw_"] * 2
        assert all(torch.equal(t, p.state_dict(weights=1)[n]) for n, t in before.items())
        p.evaluate(HELD_OUT, weights=0)
        more = token_batches(3, 6, seed=4)
        losses = [r.loss for r in p.train(more)]
        list(q.train(batches))
        assert losses == [r.loss for r in q.train(more)]
        assert_bitwise(everything(p), everything(q))


def test_evaluation_in_the_middle_of_a_round_changes_nothing() -> None:
    ends = []
    for looks in (False, True):
        with pipeline(3) as p:
            for r in p.train(token_batches(11, 6)):
                if looks and r.batch in (0, 4, 8):
                    p.evaluate(HELD_OUT)
                    p.evaluate(HELD_OUT, weights=0)
            ends.append(everything(p))
    assert_bitwise(*ends)


@pytest.mark.parametrize("cut", [4, 5])
def test_a_checkpoint_holds_steps_that_waited(cut: int, tmp_path: Path) -> None:
    batches = token_batches(8, 6)
    with pipeline() as p:
        list(p.train(batches))
        whole = everything(p)
    with pipeline() as p:
        list(p.train(batches[:cut]))
        p.save(tmp_path / "c")
    with pipeline() as p:
        list(p.train(batches[:1]))  # a step that waits when the checkpoint is loaded
        p.load(tmp_path / "c")
        list(p.train(batches[cut:]))
        assert_bitwise(everything(p), whole)


def test_a_learning_rate_set_between_two_results_is_for_the_next_step() -> None:
    ends = []
    for looks in (False, True):
        with pipeline() as p:
            for r in p.train(token_batches(6, 6)):
                if looks:
                    assert p.optimizers[r.pipeline].state  # the step is done before
                p.optimizers[r.pipeline].param_groups[0]["lr"] = 0.01 / (r.batch + 1)
            ends.append(everything(p))
    assert_bitwise(*ends)
