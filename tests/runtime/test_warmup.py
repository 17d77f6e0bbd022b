"""``Plan(warmup_rounds=...)`` without a flush: the first batches run one by one, on the newest weights."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, rules
from tests.runner import run
from tests.runtime.cases import adamw, language_model, momentum, token_batches, unequal

LOSS = nn.CrossEntropyLoss()
BATCHES = token_batches(9, 8)
LATE: list[dict[str, Any]] = [
    {"schedule": "pipedream"},
    {"schedule": "pipedream", "weights": "predicted"},
    {"schedule": "pipedream", "weights": "vertical-sync", "correction": "error-feedback"},
    {"schedule": "pipedream-2bw"},
    {"schedule": "pipedream-2bw", "correction": "predicted"},
    {"schedule": "pipedream-2bw", "correction": "error-feedback"},
    {"schedule": "pipedream-2bw", "correction": "nesterov"},
]


def train(K: int, drained: int = 0, optimizer: Any = adamw, **options: Any) -> list[float]:
    """Return the losses; ``drained``: after each of so many batches the caller drains the pipeline."""
    losses = []
    plan = Plan(stages=K, micro_batches=4, **options)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=optimizer, timeout_s=60) as p:
        for batch in BATCHES[:drained]:
            losses += [r.loss for r in p.train([batch])]
            p.drain()
        return losses + [r.loss for r in p.train(BATCHES[drained:])]


@pytest.mark.parametrize("options", LATE, ids=str)
@pytest.mark.parametrize("K", [1, 3])
def test_a_warm_up_of_all_batches_is_one_device(K: int, options: dict[str, Any]) -> None:
    assert unequal(train(K, warmup_rounds=9, **options), train(1, schedule="1f1b")) < 1e-10


@pytest.mark.parametrize("options", LATE[:2], ids=str)
def test_it_goes_on_as_after_a_drain(options: dict[str, Any]) -> None:
    assert train(3, warmup_rounds=4, **options) == train(3, drained=4, **options)


@pytest.mark.ranks
@pytest.mark.parametrize("options", LATE, ids=str)
def test_on_ranks_as_in_one_process(options: dict[str, Any]) -> None:
    expected = train(2, warmup_rounds=4, **options)
    for found in run(2, train, K=2, warmup_rounds=4, **options):
        assert found == expected


@pytest.mark.parametrize("corrects", [False, True])
def test_2bw_by_hand(corrects: bool) -> None:
    """Batch j on version j in the warm-up, then on j - 1; the step before is known from the second late one on."""
    model, losses = language_model(), []
    optimizer = momentum(model.parameters())
    weights = list(dict.fromkeys(model.parameters()))
    versions, last = [copy.deepcopy(model.state_dict())], None
    for j, (x, y) in enumerate(BATCHES):
        model.load_state_dict(versions[j if j < 4 else j - 1])
        loss = LOSS(model(x), y)
        losses.append(float(loss))
        grads = torch.autograd.grad(loss, weights)
        model.load_state_dict(versions[j])
        before = [w.detach().clone() for w in weights]
        for w, g in zip(weights, grads):
            w.grad = g
        optimizer.step()
        if corrects and j >= 4:
            steps = [w.detach() - b for w, b in zip(weights, before)]
            with torch.no_grad():
                for w, d, u in zip(weights, steps, last or steps):
                    w += d - u
            last = steps
        versions.append(copy.deepcopy(model.state_dict()))
    correction = "error-feedback" if corrects else None
    plan: dict[str, Any] = {"schedule": "pipedream-2bw", "correction": correction, "warmup_rounds": 4}
    assert unequal(train(2, optimizer=momentum, **plan), losses) < 1e-10


@pytest.mark.parametrize("options", [*LATE, {"pipelines": 2}, {"pipelines": 2, "staleness": 0}], ids=str)
def test_it_resumes_within_and_behind_the_warm_up(options: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(stages=2, micro_batches=4, warmup_rounds=4, **options)
    made: dict[str, Any] = {"loss_fn": LOSS, "optimizer": adamw, "timeout_s": 60}
    with Pipeline(language_model(), plan, **made) as p:
        whole = [r.loss for r in p.train(BATCHES[:2])]
        p.drain()
        whole += [r.loss for r in p.train(BATCHES[2:])]
    with Pipeline(language_model(), plan, **made) as p:
        losses = [r.loss for r in p.train(BATCHES[:2])]
        p.save(tmp_path / "two")
    with Pipeline(language_model(), plan, **made) as p:
        p.load(tmp_path / "two")
        losses += [r.loss for r in p.train(BATCHES[2:])]
    assert losses == whole


def test_which_plans_have_a_warm_up_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runpy.run_path(rules.__file__)["WARMUP_ROUNDS"] == 100
    monkeypatch.setattr(rules, "WARMUP_ROUNDS", 7)
    assert Plan(pipelines=2).warmup_rounds == Plan(pipelines=3, staleness=1).warmup_rounds == 7
    assert Plan.from_json(Plan(pipelines=2).to_json()).warmup_rounds == 7
    assert Plan(pipelines=2, warmup_rounds=0).warmup_rounds == 0
    others: list[dict[str, Any]] = [
        {},
        {"pipelines": 2, "staleness": 0},
        {"pipelines": 2, "staleness": "asynchronous"},
        {"pipelines": 2, "rule": "avgpipe"},
        {"pipelines": 2, "batch": "per-pipeline"},
        {"stages": 2, "schedule": "pipedream", "micro_batches": 2},
    ]
    assert [Plan(**options).warmup_rounds for options in others] == [0] * 6


def test_the_first_batches_of_a_default_plan_are_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "WARMUP_ROUNDS", 4)
    default = train(2, pipelines=2)
    assert unequal(default[:5], train(1, schedule="1f1b")[:5]) < 1e-10
    assert unequal(default, train(2, pipelines=2, staleness=0)) > 1e-6


@pytest.mark.ranks
def test_the_first_batches_of_pipelines_on_workers_of_their_own_are_one_device() -> None:
    expected = train(2, pipelines=2, warmup_rounds=4)
    for found in run(4, train, K=2, pipelines=2, warmup_rounds=4, spread=True):
        assert unequal(found, expected) < 1e-10


def test_which_plans_have_no_warm_up() -> None:
    assert Plan(warmup_rounds=3).warmup_rounds == 3  # nothing to do
    with pytest.raises(ValueError, match="only rule 'mean-gradient' can begin with rounds of staleness 0"):
        Plan(pipelines=2, rule="easgd", warmup_rounds=3)
