"""The average of the weights over updates, kept stage by stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from avgpipe import MovingAverage, Pipeline, Plan, Precision
from avgpipe.elastic.versions import WeightAverage
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import adamw, assert_same_state, language_model, token_batches

LOSS = nn.CrossEntropyLoss()
DECAY = 0.7


def averaged_on_one_device(batches: list[Any]) -> dict[str, torch.Tensor]:
    """Return the state of torch's average of plain training."""
    model = language_model()
    optimizer, ema = adamw(model.parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for x, y in batches:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    state: dict[str, torch.Tensor] = ema.module.state_dict()
    return state


def pipeline(plan: dict[str, Any], **options: Any) -> Pipeline:
    return Pipeline(
        language_model(),
        Plan(**plan),
        **grouped(loss_fn=LOSS, optimizer=adamw, **{"ema_decay": DECAY, **options}),
    )


def check(plan: dict[str, Any]) -> bool:
    batches = token_batches(5, 9)
    with pipeline(plan) as p:
        list(p.train(batches))
        state, latest = p.state_dict("ema"), p.state_dict()
        predicted, evaluated = p.predict(batches[0][0], weights="ema"), p.evaluate(batches, weights="ema")
        assert_same_state(p.state_dict(), latest, 0)
    expected = averaged_on_one_device(batches)
    assert_same_state(state, expected)
    assert any(not torch.equal(state[name], latest[name]) for name in state)
    model = language_model()
    model.load_state_dict(expected)
    with torch.no_grad():
        x, y = (torch.cat(values) for values in zip(*batches))
        output = model.eval()(x)
    torch.testing.assert_close(predicted, output[:9], rtol=1e-10, atol=1e-10)
    assert abs(evaluated.loss - float(LOSS(output, y))) < 1e-10
    return True


PLANS: list[dict[str, Any]] = [
    {"stages": 1, "micro_batches": 3},
    {"stages": 3, "micro_batches": 4},
    {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "staleness": 0},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "staleness": 0, "spread": True},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_it_is_torchs_average_of_one_device(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "plan"), [(2, PLANS[3]), (3, PLANS[2]), (4, PLANS[4])], ids=["pipelines", "replicas", "spread"]
)
def test_it_is_torchs_average_on_ranks(ranks: int, plan: dict[str, Any]) -> None:
    assert all(run(ranks, check, plan=plan))


RULES: list[dict[str, Any]] = [
    {"rule": "avgpipe", "staleness": 0},
    {"rule": "avgpipe", "staleness": 1},
    {"rule": "easgd", "staleness": 0},
    {"rule": "mean-gradient", "staleness": 1},
    {"rule": "avgpipe", "staleness": 0, "batch": "per-pipeline"},
    {"rule": "avgpipe", "period": 2},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_averages_the_reference_after_each_of_its_moves(rule: dict[str, Any]) -> None:
    plan = {"stages": 2, "pipelines": 2, "micro_batches": 4, **rule}
    expected: dict[str, torch.Tensor] | None = None
    with pipeline(plan) as p:
        every = p.plan.period * p.plan.batches_per_round
        batches = token_batches(3 * every, 8)
        for j in range(0, len(batches), every):
            list(p.train(batches[j : j + every]))
            now = p.state_dict()
            if expected is not None:
                now = {name: expected[name].lerp(now[name], 1 - DECAY) for name in now}
            expected = now
        assert_same_state(p.state_dict("ema"), expected or {}, 1e-12)


def test_versions_of_weights_are_averaged_after_each_update() -> None:
    plan, batches = {"stages": 2, "micro_batches": 2}, token_batches(8, 8)
    one, two = [], []
    for found, K in ((one, 1), (two, 2)):
        with pipeline({**plan, "stages": K, "schedule": "pipedream-2bw"}) as p:
            list(p.train(batches))
            found.append(p.state_dict("ema"))
    assert_same_state(two[0], one[0])


@pytest.mark.parametrize("to", [PLANS[0], PLANS[1], PLANS[3]], ids=str)
@pytest.mark.parametrize("source", [PLANS[1], PLANS[3]], ids=str)
def test_a_checkpoint_keeps_it_for_any_layout(
    source: dict[str, Any], to: dict[str, Any], tmp_path: Path
) -> None:
    batches = token_batches(8, 9)
    with pipeline(source) as p:
        list(p.train(batches[:4]))
        p.save(tmp_path / "c")
        saved = p.state_dict("ema")
        list(p.train(batches[4:]))
        expected = p.state_dict("ema")
    with pipeline(to) as p:
        p.load(tmp_path / "c")
        assert_same_state(p.state_dict("ema"), saved, 0)
        list(p.train(batches[4:]))
        assert_same_state(p.state_dict("ema"), expected, 0 if source == to else 1e-10)


def test_a_checkpoint_without_it_begins_one_and_one_with_it_needs_none(tmp_path: Path) -> None:
    batches = token_batches(3, 9)
    with pipeline(PLANS[1], ema_decay=None) as p:
        list(p.train(batches))
        p.save(tmp_path / "without")
        latest = p.state_dict()
    with pipeline(PLANS[1]) as p:
        list(p.train(batches))
        p.load(tmp_path / "without")
        assert_same_state(p.state_dict("ema"), latest, 0)
        list(p.train(batches[:1]))
        assert_same_state(p.state_dict("ema"), p.state_dict(), 0)
        p.save(tmp_path / "with")
    with pipeline(PLANS[0], ema_decay=None) as p:
        p.load(tmp_path / "with")
        with pytest.raises(ValueError, match="weights='ema' needs a Pipeline with extensions="):
            p.state_dict("ema")


def test_weights_in_16_bits_are_averaged_in_32() -> None:
    decay, weights = 0.999, [torch.ones(4, dtype=torch.bfloat16)]
    ema = WeightAverage(weights, decay)
    ema.update(weights)
    for _ in range(100):
        ema.update([torch.full((4,), 2.0, dtype=torch.bfloat16)])
    torch.testing.assert_close(ema.flats[0], torch.full((4,), 2 - decay**100))
    assert ema.weights[0].dtype == torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    batch = torch.randn(4, 4).bfloat16(), torch.tensor([0, 1, 0, 1])
    plan = Plan(stages=2, micro_batches=2)
    with Pipeline(
        copy.deepcopy(model), plan, loss_fn=LOSS, optimizer=adamw, extensions=[MovingAverage(0.5)]
    ) as p:
        list(p.train([batch] * 3))
        assert p.predict(batch[0], weights="ema").dtype == torch.bfloat16
        assert {t.dtype for t in p.state_dict("ema").values()} == {torch.bfloat16}


def test_an_update_that_was_left_out_does_not_count() -> None:
    model = nn.Linear(2, 2)
    batches = [(torch.full((4, 2), x), torch.zeros(4, 2)) for x in (1.0, 2.0, float("nan"), 3.0)]

    def averaged(given: list[Any]) -> dict[str, torch.Tensor]:
        with Pipeline(
            [model],
            Plan(),
            loss_fn=nn.MSELoss(),
            optimizer=adamw,
            extensions=[MovingAverage(0.5), Precision(skip_nonfinite=True)],
        ) as p:
            list(p.train(given))
            return p.state_dict("ema")

    assert_same_state(averaged(batches), averaged(batches[:2] + batches[3:]), 0)


@pytest.mark.parametrize("wrong", [-0.1, 1, 1.5, True])
def test_a_decay_is_below_one(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"decay must be from 0 to below 1, .*not {wrong}"):
        pipeline({}, ema_decay=wrong)
