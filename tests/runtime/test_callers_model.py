"""The model that was passed in is the caller's again once the Pipeline is made; freezing is asked of the Pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    token_batches,
)

LOSS = nn.CrossEntropyLoss()


def _sample(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """As one does with a sampling copy, a teacher, or an average of weights."""
    model.load_state_dict(state)
    model.eval().requires_grad_(False)


def _destroy(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert isinstance(model, nn.Sequential)
    del model[1:]


def _unfreeze(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    model.requires_grad_(True)


def _freeze_one(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    assert isinstance(model, nn.Sequential)
    model[1].requires_grad_(False)


def _run(touch: Callable[..., None] | None, plan: Plan, folder: Path, frozen: bool) -> Any:
    model, batches = language_model(frozen=frozen), token_batches(8, 8)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=adamw) as p:
        losses = [r.loss for r in p.train(batches[:3])]
        if touch is not None:
            touch(model, p.state_dict())
        states = [p.state_dict()]
        losses.append(p.evaluate(batches).loss)
        p.save(folder)
        losses += [r.loss for r in p.train(batches[3:5])]
        p.load(folder)
        losses += [r.loss for r in p.train(batches[5:])]
        states.append(p.state_dict())
    return losses, states


@pytest.mark.parametrize("touch", [_sample, _destroy, _unfreeze, _freeze_one])
@pytest.mark.parametrize(("K", "N"), [(1, 1), (2, 1), (3, 2)])
def test_what_is_done_to_the_callers_model_changes_nothing(
    K: int, N: int, touch: Callable[..., None], tmp_path: Path
) -> None:
    plan, frozen = Plan(stages=K, pipelines=N, micro_batches=2), touch is _unfreeze
    losses, states = _run(touch, plan, tmp_path / "touched", frozen)
    expected_losses, expected = _run(None, plan, tmp_path / "left", frozen)
    assert losses == expected_losses
    for ours, theirs in zip(states, expected):
        assert_same_state(ours, theirs, 0.0)


def touch_on_ranks(folder: str) -> bool:
    plan = Plan(stages=2, micro_batches=2)
    ours, theirs = (_run(touch, plan, Path(folder) / str(touch is None), False) for touch in (_sample, None))
    assert ours[0] == theirs[0]
    assert_same_state(ours[1][1], theirs[1][1], 0.0)
    return True


@pytest.mark.ranks
def test_what_is_done_to_the_callers_model_changes_nothing_on_ranks(tmp_path: Path) -> None:
    assert run(2, touch_on_ranks, folder=str(tmp_path)) == [True, True]


class Unused(nn.Module):
    """Has a parameter and a buffer that its forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.extra = nn.Parameter(torch.ones(2))
        self.register_buffer("note", torch.tensor([5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_what_no_stage_holds_is_what_it_was() -> None:
    model = Unused()
    with Pipeline(model, Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p:
        with torch.no_grad():
            model.extra.fill_(7)
        state = p.state_dict()
    assert list(state) == list(Unused().state_dict())
    assert state["extra"].tolist() == [1, 1]
    assert state["note"].tolist() == [5]


# ---- freezing midway -----------------------------------------------------------------------------------------------


def decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


STEPS = {2: ("1", False), 4: ("6.bias", False), 6: ("1", True), 7: ("0", False), 9: ("0.weight", True)}


def _gradually(optimizer: Any, batches: list[Any]) -> Any:
    """Plain training that freezes and thaws before some of the batches."""
    model = copy.deepcopy(language_model())
    opt = optimizer(model.parameters())
    losses = []
    for j, (x, y) in enumerate(batches):
        if j in STEPS:
            name, flag = STEPS[j]
            for full, p in model.named_parameters():
                if f"{full}.".startswith(f"{name}."):
                    p.requires_grad_(flag)
        opt.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def _pipelined(optimizer: Any, batches: list[Any], **plan: Any) -> Any:
    losses = []
    with Pipeline(language_model(), Plan(micro_batches=3, **plan), loss_fn=LOSS, optimizer=optimizer) as p:
        for j, batch in enumerate(batches):
            if j in STEPS:
                p.requires_grad_([STEPS[j][0]], STEPS[j][1])
            losses += [r.loss for r in p.train([batch])]
        return losses, p.state_dict()


@pytest.mark.parametrize("optimizer", [momentum, decaying])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_freezing_midway_trains_as_on_one_device(K: int, optimizer: Any) -> None:
    batches = token_batches(11, 9)
    assert_same_training(_pipelined(optimizer, batches, stages=K), _gradually(optimizer, batches))


def freeze_on_ranks(plan: dict[str, Any]) -> bool:
    batches = token_batches(11, 9)
    assert_same_training(_pipelined(decaying, batches, **plan), _gradually(decaying, batches))
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [{"stages": 2}, {"stages": 2, "replication": [1, 2], "schedule": "1f1b"}])
def test_freezing_midway_on_ranks(plan: dict[str, Any]) -> None:
    ranks = sum(plan.get("replication", [1, 1]))
    assert run(ranks, freeze_on_ranks, plan=plan) == [True] * ranks


@pytest.mark.parametrize(
    "options", [{}, {"staleness": 0}, {"period": 2}, {"rule": "easgd"}, {"spread": True}]
)
@pytest.mark.parametrize("begun", [4, 5])
def test_what_is_frozen_is_the_same_in_all_pipelines_and_stays_so(
    begun: int, options: dict[str, Any]
) -> None:
    """Also in the midst of a round."""
    batches = token_batches(20, 8)
    plan = Plan(stages=2, pipelines=2, micro_batches=2, **options)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=decaying) as p:
        list(p.train(batches[:begun]))
        p.requires_grad_("1", False)
        before = p.state_dict()
        list(p.train(batches[begun:]))
        after = {which: p.state_dict(which) for which in ("reference", 0, 1)}
    for name in before:
        for state in after.values():
            assert torch.equal(state[name], before[name]) == name.startswith("1."), name


def test_a_name_that_cannot_be_frozen_is_refused_with_the_way_out() -> None:
    with Pipeline(language_model(frozen=True), Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p:
        with pytest.raises(
            ValueError, match=r"no module with parameters, named '7.weight': did you mean '\d.weight'"
        ):
            p.requires_grad_("7.weight", False)
        with pytest.raises(
            ValueError, match=r"'1.weight' did not require a gradient .* make the Pipeline with it"
        ):
            p.requires_grad_(["1.weight"], True)
        list(p.train(token_batches(2, 4)))
