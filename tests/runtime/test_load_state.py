"""Weights from outside, into a pipeline that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import MovingAverage, Pipeline, Plan
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
)

LOSS = nn.CrossEntropyLoss()


def other_weights() -> dict[str, torch.Tensor]:
    return train_on_one_device(language_model(), token_batches(5, 9, seed=5), LOSS, adamw)[1]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without a state, so that training goes on as it begins."""
    return torch.optim.SGD(params, lr=0.1)


def check(plan: dict[str, Any], optimizer: Any = sgd) -> Any:
    batches, state = token_batches(8, 9), other_weights()
    model = language_model()
    model.load_state_dict(state)
    expected = train_pipeline(model, Plan(**plan), batches, LOSS, optimizer)
    with Pipeline(language_model(), Plan(**plan), loss_fn=LOSS, optimizer=optimizer) as p:
        list(p.train(batches[:4]))
        assert p.load_state_dict(state) == ([], [])
        for weights in ("reference", *range(p.plan.pipelines)):
            assert_same_state(p.state_dict(weights), state, 0)
        losses = [r.loss for r in p.train(batches)]
        assert_same_training((losses, p.state_dict()), expected)
    return losses


PLANS: list[dict[str, Any]] = [
    {"stages": 1, "micro_batches": 3},
    {"stages": 3, "micro_batches": 4},
    {"stages": 2, "micro_batches": 2, "schedule": "pipedream-2bw"},
    {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "rule": "avgpipe", "staleness": 0},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "rule": "avgpipe", "staleness": 1},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "rule": "mean-gradient", "staleness": 1},
    {"stages": 2, "micro_batches": 4, "pipelines": 2, "rule": "easgd", "staleness": 0, "period": 2},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_training_goes_on_from_them_as_from_the_beginning(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "plan"), [(2, PLANS[4]), (3, PLANS[3]), (2, {**PLANS[5], "stages": 1, "spread": True})]
)
def test_training_goes_on_from_them_on_ranks(ranks: int, plan: dict[str, Any]) -> None:
    found = run(ranks, check, plan=plan)
    assert found == found[:1] * ranks


def test_how_a_state_is_loaded_is_forgotten_by_the_next_one() -> None:
    with torch.device("meta"):
        other = nn.Linear(3, 2)
    with Pipeline(nn.Linear(3, 2), Plan(), loss_fn=LOSS, optimizer=sgd) as p:
        other.load_state_dict(p.state_dict(), assign=True)
        weight = other.weight
        other.load_state_dict(p.state_dict())
    assert other.weight is weight


def test_a_period_under_way_begins_at_them() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, rule="avgpipe", staleness=0, period=2)
    state = other_weights()
    with Pipeline(
        language_model(), plan, loss_fn=LOSS, optimizer=lambda params: torch.optim.SGD(params, lr=0)
    ) as p:
        list(p.train(token_batches(3, 8)))
        p.load_state_dict(state)
        list(p.train(token_batches(3, 8)))
        for weights in ("reference", 0, 1):
            assert_same_state(p.state_dict(weights), state)


def test_the_optimizer_stays_and_the_average_begins_again() -> None:
    state = other_weights()
    with Pipeline(
        language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=adamw, extensions=[MovingAverage(0.9)]
    ) as p:
        list(p.train(token_batches(3, 8)))
        p.load_state_dict(state)
        assert_same_state(p.state_dict("ema"), state, 0)
        list(p.train(token_batches(1, 8)))
        assert all(s["step"] == 4 for o in p.optimizers for s in o.state.values())
        assert_same_state(p.state_dict("ema"), p.state_dict(), 0)


class Lazy(Mapping[str, torch.Tensor]):
    """Reads a tensor when it is asked for it, and notes which."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values_, self.read = values, set()  # type: ignore[var-annotated]

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return self.values_[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values_

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def read_here() -> tuple[set[str], set[str]]:
    state = Lazy(other_weights())
    with Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=adamw, timeout_s=30) as p:
        p.load_state_dict(state)
        read = set(state.read)
        assert_same_state(p.state_dict(), state.values_, 0)
        stages = map(p._session.worker.placement.stage_of, p._session.worker.held)
        return read, {name for k in stages for entry in p._spec.model.entries[k] for name in entry.names}


@pytest.mark.ranks
def test_a_rank_reads_what_its_stages_need() -> None:
    for read, own in run(2, read_here):
        assert read <= own < set(other_weights())


def test_buffers_frozen_parameters_and_what_no_stage_holds_are_set() -> None:
    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.lin, self.norm, self.idle = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(2, 2)
            self.lin.weight.requires_grad_(False)
            for t in (*self.parameters(), self.norm.running_mean):
                t.data.fill_(value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.lin(x))

    state = Model(2.0).state_dict()
    with Pipeline(
        Model(1.0), Plan(stages=2, pipelines=2, micro_batches=2), loss_fn=LOSS, optimizer=momentum
    ) as p:
        p.load_state_dict({**state, "head._extra_state": torch.zeros(1)})
        assert_same_state(p.state_dict(), dict(state), 0)


def test_what_does_not_fit_is_refused_in_one_message_and_changes_nothing() -> None:
    state = other_weights()
    wrong = {**state, "1.bias": torch.zeros(3), "more": torch.zeros(2)}
    del wrong["4.lin.weight"]
    with Pipeline(language_model(), Plan(stages=3), loss_fn=LOSS, optimizer=adamw) as p:
        before = p.state_dict()
        message = r"missing: 4.lin.weight; unexpected: more; 1.bias has shape \(3,\) and not \(8,\)"
        with pytest.raises(
            ValueError,
            match=message,
        ):
            p.load_state_dict(wrong)
        assert_same_state(p.state_dict(), before, 0)
        with pytest.raises(ValueError, match=r"model: 1.bias has shape"):
            p.load_state_dict(wrong, strict=False)
        wrong["1.bias"] = state["1.bias"]
        assert p.load_state_dict(wrong, strict=False) == (["4.lin.weight"], ["more"])
        assert_same_state(p.state_dict(), {**state, "4.lin.weight": before["4.lin.weight"]}, 0)
        list(p.train(token_batches(2, 4)))


def refused_on_every_rank() -> str:
    state = other_weights()
    with Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=adamw, timeout_s=30) as p:
        with pytest.raises(ValueError, match="does not load") as raised:
            p.load_state_dict({**state, "1.bias": torch.zeros(3)})
        list(p.train(token_batches(2, 4)))
        return str(raised.value)


@pytest.mark.ranks
def test_every_rank_refuses_what_one_of_them_cannot_load() -> None:
    first, second = run(2, refused_on_every_rank)
    assert first == second
    assert "1.bias has shape (3,)" in first
