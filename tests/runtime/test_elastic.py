"""N pipelines against a float64 emulation of elastic averaging that shares no code with the library."""

from __future__ import annotations

import copy
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.runtime.lane import Lane
from tests import runner
from tests.runtime.cases import adamw, assert_same_state, language_model, momentum, token_batches, unequal

OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def emulate(
    model: nn.Module,
    batches: list[Any],
    N: int,
    staleness: int,
    rule: str,
    alpha: float | None,
    period: int,
    optimizer: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Losses, reference and replicas after whole rounds, from the rules of algorithms.md, parameter by parameter."""
    if alpha is None:
        alpha = 1 / N if rule == "avgpipe" else 0.9 / N
    replicas = [copy.deepcopy(model) for _ in range(N)]
    reference = copy.deepcopy(model)
    opts = [optimizer(r.parameters()) for r in replicas]
    z = [p.data for p in reference.parameters()]
    losses = []
    for first in range(0, len(batches), N * period):
        begin = [[p.data.clone() for p in r.parameters()] for r in replicas]
        for step in range(period):
            for i in range(N):
                x, y = batches[first + step * N + i]
                opts[i].zero_grad()
                loss = nn.functional.cross_entropy(replicas[i](x), y)
                loss.backward()
                opts[i].step()
                losses.append((first + step * N + i, float(loss.detach())))
        xs = [[p.data for p in r.parameters()] for r in replicas]
        for n in range(len(z)):
            old = z[n].clone()
            d = [xs[i][n] - begin[i][n] for i in range(N)]
            if rule == "easgd":
                e = [alpha * (xs[i][n] - old) for i in range(N)]
                for i in range(N):
                    xs[i][n] -= e[i]
                z[n] += sum(e)
                continue
            z[n] += sum(d) / N
            for i in range(N):
                if staleness == 0:
                    xs[i][n] += alpha * (z[n] - xs[i][n])
                else:
                    xs[i][n] += alpha * (old - begin[i][n])
    return [loss for _, loss in sorted(losses)], reference.state_dict(), [r.state_dict() for r in replicas]


CASES = [
    {"N": 2, "staleness": 0},
    {"N": 2, "staleness": 1},
    {"N": 3, "staleness": 1, "optimizer": "adamw"},
    {"N": 3, "staleness": 0, "alpha": 0.7},
    {"N": 4, "staleness": 1, "period": 2},
    {"N": 2, "staleness": 0, "period": 3},
    {"N": 2, "staleness": 1, "rule": "easgd"},
    {"N": 3, "staleness": 0, "rule": "easgd", "optimizer": "adamw"},
]


def run(K: int, case: dict[str, Any], rounds: int = 6) -> Any:
    N, period = case["N"], case.get("period", 1)
    options = {name: case[name] for name in ("staleness", "alpha", "period", "rule") if name in case}
    batches = token_batches(N * rounds, 6)
    model = language_model()
    plan = Plan(stages=K, pipelines=N, batch="per-pipeline", micro_batches=3, **options)
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")]
    with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, timeout_s=60) as p:
        losses = [r.loss for r in p.train(batches)]
        states = [p.state_dict(), *(p.state_dict(weights=i) for i in range(N))]
    expected = emulate(
        model,
        batches,
        N,
        case["staleness"],
        case.get("rule", "avgpipe"),
        case.get("alpha"),
        period,
        optimizer,
    )
    return losses, states, expected


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("K", [1, 3])
def test_follows_the_rules_step_by_step(K: int, case: dict[str, Any]) -> None:
    losses, states, (expected_losses, reference, replicas) = run(K, case)
    assert unequal(losses, expected_losses) < 1e-10
    for ours, theirs in zip(states, [reference, *replicas], strict=True):
        assert_same_state(ours, theirs)


def delayed(K: int) -> list[Any]:
    """All cases with steps that take a random time, another on every run and rank."""
    dice = random.Random(os.urandom(8))
    advance = Lane.advance

    def late(lane: Lane, step: Any) -> None:
        time.sleep(dice.choice([0, 0, 0, 0.002, 0.005]))
        advance(lane, step)

    Lane.advance = late
    try:
        return [run(K, case) for case in CASES[:6]]
    finally:
        Lane.advance = advance


@pytest.mark.slow
@pytest.mark.ranks
def test_delays_change_nothing() -> None:
    ranks = [runner.run(2, delayed, K=2) for _ in range(2)]
    first = ranks[0][0]
    for rank in [*ranks[0], *ranks[1]]:
        for (losses, states, _), (losses0, states0, _) in zip(rank, first, strict=True):
            assert losses == losses0  # bitwise, and alike on all ranks
            for state, state0 in zip(states, states0, strict=True):
                assert all(torch.equal(state[name], state0[name]) for name in state0)
    for losses, states, (expected_losses, reference, replicas) in first:
        assert unequal(losses, expected_losses) < 1e-10
        for ours, theirs in zip(states, [reference, *replicas], strict=True):
            assert_same_state(ours, theirs)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loader_may_end_in_the_middle_of_a_round(staleness: int) -> None:
    """Two loaders whose lengths are no multiples of N train as one loader of all batches does."""
    batches = token_batches(10, 6)
    plan = Plan(stages=2, pipelines=3, batch="per-pipeline", micro_batches=2, staleness=staleness)
    ends = []
    for parts in ([batches], [batches[:4], batches[4:5], batches[5:]]):
        with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
            results = [r for part in parts for r in p.train(part)]
            assert [(r.batch, r.pipeline) for r in results] == [(j, j % 3) for j in range(10)]
            ends.append(([r.loss for r in results], p.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][n], ends[1][1][n]) for n in ends[0][1])


def test_asynchronous_learns_and_stays_finite() -> None:
    batches = token_batches(2, 8) * 40
    plan = Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=2, staleness="asynchronous")
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
        before = p.evaluate(batches[:2]).loss
        list(p.train(batches))
        assert p.evaluate(batches[:2]).loss < before
