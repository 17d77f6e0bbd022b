"""The caller's modes of autograd are put aside while training, and given back; whatever a loader leaves behind, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.runtime.cases import assert_same_training, momentum

LOSS = nn.MSELoss()
Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def inference_with_gradients() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode, enable_grad inside": inference_with_gradients,
    "grad disabled": lambda: torch.set_grad_enabled(False),
}
PLANS = {
    "one": Plan(stages=2, micro_batches=2),
    "two, which share": Plan(stages=2, pipelines=2, micro_batches=2, staleness=0),
    "two in turn": Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline"),
    "split": Plan(stages=2, micro_batches=2, schedule="zero-bubble-h1"),
    "versions": Plan.for_system("pipedream-2bw", stages=2),
    "recomputed": Plan(stages=2, micro_batches=2, recompute="always"),
}


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(count: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randn(12, n, dtype=torch.float64, generator=draw) for n in (3, 2)) for _ in range(count)
    ]  # type: ignore[misc]


def trained(
    plan: Plan, around: Mode | None = None, loader: Callable[[], Iterator[Any]] | None = None
) -> tuple[Any, float, torch.Tensor]:
    data = batches()

    def use() -> tuple[Any, float, torch.Tensor]:
        with Pipeline(model(), plan, loss_fn=LOSS, optimizer=momentum) as pipeline:
            losses = [result.loss for result in pipeline.train(loader() if loader else data)]
            losses += [pipeline.step(*data[0])]
            found = pipeline.evaluate(loader() if loader else data).loss
            return (losses, pipeline.state_dict()), found, pipeline.predict(data[0][0])

    if around is None:
        return use()
    with around():
        before = modes()
        found = use()
        assert modes() == before
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_mode_around_all_of_it_changes_nothing(plan: str, mode: str) -> None:
    training, loss, output = trained(PLANS[plan])
    inside, inside_loss, inside_output = trained(PLANS[plan], MODES[mode])
    assert_same_training(inside, training)
    assert inside_loss == loss
    assert torch.equal(inside_output, output)


@pytest.mark.parametrize("around", [None, "no_grad"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_generator_that_yields_inside_of_a_mode_changes_nothing(
    plan: str, mode: str, around: str | None
) -> None:
    seen = []

    def loader() -> Iterator[Any]:
        outside = modes()
        for batch in batches():
            with MODES[mode]():
                yield batch
            seen.append(modes() == outside)

    training, loss, _ = trained(PLANS[plan])
    leaky, leaky_loss, _ = trained(PLANS[plan], MODES[around] if around else None, loader)
    assert_same_training(leaky, training)
    assert leaky_loss == loss
    assert len(seen) == 2 * len(batches())
    assert all(seen)
    assert modes() == (True, False)


def test_the_loader_finds_the_modes_that_its_caller_is_in() -> None:
    found = []

    def loader() -> Iterator[Any]:
        for batch in batches():
            found.append(modes())
            yield batch

    with Pipeline(model(), PLANS["one"], loss_fn=LOSS, optimizer=momentum) as pipeline, torch.no_grad():
        list(pipeline.train(loader()))
    assert found == [(False, False)] * 5


def test_autocast_around_training_is_torchs_and_one_that_a_loader_leaves_on_is_refused() -> None:
    def loader() -> Iterator[Any]:
        for batch in batches():
            with torch.autocast("cpu", torch.bfloat16):
                yield batch

    with Pipeline(model(), PLANS["one"], loss_fn=LOSS, optimizer=momentum) as pipeline:
        with torch.autocast("cpu", torch.bfloat16):
            assert len(list(pipeline.train(batches()))) == 5
        before = pipeline.state_dict()
        with pytest.raises(
            ValueError, match=r"the loader has left torch.autocast on.*autocast=torch.bfloat16"
        ):
            list(pipeline.train(loader()))
        assert not torch.is_autocast_enabled("cpu")
        assert all(torch.equal(before[name], value) for name, value in pipeline.state_dict().items())
