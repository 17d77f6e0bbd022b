"""Batches whose gradients are not finite, in every mode: with skip_nonfinite they leave no trace."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Precision
from avgpipe.model.context import Carry
from avgpipe.runtime.weights import average
from tests.options import grouped
from tests.runner import Ranks, run
from tests.runtime.cases import adamw, assert_same_state, momentum, train_on_one_device

PLANS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "all-forward-all-backward"},
    "1f1b, recomputing": {"schedule": "1f1b", "recompute": "always"},
    "zero-bubble-h1": {"schedule": "zero-bubble-h1"},
    "dualpipe-v": {"schedule": "dualpipe-v"},
    "stash": {"schedule": "pipedream", "micro_batches": 1},
    "vertical-sync": {"schedule": "pipedream", "micro_batches": 1, "weights": "vertical-sync"},
    "double-buffer": {"schedule": "pipedream-2bw"},
    "replicas": {"schedule": "1f1b", "replication": [2, 1]},
    "two pipelines": {"schedule": "advance-forward", "pipelines": 2, "batch": "per-pipeline"},
    "two pipelines, staleness 0": {
        "schedule": "1f1b",
        "pipelines": 2,
        "batch": "per-pipeline",
        "staleness": 0,
    },
    "spread": {"schedule": "1f1b", "pipelines": 2, "batch": "per-pipeline", "spread": True},
}


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.bad = bool((x.abs() > 1e3).any())
        return x.clamp(-1e3, 1e3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.inf if ctx.bad else grad


class Overflows(nn.Module):
    """Large inputs make the gradients of what comes before overflow; all else stays finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Overflow.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), Overflows(), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches(count: int, bad: tuple[int, ...] = ()) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for j in range(count):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        found.append((1e6 * x if j in bad else x, y))
    return found


