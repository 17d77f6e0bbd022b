"""Layers that write to what they receive train behind a cut as they do on one device.

What a stage receives is a leaf, lies in memory that others may read, and is what recomputation begins with. So a
tensor that its layers write to must be a copy, and no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from avgpipe import Pipeline, Plan, StageError
from avgpipe.model.context import Position
from avgpipe.runtime.stage import Stage
from benchmarks.models.vision import PARTS, plain
from tests.links.ends import LINKS
from tests.runner import run
from tests.runtime.cases import assert_same_training, momentum
from tests.runtime.vision import FOLDER, NAMES, vision_model

CPU = torch.device("cpu")


class AddsInPlace(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return x


class ScalesHalf(nn.Module):
    """Writes to a part of its input, by index."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, ::2] *= 0.5
        return x


class Forks(nn.Module):
    """Gives a pair of tensors and one without a gradient, all of which the next layer may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.lin(x).chunk(2, dim=1)
        return {"a": a.contiguous(), "b": b.contiguous(), "mask": x.detach() > 0}


class JoinsInPlace(nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        x["mask"].logical_not_()
        x["a"].masked_fill_(x["mask"], 0.25)
        return x["a"] * x["b"]


class WritesItsBatch(nn.Module):
    """The first layer scales the images that it is given, where they lie."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.div_(2.0)


class PreActivation(nn.Module):
    """A residual block whose in-place activation changes the shortcut too, as torch says it must."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.relu(x)) + x


class TracedShortcuts(nn.Module):
    """For torch.fx: values that later pieces read after they were written to, by a method, by index and by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        second = self.b(torch.tanh(first))
        second.add_(1.0)
        active = self.relu(second)
        third = self.c(active)
        third += first
        return self.d(functional.relu(third, True) * second) + first


