"""What an optimizer makes of all parameters is compared with what it makes of each stage's."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop

from avgpipe import Pipeline, Plan
from avgpipe.runtime.optimizers import groups_of_whole, warn_of_steps
from tests.runner import run
from tests.runtime.cases import momentum, train_pipeline

LOSS = nn.MSELoss()
TWO = Plan(stages=2, micro_batches=2)
Function = Callable[..., Any]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


OUTER = model()


def batches(count: int = 2) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [tuple(torch.randn(8, n, generator=draw) for n in (4, 3)) for _ in range(count)]


# ---- groups ----------------------------------------------------------------------------------------------------------


def by_place(params: Any) -> SGD:
    params = list(params)
    return SGD([{"params": params[:2], "lr": 0.01}, {"params": params[2:]}], lr=0.1)


def two_by_place(params: Any) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [SGD(params[:1], lr=0.1), Adam(params[1:], lr=0.1)]


def by_identity(params: Any) -> AdamW:
    vectors = {id(p) for p in OUTER.parameters() if p.dim() < 2}
    params = list(params)
    groups = [
        {"params": [p for p in params if id(p) in vectors], "weight_decay": 0.0},
        {"params": [p for p in params if id(p) not in vectors]},
    ]
    return AdamW(groups, lr=0.01, weight_decay=0.5)


def by_names_of_the_whole(params: Any) -> SGD:
    names = dict(OUTER.named_parameters())
    groups = [{"params": [p], "lr": 0.01 if name[0] == "0" else 0.1} for name, p in zip(names, params)]
    return SGD(groups, lr=0.1)


def by_dimension(params: Any) -> AdamW:
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() > 1]},
    ]
    return AdamW(groups, lr=0.01, weight_decay=0.5)


def by_name(named_params: Any) -> SGD:
    return SGD([{"params": [p], "lr": 0.01 * (1 + int(name[0]))} for name, p in named_params], lr=0.1)


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("optimizer", [by_place, two_by_place, by_identity, by_names_of_the_whole])
def test_groups_that_a_stage_makes_otherwise_are_refused(optimizer: Function, pipelines: int) -> None:
    plan = Plan(stages=2, micro_batches=2, pipelines=pipelines)
    with pytest.raises(ValueError, match=r"optimizer gives '\d.\w+' .* among the parameters of its stage"):
        Pipeline(OUTER, plan, loss_fn=LOSS, optimizer=optimizer)


def test_the_refusal_names_what_differs() -> None:
    message = (
        r"gives '2.weight' lr=0.01 among the parameters of its stage, and lr=0.1 among those of the whole"
    )
    with pytest.raises(ValueError, match=message):
        Pipeline(OUTER, Plan(stages=2, partition=[2]), loss_fn=LOSS, optimizer=by_place)


def test_one_stage_has_all_places_and_no_parameter_of_the_script() -> None:
    train_pipeline(OUTER, Plan(), batches(), LOSS, by_place)
    with pytest.raises(ValueError, match=r"optimizer gives '0.bias' weight_decay=0.5 among"):
        Pipeline(OUTER, Plan(), loss_fn=LOSS, optimizer=by_identity)


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("optimizer", [by_dimension, by_name, momentum])
def test_groups_by_shape_and_by_name_train(
    optimizer: Function, pipelines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "avgpipe"):
        plan = Plan(stages=2, micro_batches=2, pipelines=pipelines, staleness=0)
        train_pipeline(OUTER, plan, batches(), LOSS, optimizer)
    assert not caplog.records


@pytest.mark.parametrize("optimizer", [by_place, by_identity, by_names_of_the_whole])
def test_check_off_leaves_the_comparison_of_groups_out(optimizer: Function) -> None:
    train_pipeline(OUTER, TWO, batches(), LOSS, optimizer, check="off")


def test_a_function_that_takes_the_parameters_of_a_stage_alone_trains() -> None:
    def optimizer(params: Any) -> SGD:
        assert len(list(params)) < 6, "all of them"
        return SGD(params, lr=0.1)

    train_pipeline(OUTER, TWO, batches(), LOSS, optimizer)


def _with_a_rate_of_its_own() -> str:
    rate = 0.1 * (1 + int(os.environ["RANK"]))
    try:
        train_pipeline(model(), TWO, batches(), LOSS, lambda params: SGD(params, lr=rate), timeout_s=60)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_ranks_with_other_rates_are_refused() -> None:
    for told in run(2, _with_a_rate_of_its_own):
        assert (
            "the optimizer, by the groups of its parameters, differs between ranks: ranks [1] disagree with rank 0"
            in told
        )
        assert '"lr": 0.1' in told
        assert '"lr": 0.2' in told


# ---- steps -----------------------------------------------------------------------------------------------------------


class Normed(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(norm)
        super().step()


def clipped(params: Any) -> SGD:
    params = list(params)
    made = SGD(params, lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(params, 1e-2)

    made.register_step_pre_hook(clip)
    return made


class Noisy(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p))


def counting() -> Function:
    steps = [0]

    class Counting(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps[0] += 1
            self.param_groups[0]["lr"] = 0.1 / steps[0]
            super().step()

    return lambda params: Counting(params, lr=0.1)


TOGETHER: dict[str, Function] = {
    "a norm over all": lambda params: Normed(params, lr=0.1),
    "clipping in a hook": clipped,
    "noise": lambda params: Noisy(params, lr=0.1),
    "a counter outside": counting(),
}


def only_large(params: Any) -> SGD:
    class OnlyLarge(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if any(p.numel() < 36 for group in self.param_groups for p in group["params"] if p.dim() > 1):
                raise RuntimeError("blocks of 6 x 6")
            raise AssertionError("stand-ins are small")

    return OnlyLarge(params, lr=0.1)


def two_kinds(params: Any, first: Function, second: Function) -> list[torch.optim.Optimizer]:
    params = list(params)
    matrices, vectors = ([p for p in params if (p.dim() > 1) == big] for big in (True, False))
    return [first([{"params": matrices}]), second([{"params": vectors}])]


def own(kind: type[torch.optim.Optimizer], **options: Any) -> Function:
    """An optimizer of a class of the caller's, of which nothing is known before it makes steps."""
    made = type(f"Own{kind.__name__}", (kind,), {"__module__": __name__})
    return lambda params: made(params, lr=0.01, **options)