def train(plan: dict[str, Any], data: list[Any], **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    chosen = Plan(**{"stages": 2, "micro_batches": 2, **plan})
    with Pipeline(
        model(),
        chosen,
        **grouped(**{"loss_fn": nn.MSELoss(), "optimizer": momentum, "skip_nonfinite": True, **options}),
    ) as p:
        losses = [r.loss for r in p.train(data)]
        assert len(losses) == len(data)
        return p.state_dict(), p.skipped_updates


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", PLANS)
def test_batches_that_overflow_on_one_stage_leave_no_trace_on_any(name: str, clip: float | None) -> None:
    state, skipped = train(PLANS[name], batches(6, bad=tuple(range(6))), clip_grad_norm=clip)
    assert skipped == 6
    assert_same_state(state, model().state_dict(), bound=0.0)


@pytest.mark.parametrize("name", PLANS)
def test_training_goes_on_after_one(name: str) -> None:
    state, skipped = train(PLANS[name], batches(9, bad=(4,)), optimizer=adamw)
    assert skipped == 1
    assert all(bool(value.isfinite().all()) for value in state.values())
    moved = (state["0.weight"] - model().state_dict()["0.weight"]).abs()
    assert moved.max() > 0.01


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_the_others_train_as_if_it_had_not_been_there(optimizer: Any) -> None:
    data = batches(6, bad=(2, 3))
    state, skipped = train({"micro_batches": 1}, data, optimizer=optimizer, clip_grad_norm=0.3)
    rest = [batch for j, batch in enumerate(data) if j not in (2, 3)]
    _, expected = train_on_one_device(model(), rest, nn.MSELoss(), optimizer, clip=0.3)
    assert skipped == 2
    assert_same_state(state, expected)


def test_it_is_off_by_default() -> None:
    state, skipped = train({}, batches(3, bad=(1,)), skip_nonfinite=False)
    assert skipped == 0
    assert not bool(state["0.weight"].isfinite().all())


def _on_a_rank(plan: dict[str, Any], bad: tuple[int, ...]) -> None:
    state, skipped = train(plan, batches(6, bad=bad))
    own = len(bad) // 2 if plan.get("spread") else len(bad)  # of spread pipelines a rank has one
    assert skipped == own
    if len(bad) == 6:
        assert_same_state(state, model().state_dict(), bound=0.0)
    assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.ranks
@pytest.mark.parametrize("bad", [(0, 1, 2, 3, 4, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["gpipe", "stash", "double-buffer", "replicas", "two pipelines", "spread"])
def test_all_ranks_leave_out_the_same(name: str, bad: tuple[int, ...]) -> None:
    plan = PLANS[name]
    world = Plan(**{"stages": 2, "micro_batches": 2, **plan}).workers
    run(world, _on_a_rank, plan=plan, bad=bad)


class Remembers(nn.Module):
    """Adds what it carries, the mean of its last inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        self.carry.set(x.detach().mean(0))
        return x if before is None else x + before


@pytest.mark.parametrize("name", ["gpipe", "stash", "double-buffer"])
def test_carried_values_begin_again(name: str) -> None:
    layers = [nn.Linear(6, 3).double(), Remembers()]
    data = batches(12)
    data[3][0][:] = torch.nan
    plan = Plan(**{"stages": 2, "micro_batches": 2, **PLANS[name]})
    with Pipeline(
        layers, plan, loss_fn=nn.MSELoss(), optimizer=momentum, extensions=[Precision(skip_nonfinite=True)]
    ) as p:
        finite = [bool(torch.tensor(r.loss).isfinite()) for r in p.train(data)]
        assert finite[:3] == [True] * 3
        assert finite[-4:] == [True] * 4
        assert p.skipped_updates == finite.count(False) < 6


# ---- without skip_nonfinite ----------------------------------------------------------------------------------------


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if "reported once" in line]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.host
def test_the_first_gradients_that_are_not_finite_are_reported_once(name: str, caplog: Any) -> None:
    train(PLANS[name], batches(9, bad=(3, 4, 7)), skip_nonfinite=False)
    (line,) = told(caplog.text)
    assert re.search("rank 0: gradients on (pipeline 1, )?stage 0(, replica 0)? have", line)
    assert "have infinities or NaN, in batch 3 of pipeline" in line
    assert (
        "train with Precision(skip_nonfinite=True); else lower the learning rate, or limit gradients by clip_grad_norm"
        in line
    )


def test_a_loss_that_is_not_finite_is_reported(caplog: Any) -> None:
    data = batches(6)
    data[2][1][0, 0] = torch.nan
    train({"pipelines": 2, "batch": "per-pipeline"}, data, skip_nonfinite=False)
    (line,) = told(caplog.text)
    assert "rank 0: the loss on stage 1 is nan, in batch 2 of pipeline 0" in line


def test_nothing_is_reported_if_such_batches_are_skipped_or_there_are_none(caplog: Any) -> None:
    train({}, batches(4, bad=(2,)), skip_nonfinite=True)
    train({}, batches(4), skip_nonfinite=False)
    train(
        {},
        [(1e18 * x, y) for x, y in batches(2)],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        skip_nonfinite=True,
    )
    assert told(caplog.text) == []


def test_large_gradients_are_none_that_are_not_finite(caplog: Any) -> None:
    """The sum of their squares overflows; they do not."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    data = [(torch.full((4, 4), 1e30), torch.zeros(4, 1))]
    plan = Plan(stages=2, micro_batches=2)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    with Pipeline(layers, plan, loss_fn=lambda y, t: (y - t).mean() * 1e5, optimizer=sgd) as p:
        list(p.train(data))
    assert told(caplog.text) == []


def _tells(plan: dict[str, Any]) -> None:
    train(plan, batches(6, bad=(2, 3, 4)), skip_nonfinite=False)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpipe", "double-buffer", "replicas", "two pipelines", "spread"])
def test_one_rank_of_all_tells_it(name: str) -> None:
    world = Plan(**{"stages": 2, "micro_batches": 2, **PLANS[name]}).workers
    workers = Ranks(world, _tells, plan=PLANS[name])
    ends = workers.join()
    assert [code for code, _ in ends] == [0] * world, ends
    (line,) = [line for _, output in ends for line in told(output)]
    assert "have infinities or NaN, in batch " in line or "is nan, in batch " in line


@pytest.mark.parametrize("name", ["two pipelines", "two pipelines, staleness 0", "spread"])
def test_a_bad_replica_does_not_spoil_what_all_share(name: str) -> None:
    """NaN inputs make its running statistics NaN; the reference's, and so evaluation's, are those of the others."""
    data = batches(12)
    data[4][0][:] = torch.nan
    plan = Plan(**{"stages": 2, "micro_batches": 2, **PLANS[name]})
    with Pipeline(model(), plan, loss_fn=nn.MSELoss(), optimizer=momentum) as p:
        losses = [r.loss for r in p.train(data)]
        assert not all(loss == loss for loss in losses)
        assert all(bool(value.isfinite().all()) for value in p.state_dict().values())
        own = [all(bool(v.isfinite().all()) for v in p.state_dict(i).values()) for i in range(2)]
        assert own == [False, True]
        assert torch.equal(p.state_dict()["2.running_var"], p.state_dict(1)["2.running_var"])
        assert p.evaluate(batches(2)).loss < 1e3


def test_masks_with_infinities_are_averaged_as_they_are() -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)
    assert torch.equal(average([mask.clone(), mask.clone()]), mask)
    assert torch.equal(
        average([torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])]), torch.tensor([2.0, 4.0])
    )
    assert torch.equal(
        average([torch.tensor([1.0, torch.nan]), torch.tensor([3.0, 5.0])]), torch.tensor([3.0, 5.0])
    )
