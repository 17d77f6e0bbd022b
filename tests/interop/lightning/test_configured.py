"""The forms that ``configure_optimizers`` may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from avgpipe.interop.lightning.module import Configured

SGD = torch.optim.SGD


def parameters() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.nn.Parameter(torch.ones(2))) for name in ("a", "b")]


def halving(optimizer: Any, **settings: Any) -> Any:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"scheduler": schedule, "interval": "step", **settings}


def one(params: Any) -> Any:
    return SGD(params, lr=1.0)


def with_schedule(params: Any) -> Any:
    made = one(params)
    return {"optimizer": made, "lr_scheduler": halving(made)}


def two_lists(params: Any) -> Any:
    made = [one(params[:1]), one(params[1:])]
    return made, [halving(optimizer) for optimizer in made]


def several(params: Any) -> Any:
    return [one(params[:1]), one(params[1:])]


def dicts(params: Any) -> Any:
    return [with_schedule(params[:1]), {"optimizer": one(params[1:])}]


@pytest.mark.parametrize(
    ("form", "rates"),
    [
        (one, [1.0]),
        (with_schedule, [0.5]),
        (two_lists, [0.5, 0.5]),
        (several, [1.0, 1.0]),
        (dicts, [0.5, 1.0]),
        (lambda params: tuple(several(params)), [1.0, 1.0]),
        (lambda params: (several(params), []), [1.0, 1.0]),
    ],
)
def test_forms(form: Any, rates: list[float]) -> None:
    configured = Configured(form)
    made = configured.optimizer(parameters())
    for optimizer, schedule in [(o, configured.lr_scheduler(o)) for o in made]:
        optimizer.step()
        schedule.step()
        schedule.load_state_dict(schedule.state_dict())
    assert [optimizer.param_groups[0]["lr"] for optimizer in made] == rates


@pytest.mark.parametrize("wrong", [None, [], "adam", ([1], [2], [3])])
def test_other_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="configure_optimizers must return an optimizer, a list"):
        Configured(lambda params: wrong).optimizer(parameters())


def test_parameters_of_another_stage_are_refused() -> None:
    others = parameters()
    with pytest.raises(ValueError, match=r"take them from self.parameters\(\)"):
        Configured(lambda params: one(others)).optimizer(parameters())


@pytest.mark.parametrize("settings", [{"interval": "epoch"}, {"frequency": 2}])
def test_schedules_of_epochs_are_refused(settings: Any) -> None:
    def form(params: Any) -> Any:
        made = one(params)
        return {"optimizer": made, "lr_scheduler": halving(made, **settings)}

    with pytest.raises(ValueError, match="is not possible, as stages step theirs after every batch"):
        Configured(form).optimizer(parameters())


def test_a_bare_schedule_is_one_of_epochs() -> None:
    def form(params: Any) -> Any:
        made = one(params)
        return [made], [torch.optim.lr_scheduler.ExponentialLR(made, 0.5)]

    with pytest.raises(ValueError, match="interval 'epoch'"):
        Configured(form).optimizer(parameters())