APART: dict[str, Function] = {
    "torch's": momentum,
    "SGD": own(SGD),
    "momentum": own(SGD, momentum=0.9),
    "nesterov": own(SGD, momentum=0.9, nesterov=True),
    "maximize": own(SGD, maximize=True),
    "Adam": own(Adam),
    "amsgrad": own(Adam, amsgrad=True),
    "fused": own(AdamW, fused=True),
    "foreach": own(AdamW, foreach=True),
    "Adagrad": own(Adagrad),
    "RMSprop": own(RMSprop, centered=True),
    "Adafactor": own(Adafactor),
    "NAdam": own(NAdam),
    "two": lambda params: two_kinds(params, own(SGD, momentum=0.9), own(AdamW)),
    "small tensors fail": only_large,
    "by name": by_name,
}


def warned_of(optimizer: Function, caplog: pytest.LogCaptureFixture) -> list[str]:
    parameters = dict(model().named_parameters())
    stages = [[name for name in parameters if (name[0] == "0") == is_first] for is_first in (True, False)]
    with caplog.at_level(logging.WARNING, "avgpipe"):
        warn_of_steps(optimizer, stages, parameters)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("what", TOGETHER)
def test_a_step_that_depends_on_other_parameters_is_warned_of(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = warned_of(TOGETHER[what], caplog)
    assert "depends on which other parameters its optimizer has" in text
    assert "give clip_grad_norm" in text


@pytest.mark.parametrize("what", APART)
def test_a_step_of_each_parameter_by_itself_is_not(what: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warned_of(APART[what], caplog) == []


OF_TORCH = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS")
]


@pytest.mark.parametrize("kind", OF_TORCH)
def test_torchs_optimizers_are_known_and_only_a_hook_makes_them_step(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[object] = []
    monkeypatch.setattr(kind, "step", lambda *_: stepped.append(1))
    parameters = {"a": torch.ones(2, 2), "b": torch.ones(3, 2)}
    warn_of_steps(kind, [["a"], ["b"]], parameters)
    assert not stepped

    def hooked(params: Any) -> torch.optim.Optimizer:
        made = kind(params)
        made.register_step_post_hook(lambda *_: None)
        return made

    warn_of_steps(hooked, [["a"], ["b"]], parameters)
    assert stepped


@pytest.mark.parametrize(
    ("K", "check", "times"), [(1, "first-batch", 0), (2, "first-batch", 1), (2, "off", 0)]
)
def test_a_pipeline_warns_once_where_it_has_several_stages_and_looks(
    K: int, check: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "avgpipe"):
        train_pipeline(model(), Plan(stages=K, micro_batches=2), batches(), LOSS, clipped, check=check)
    assert len(caplog.records) == times


def drawing(params: Any) -> Noisy:
    """Draws where it is made, and in each step."""

    def draw(*_: Any) -> None:
        random.random(), numpy.random.random(), torch.rand(())

    draw()
    made = Noisy(params, lr=0.1)
    made.register_step_pre_hook(draw)
    return made


def test_generators_are_where_they_were() -> None:
    parameters = dict(model().named_parameters())
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    groups_of_whole(drawing, parameters)
    warn_of_steps(drawing, [list(parameters)[:2], list(parameters)[2:]], parameters)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (numpy.random.get_state()[1] == before[2][1]).all()
    assert numpy.random.get_state()[2:] == before[2][2:]


def test_the_callers_parameters_and_their_gradients_stay_as_they_are() -> None:
    parameters = dict(model().named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    groups_of_whole(momentum, parameters)
    warn_of_steps(momentum, [list(parameters)[:2], list(parameters)[2:]], parameters)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in parameters.items())
