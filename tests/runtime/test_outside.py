"""What a recorded forward reads beside its module may not change; modules that recording would change are called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.model.layers import layers_of
from tests.options import grouped
from tests.runtime.cases import assert_trains_as_one_device, momentum, train_pipeline

LOSS = nn.MSELoss()
TWO = Plan(stages=2, micro_batches=2)
SCALE = 1.0
SETTINGS: dict[str, Any] = {"scale": 1.0, "sizes": [1, 2]}
VARIABLE = "AVGPIPE_TEST_SCALE"


def batches(count: int = 5) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (4, 2)) for _ in range(count)
    ]


class Net(nn.Module):
    """Has a forward of its own, which is recorded. ``inner``: what stands in the middle."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.inner, self.b = nn.Linear(4, 8), inner or nn.Tanh(), nn.Linear(8, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.inner(self.a(x)))


# ---- variables -------------------------------------------------------------------------------------------------------


class ReadsAGlobal(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SCALE


class ReadsADict(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SETTINGS["scale"]


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class CallsAFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _scaled(super().forward(x))


class ReadsTheEnvironment(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.environ.get(VARIABLE, "1"))


class InAPart(Net):
    """A module inside reads, which is recorded too."""

    def __init__(self) -> None:
        super().__init__(ReadsInside())


class ReadsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * SCALE


def _set_global(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setitem(globals(), "SCALE", value)


def _set_dict(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setitem(SETTINGS, "scale", value)


def _set_environment(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setenv(VARIABLE, str(value))


Setter = Callable[[pytest.MonkeyPatch, float], None]
READS: dict[str, tuple[type[nn.Module], Setter, str]] = {
    "a global": (ReadsAGlobal, _set_global, "SCALE"),
    "a dict": (ReadsADict, _set_dict, "SETTINGS"),
    "a function": (CallsAFunction, _set_global, "SCALE"),
    "the environment": (ReadsTheEnvironment, _set_environment, "os.environ"),
    "a part": (InAPart, _set_global, "SCALE"),
}


def changing(model: Any, change: Callable[[], None], **options: Any) -> None:
    """Train, and change something when the second result has come."""
    with Pipeline(model, TWO, **grouped(loss_fn=LOSS, optimizer=momentum, **options)) as pipeline:
        for result in pipeline.train(batches()):
            if result.batch == 1:
                change()


@pytest.mark.parametrize("what", READS)
def test_what_a_recorded_forward_reads_may_not_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, put, name = READS[what]
    with pytest.raises(ValueError, match=f"'{name}', which the model's forward reads, has changed since"):
        changing(kind(), lambda: put(monkeypatch, 2.0))


@pytest.mark.parametrize("what", READS)
def test_what_stays_as_it_was_is_not_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, put, _ = READS[what]
    put(monkeypatch, 0.5)
    assert_trains_as_one_device(kind(), TWO, batches(), LOSS, momentum)
    changing(kind(), lambda: put(monkeypatch, 0.5))


def test_check_off_leaves_that_out(monkeypatch: pytest.MonkeyPatch) -> None:
    changing(ReadsAGlobal(), lambda: _set_global(monkeypatch, 2.0), check="off")


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_variable_around_a_class_is_one_too(value: float) -> None:
    scale = 1.0

    class Reads(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Net.forward(self, x) * scale

    def change() -> None:
        nonlocal scale
        scale = value

    if value == 1.0:
        changing(Reads(), change)
        return
    with pytest.raises(ValueError, match=r"'scale', which the model's forward reads"):
        changing(Reads(), change)


def test_other_variables_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    changing(ReadsAGlobal(), lambda: monkeypatch.setitem(SETTINGS, "scale", 3.0))
    changing(ReadsAGlobal(), lambda: monkeypatch.setenv(VARIABLE, "3"))


@pytest.mark.parametrize("what", ["a list", "a hook"])
def test_what_is_called_as_it_is_reads_each_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ReadsInside()
    model: nn.Module = Net(inner)
    if what == "a list":
        model = nn.Sequential(*model.children())
    else:
        inner.register_forward_hook(lambda module, args, output: None)
    losses = []
    with Pipeline(model, TWO, loss_fn=LOSS, optimizer=lambda params: torch.optim.SGD(params, lr=0.0)) as p:
        for result in p.train(batches(1) * 5):
            losses.append(result.loss)
            if result.batch == 1:
                _set_global(monkeypatch, 3.0)
    assert losses[0] == losses[1]
    assert losses[-1] != losses[0]


# ---- what a graph would leave out ------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Has a part whose gradient is not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return torch.tanh(self.lin(x)) - target


class Clamps(nn.Module):
    """Limits the gradient of what it returns, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return y


class Switches(nn.Module):
    """As :class:`Frozen`, by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) - self.without_gradient(x)

    def without_gradient(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            return self.teacher(x)


def hooked(register: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        register(inner)
        return inner

    return make


LEFT_OUT: dict[str, Callable[[], nn.Module]] = {
    "no_grad": Frozen,
    "no_grad in a function": Switches,
    "a hook of a gradient": Clamps,
    "a forward hook": hooked(lambda m: m.register_forward_hook(lambda module, args, output: 3 * output)),
    "a hook before it": hooked(lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0],))),
    "a backward hook": hooked(
        lambda m: m.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 0.5,))
    ),
}


@pytest.mark.parametrize("plan", [{}, {"stages": 3}, {"pipelines": 2, "staleness": 0}], ids=str)
@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_module_that_recording_would_change_is_called_as_it_is(what: str, plan: dict[str, Any]) -> None:
    model = Net(LEFT_OUT[what]())
    assert [layer.calls for layer in layers_of(model)] == ["a", "inner", "b"]
    assert_trains_as_one_device(
        model, Plan(**{"stages": 2, "micro_batches": 2, **plan}), batches(), LOSS, momentum
    )


class Only(nn.Module):
    """Has one module, so that there is nothing to cut but what this is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("K", [1, 2])
def test_what_a_hook_of_the_only_module_does_is_recorded_where_it_can_be(K: int) -> None:
    model = Only()
    model.inner.register_forward_hook(lambda module, args, output: 0.5 * output)
    assert len(layers_of(model)) == 3
    assert_trains_as_one_device(model, Plan(stages=K, micro_batches=2), batches(), LOSS, momentum)


def test_a_backward_hook_of_the_only_module_is_refused() -> None:
    model = Only()
    model.inner.register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],))
    with pytest.raises(ValueError, match="the stages do not compute what the model does"):
        train_pipeline(model, TWO, batches(), LOSS, momentum)
