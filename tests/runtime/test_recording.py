"""Recording a model as a graph leaves the caller's model alone, and refuses what a graph would lose."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from avgpipe import Pipeline, Plan
from avgpipe.model.context import generators, moved
from tests.runtime.cases import assert_trains_as_one_device, momentum, train_pipeline

LOSS = nn.MSELoss()
STRUCTURED = Plan(stages=2, micro_batches=2)


def batches(count: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(6, n, dtype=torch.float64, generator=draw) for n in (4, 3)) for _ in range(count)
    ]


class Base(nn.Module):
    """Three layers, and between them what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros(()))
        self.count, self.seen, self.flags = 0, list[Any](), {"first": True}
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(self.between(torch.tanh(self.a(x))))))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


# ---- what is refused -------------------------------------------------------------------------------------------------

LOST: dict[str, tuple[Callable[[Base, torch.Tensor], torch.Tensor], str]] = {
    "a coin of Python": (lambda m, x: x if random.random() < 0.5 else x + 3.0, "draws from random"),
    "a coin of NumPy": (lambda m, x: x if np.random.rand() < 0.5 else x + 3.0, "draws from numpy.random"),
    "a coin of torch": (lambda m, x: x if torch.rand(()) < 0.5 else x + 3.0, "draws from torch"),
    "noise of one shape": (lambda m, x: x + torch.randn(8, dtype=torch.float64), "draws from torch"),
    "an order": (lambda m, x: x[:, torch.randperm(8)], "draws from torch"),
    "a shuffle": (lambda m, x: x[:, random.sample(range(8), 8)], "draws from random"),
    "a counter": (lambda m, x: (setattr(m, "count", m.count + 1), x)[1], "changes 'count'"),
    "a flag in a dict": (lambda m, x: (m.flags.update(first=False), x)[1], "changes 'flags'"),
    "a list of numbers": (lambda m, x: (m.seen.append(1), x)[1], "changes 'seen'"),
    "a buffer that is made anew": (lambda m, x: (setattr(m, "steps", m.steps + 1), x)[1], "changes 'steps'"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_graph_would_do_once_is_refused_and_the_model_is_as_before(what: str) -> None:
    between, message = LOST[what]
    kind = type("Model", (Base,), {"between": between})
    model = kind()
    state, states = copy.deepcopy(model.state_dict()), generators()
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(ValueError, match=f"Model cannot be traced: .*{message}"):
            Pipeline(model, STRUCTURED, loss_fn=LOSS, optimizer=momentum)
    assert not moved(states, generators())
    assert (model.count, model.seen, model.flags) == (0, [], {"first": True})
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert model(batches()[0][0]).requires_grad  # no proxy is left in it


def test_the_module_that_draws_is_named() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if random.random() < 0.5 else x * 0

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Identity(), Dropped()])

        def between(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    with pytest.raises(ValueError, match=r"module 'blocks.1' draws from random"):
        Pipeline(Model(), STRUCTURED, loss_fn=LOSS, optimizer=momentum)


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Moving(Base):
    """A running mean by which values are shifted."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.steps.add_(1)
        return x - self.mean


class Table(Base):
    """A table of which a part is taken."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mean[: x.size(1)] + self.steps


class Kept(Base):
    """Keeps its values, to be looked at."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        self.seen.append(x)
        return x


class Asked(Base):
    """Asks for the value of a buffer that never changes."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if int(self.steps) == 0 else x


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("kind", [Base, Table, Kept, Asked])
def test_what_is_read_or_kept_trains_as_plain_torch(kind: type[Base], example: bool) -> None:
    model, data = kind(), batches()
    options = {"example_inputs": data[0][0]} if example else {}
    for plan in (STRUCTURED, Plan(stages=3, micro_batches=3, recompute="always")):
        assert_trains_as_one_device(model, plan, data, LOSS, momentum, **options)
    assert not model.seen
    assert not hasattr(model, "last")


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_buffer_that_moves_moves_in_a_graph(stages: int) -> None:
    class Always(Moving):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.steps += 0  # in place, and so one of torch's own
            return x - self.mean

    class InPlace(Moving):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.steps.add_(1)
            return x - self.mean * (self.steps > 1)

    model, data = InPlace(), batches()
    assert_trains_as_one_device(model, Plan(stages=stages, micro_batches=1), data, LOSS, momentum)
    assert not model.steps
    with pytest.raises(ValueError, match="changes 'steps'"):
        train_pipeline(Always(), Plan(stages=stages, micro_batches=1), data, LOSS, momentum)


# ---- custom functions ------------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * grad, None


class Round(torch.autograd.Function):
    """Two values and two results, with a context that is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.round(4 * x) / 4, y * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 0.5), 3 * other


aliased = Reverse.apply


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Round.apply(self.lin(x), x)
        return Reverse.apply(F.gelu(a), 0.5) + b


class Custom(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner(), Inner()]).double()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        return Reverse.apply(x)


@pytest.mark.parametrize(
    "plan",
    [
        STRUCTURED,
        Plan(stages=3, micro_batches=3, recompute="always"),
        Plan(stages=2, micro_batches=3, schedule="zero-bubble-h1"),
        Plan(stages=2, pipelines=2, micro_batches=2, staleness=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("example", [False, True])
def test_a_custom_function_keeps_its_backward(plan: Plan, example: bool) -> None:
    model, data = Custom(), batches()
    options = {"example_inputs": data[0][0]} if example else {}
    assert_trains_as_one_device(model, plan, data, LOSS, momentum, **options)
    assert torch.autograd.Function.apply.__func__.__module__.startswith("torch.")


def test_an_alias_of_apply_is_refused() -> None:
    class Model(Base):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return aliased(x)

    with pytest.raises(
        ValueError, match=r"Reverse, an autograd.Function, .*write Reverse.apply\(...\) where"
    ):
        Pipeline(Model(), STRUCTURED, loss_fn=LOSS, optimizer=momentum)
    x = torch.ones(2, requires_grad=True)
    aliased(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-1, -1]


# ---- what cannot be copied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing", [threading.Lock(), (n for n in range(3)), open], ids=["lock", "generator", "function"]
)
def test_what_cannot_be_copied_is_named(thing: Any) -> None:
    model = Base()
    model.b.thing = thing
    if callable(thing):
        assert train_pipeline(model, STRUCTURED, batches(), LOSS, momentum)[0]
        return
    with pytest.raises(
        ValueError, match=r"module 'b' \(Linear\) cannot be copied, as its attribute 'thing' is a "
    ):
        Pipeline(model, STRUCTURED, loss_fn=LOSS, optimizer=momentum)
