"""What avgpipe.check says of a plan: equal, different on purpose, or wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import avgpipe
from avgpipe import PipelineError, Plan, Precision
from avgpipe.measure.check import Checked

LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.drop = nn.Linear(4, 8), norm(8), nn.Dropout(drop)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.drop(self.norm(self.a(x)).relu())).relu())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loader(count: int = 8) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=draw), torch.randint(3, (8,), generator=draw)) for _ in range(count)]


def check(plan: Plan, model: nn.Module | None = None, **options: Any) -> Checked:
    given = {"loss_fn": LOSS, "optimizer": adamw, "loader": loader(), "batches": 5} | options
    return avgpipe.check(model or Net(), plan, **given)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.training else x


PLANS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one stage": ({}, []),
    "stages": ({"stages": 3, "micro_batches": 4}, []),
    "recomputed": ({"stages": 2, "micro_batches": 4, "recompute": "always"}, []),
    "zero bubbles": ({"stages": 2, "micro_batches": 4, "schedule": "zero-bubble-h1"}, []),
    "pipelines": ({"stages": 2, "pipelines": 2, "micro_batches": 4, "staleness": 0}, []),
    "late averages": (
        {"stages": 2, "pipelines": 2, "micro_batches": 4},
        ["are averaged by the rule mean-gradient"],
    ),
    "in turn": ({"pipelines": 2, "batch": "per-pipeline", "rule": "easgd"}, ["rule easgd"]),
    "late gradients": (
        {"stages": 2, "micro_batches": 2, "schedule": "pipedream-2bw"},
        ["weights up to 1 updates old"],
    ),
    "replicas": ({"stages": 2, "micro_batches": 4, "replication": (2, 1)}, []),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_trains_as_one_device_but_for_what_it_says(what: str) -> None:
    plan, reasons = PLANS[what]
    found = check(Plan(**plan))
    assert found.is_equal, str(found)
    assert [line.what for line in found.lines] == [
        "losses",
        "weights and buffers after the first batch",
        "weights and buffers after the last batch",
    ]
    assert len(found.reasons) == len(reasons)
    for said, reason in zip(found.reasons, reasons):
        assert reason in said
    assert len(found.plain) == len(found.planned) == 5
    assert (found.plain == pytest.approx(found.planned, rel=1e-5)) is not bool(reasons)


def test_batch_norm_and_clipping_apart_differ_by_design() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, staleness=0)
    found = check(plan, Net(nn.BatchNorm1d), clip_grad_norm=0.1)
    assert found.is_equal
    assert found.strict.micro_batches == found.strict.pipelines == 1
    assert [reason.partition(" ")[0] for reason in found.reasons] == ["BatchNorm"]
    found = check(replace(plan, spread=True), clip_grad_norm=0.1)
    assert found.is_equal
    assert [reason.partition(" ")[0] for reason in found.reasons] == ["clip_grad_norm"]


def a_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
    kept = target != 0
    loss = nn.functional.cross_entropy(output[kept], target[kept], reduction="sum")
    return (loss, kept.sum()), {"accuracy": (output.argmax(1) == target)[kept].sum()}


def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize(("loss_fn", "is_equal"), [(a_sum, False), (ignoring, False), (counted, True)])
def test_a_loss_that_is_weighed_wrongly_is_found(loss_fn: Callable[..., Any], is_equal: bool) -> None:
    found = check(Plan(stages=2, micro_batches=4), loss_fn=loss_fn)
    assert found.is_equal is is_equal
    if is_equal:
        assert found.lines[1].what == "metric 'accuracy'"
    else:
        assert "does NOT train as one device does" in str(found)
        assert "DIFFERS, most in batch" in str(found)


def test_dropout_is_switched_off_on_both_sides_and_other_numbers_are_drawn_alike() -> None:
    plan = Plan(stages=2, micro_batches=4, recompute="always")
    found = check(plan, Net(drop=0.3))
    assert found.is_equal
    assert [note.partition(" ")[0] for note in found.notes] == ["dropout"]
    found = check(plan, nn.Sequential(nn.Linear(4, 8), Noise(), nn.Linear(8, 3)))
    assert found.is_equal
    assert [note.partition(" draw")[0] for note in found.notes] == ["layers"]


def test_what_is_of_one_dtype_is_compared_in_it() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float32:
                raise RuntimeError("made for float32")
            return x

    found = check(Plan(stages=2, micro_batches=2), nn.Sequential(nn.Linear(4, 8), Narrow(), nn.Linear(8, 3)))
    assert found.is_equal
    assert found.tolerance == 1e-3
    assert found.notes == ["this cannot be compared in float64: made for float32"]


def test_nothing_of_the_callers_moves() -> None:
    model, data = Net(nn.BatchNorm1d, drop=0.2), loader()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    check(Plan(stages=2, pipelines=2, micro_batches=4), model, loader=data)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.drop.p == 0.2
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(data, loader()))


def test_options_and_schedules_go_to_both_sides() -> None:
    found = check(
        Plan(stages=2, micro_batches=2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        optimizer=lambda named_params: torch.optim.SGD([p for _, p in named_params], lr=0.1, momentum=0.9),
        clip_grad_norm=0.5,
        extensions=[Precision(wire_dtype=torch.bfloat16)],
        link="auto",
    )
    assert found.is_equal
    assert found.reasons == ["activations and gradients are sent in 16 bits (wire_dtype)"]
    assert set(found.to_json()) == {
        *("equal", "plan", "strict", "losses", "compared", "tolerance", "reasons", "notes")
    }


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one batch: the loader is empty"):
        check(Plan(), loader=[])
    with pytest.raises(ValueError, match="leave accumulate out"):
        check(Plan(), accumulate=2)
    with pytest.raises(ValueError, match="batches"):
        check(Plan(), batches=0)
    with pytest.raises((ValueError, PipelineError), match="3 stages need at least as many layers"):
        check(Plan(stages=3), nn.Sequential(nn.Linear(4, 3)))