class TracedViews(nn.Module):
    """For torch.fx: a view of a value is written to behind the module that a cut may come before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.b(self.a(x))
        left = whole[:, :4]
        other = self.c(torch.sin(x))
        left.mul_(3.0)
        return self.e(self.d(whole + other))


def _linear(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3))


def _preactivated(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(activation, nn.Linear(8, 8))


HAND_MODELS: dict[str, Callable[[], nn.Module]] = {
    "nested blocks": lambda: _linear(*(_preactivated(nn.ReLU(inplace=True)) for _ in range(4))),
    "deeper": lambda: _linear(*(nn.Sequential(_preactivated(nn.SiLU(inplace=True))) for _ in range(4))),
    "x += w": lambda: _linear(*(AddsInPlace() for _ in range(4))),
    "by index": lambda: _linear(ScalesHalf(), nn.Linear(8, 8), ScalesHalf(), nn.Linear(8, 8), ScalesHalf()),
    "a dict of tensors": lambda: _linear(Forks(), JoinsInPlace(), nn.Linear(8, 8), Forks(), JoinsInPlace()),
    "its own batch": lambda: nn.Sequential(WritesItsBatch(), _linear(), nn.Hardswish(True), nn.Linear(3, 3)),
    "shortcuts": lambda: _linear(*(PreActivation() for _ in range(4))),
    "dropout": lambda: _linear(
        *(nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Linear(8, 8)) for _ in "abc")
    ),
    "traced": TracedShortcuts,
    "views": TracedViews,
}


def _check(
    make: Callable[[], nn.Module],
    batches: list[Any],
    K: int,
    bound: float,
    **how: Any,
) -> None:
    torch.manual_seed(3)
    model = make()
    model = model.double() if bound < 1e-8 else model
    link = how.pop("link", "auto")
    plan = Plan(stages=K, micro_batches=PARTS, **how)
    given = copy.deepcopy(batches)
    with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum, link=link) as pipeline:
        losses = [result.loss for result in pipeline.train(given)]
        state = pipeline.state_dict()
        pipeline.evaluate(given)
    expected = plain(model, copy.deepcopy(batches), momentum)
    # running statistics, which move by whole batches and not by micro-batches, are not looked at
    assert_same_training((losses, {name: state[name] for name in expected[1]}), expected, bound)


def _rows(dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(7, 8, generator=generator, dtype=dtype),
            torch.randint(3, (7,), generator=generator),
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("K", [2, 3, 4])
@pytest.mark.parametrize("name", HAND_MODELS)
def test_layers_that_write_to_their_input_train_as_on_one_device(name: str, K: int) -> None:
    batches = _rows()
    for how in ("never", "always"):
        _check(HAND_MODELS[name], batches, K, 1e-10, recompute=how)


def check_vision_model(name: str) -> bool:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 3, 64, 64, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 3]))
        for _ in range(2)
    ]
    for K in (2, 3, 4):
        _check(lambda: vision_model(name), batches, K, 1e-10)
    return True


@pytest.mark.ranks
@pytest.mark.skipif(
    not FOLDER.exists(), reason="make puts torchvision there; the models above have the same layers"
)
@pytest.mark.parametrize("name", NAMES)
def test_vision_models_train_as_on_one_device_wherever_they_are_cut(name: str) -> None:
    """In a process of its own: where torchvision is loaded, other libraries expect all of it."""
    assert run(1, check_vision_model, name=name, timeout_s=110) == [True]


def check_on_ranks(K: int) -> bool:
    for name in ("nested blocks", "x += w", "a dict of tensors", "shortcuts", "views"):
        for link in LINKS:
            for how in ("never", "always"):
                _check(HAND_MODELS[name], _rows(), K, 1e-10, recompute=how, link=link)
                _check(HAND_MODELS[name], _rows(torch.float32), K, 1e-6, recompute=how, link=link)
    return True


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 3])
def test_layers_that_write_to_their_input_train_on_ranks_over_every_link(K: int) -> None:
    assert run(K, check_on_ranks, K=K, timeout_s=110) == [True] * K


# ---- one stage alone -----------------------------------------------------------------------------------------------


def _stage(*layers: nn.Module) -> Stage:
    stage = Stage(layers, first=3, index=1, seed=0, device=CPU)
    return stage.train()


def test_what_arrives_is_copied_only_where_layers_write_to_it() -> None:
    seen: list[int] = []

    class Notes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.data_ptr())
            return x * 2

    reads, writes = _stage(Notes()), _stage(nn.Sequential(nn.ReLU(inplace=True)))
    for m in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        before = x.detach().clone()
        reads(x, Position(0, 0, m))
        assert (seen[-1] == x.data_ptr()) == (m > 0), (
            "after the first forward it is known that nothing writes"
        )
        writes(x, Position(0, 0, m)).sum().backward()
        assert torch.equal(x.detach(), before)
        assert torch.equal(x.grad, (before > 0).float())


class WritesSometimes(nn.Module):
    """As a layer that is dropped at random: the one after it then meets what the stage received."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = False
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (torch.relu_(x) if self.writes else torch.relu(x))


def test_a_layer_may_begin_to_write_later() -> None:
    layer = WritesSometimes()
    stage = _stage(layer)
    copied = stage.layers[0]
    assert isinstance(copied, WritesSometimes)
    for m, copied.writes in enumerate([False, True, False, True]):
        x = torch.randn(4, requires_grad=True)
        before = x.detach().clone()
        stage(x, Position(0, 0, m)).sum().backward()
        assert torch.equal(x.detach(), before)
        assert torch.equal(x.grad, 2 * (before > 0))
    assert copied.scale.grad is not None


def test_a_late_write_to_what_has_no_gradient_is_refused_where_it_is_needed_again() -> None:
    stage = _stage(WritesSometimes())
    copied = stage.layers[0]
    assert isinstance(copied, WritesSometimes)
    stage.recomputed(torch.randn(4), Position(0, 0, 0))
    copied.writes = True
    with pytest.raises(StageError, match=r"stage 1 .* in place .* clone"):
        stage.recomputed(torch.randn(4), Position(0, 0, 1))
    # without recomputation nobody needs it again
    stage(torch.randn(4), Position(0, 0, 2))


def test_an_error_without_a_first_line_still_says_what_it_is() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("\n\nthe real reason\nand more")

    with pytest.raises(StageError, match=r"the real reason$"):
        _stage(Fails())(torch.zeros(2), Position())

    class FailsSilently(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    with pytest.raises(StageError, match=r"ValueError in forward, test_inplace\.py:\d+$"):
        _stage(FailsSilently())(torch.zeros(2), Position())
