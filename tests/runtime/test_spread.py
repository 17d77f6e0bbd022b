"""Pipelines on workers of their own do what they do on shared ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.runner import run
from tests.runtime.cases import adamw, assert_same_state, language_model, token_batches, unequal
from tests.systems.test_semantics import normed_model, signal_batches

SHAPES: list[dict[str, Any]] = [
    {"stages": 1, "pipelines": 2, "batch": "per-pipeline"},
    {"stages": 1, "pipelines": 3, "batch": "per-pipeline", "rule": "easgd", "period": 2},
    {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "staleness": 0, "micro_batches": 2},
    {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "replication": [2, 1], "micro_batches": 3},
    {
        "stages": 4,
        "pipelines": 2,
        "batch": "per-pipeline",
        "schedule": "interleaved-1f1b",
        "micro_batches": 2,
    },
    {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "schedule": "zero-bubble-v", "micro_batches": 3},
    {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "schedule": "dualpipe-v", "micro_batches": 3},
]


def trained(kind: str, options: dict[str, Any], folder: str | None = None, **others: Any) -> Any:
    """Losses, the last of them after a checkpoint is loaded, evaluations, predictions and every pipeline's weights."""
    model = language_model() if kind == "tied" else normed_model()
    batches = token_batches(9, 9, 5) if kind == "tied" else signal_batches(9, 9, 5)

    def make() -> Pipeline:
        return Pipeline(
            model,
            Plan(**options),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=adamw,
            clip_grad_norm=0.5,
            timeout_s=60,
            **others,
        )

    with make() as p:
        losses = [r.loss for r in p.train(batches[:5])]
        seen = [p.evaluate(batches[:2]).loss, p.evaluate(batches[:2], weights=1).loss]
        if folder is not None:
            p.save(folder)
        losses += [r.loss for r in p.train(batches[5:])]
        output = p.predict(batches[0][0])
        states = [p.state_dict(), *(p.state_dict(weights=i) for i in range(p.plan.pipelines))]
    if folder is not None:
        with make() as p:
            p.load(folder)
            assert [r.loss for r in p.train(batches[5:])] == losses[5:]
    return losses + seen, output, states


def same(found: Any, expected: Any) -> None:
    assert unequal(found[0], expected[0]) < 1e-10
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(found[2], expected[2], strict=True):
        assert_same_state(mine, theirs)


@pytest.mark.grid(6)
@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["tied", "normed"])
def test_in_one_process(kind: str, options: dict[str, Any], tmp_path: Any) -> None:
    same(trained(kind, {**options, "spread": True}, str(tmp_path / "c")), trained(kind, options))


def on_ranks(options: dict[str, Any], folder: str) -> bool:
    for kind in ("tied", "normed"):
        same(trained(kind, {**options, "spread": True}, f"{folder}/{kind}"), _alone(kind, options))
    return True


def _alone(kind: str, options: dict[str, Any]) -> Any:
    """The same in this process, as if there were no others."""
    import torch.distributed as dist

    is_initialized, dist.is_initialized = dist.is_initialized, lambda: False
    import os

    rank = os.environ.pop("RANK")
    try:
        return trained(kind, options)
    finally:
        dist.is_initialized = is_initialized
        os.environ["RANK"] = rank


@pytest.mark.promise(0)
@pytest.mark.parametrize("options", [SHAPES[1], SHAPES[2], SHAPES[3]], ids=str)
def test_on_ranks(options: dict[str, Any], tmp_path: Any) -> None:
    workers = Plan(**options, spread=True).workers
    assert run(workers, on_ranks, options=options, folder=str(tmp_path), timeout_s=110) == [True] * workers


def test_a_checkpoint_moves_between_spread_and_shared_pipelines(tmp_path: Any) -> None:
    options: dict[str, Any] = {"stages": 2, "pipelines": 2, "batch": "per-pipeline", "micro_batches": 2}
    batches = token_batches(6, 9)
    for n, (before, after) in enumerate([(True, False), (False, True)]):
        states = []
        for spread in (before, after):
            plan = Plan(**options, spread=spread)
            with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw) as p:
                if spread == before:
                    list(p.train(batches))
                    p.save(tmp_path / str(n))
                else:
                    p.load(tmp_path / str(n))
                states.append([p.state_dict(), p.state_dict(weights=0), p.state_dict(weights=1)])
        for mine, theirs in zip(*states):
            assert_same_state(mine, theirs, bound=0)
