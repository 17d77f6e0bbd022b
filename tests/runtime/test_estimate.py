"""What layers are estimated to cost, and the cut that follows from it."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from avgpipe import Carry, Pipeline, Plan
from avgpipe.model import flops
from avgpipe.model.estimate import Estimate
from avgpipe.model.flops import CannotCount, work_of
from avgpipe.model.layers import layers_of
from avgpipe.model.model import stage_bounds
from tests.runtime.cases import momentum


class Residual(nn.Module):
    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made)
        self.conv2, self.norm2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        self.short = nn.Conv2d(given, made, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.short(x))


class ForImages(nn.Module):
    """A residual network: most weights are in the last group, and most work is in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.groups = nn.ModuleList(
            nn.Sequential(Residual(given, made, stride), Residual(made, made, 1))
            for given, made, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2))
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem(x))
        for group in self.groups:
            x = group(x)
        return self.head(x.mean((2, 3)))


IMAGES = torch.zeros(8, 3, 32, 32)


def share_of_first(layers: Any, estimate: Estimate, first: int) -> float:
    return sum(estimate.costs[:first]) / sum(estimate.costs)


@pytest.mark.parametrize("example", [IMAGES, None], ids=["example", "made-up"])
def test_a_network_for_images_is_cut_by_its_work(example: Any) -> None:
    layers = layers_of(ForImages())
    counted = Estimate.of(layers, IMAGES, 4)
    found = Estimate.of(layers, example, 4)
    _, first, _ = stage_bounds(layers, 2, None, found)
    assert 0.4 < share_of_first(layers, counted, first) < 0.6
    what = "example_inputs" if example is not None else "inputs of 3 x 224 x 224, which are made up"
    assert found.kind.startswith(f"cost: FLOPs and bytes moved in forward and backward, counted on {what}")


def test_a_network_that_takes_one_size_is_counted_on_that() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
    assert "inputs of 1 x 28 x 28, which are made up" in Estimate.of(model).kind
    words = nn.Sequential(nn.Embedding(9, 8), nn.Conv1d(64, 4, 3), nn.Linear(6, 2))
    assert "sequences of 64 words" in Estimate.of(words).kind


def test_without_convolutions_weights_are_what_is_known() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    found = Estimate.of(model)
    assert found.costs == (1.0, 41.0, 1.0, 37.0)
    assert found.kind == (
        "cost: estimated by the weights, each used once per sample; example_inputs= counts FLOPs instead, and "
        "avgpipe.profile measures"
    )


def test_what_a_layer_states_counts_and_not_its_work() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[0].compute_cost = 7  # type: ignore[assignment]
    found = Estimate.of(layers, torch.zeros(2, 4))
    assert found.costs == (7.0, 21.0)
    assert found.kind.startswith("cost: what layers state as compute_cost")


def test_a_head_that_runs_once_weighs_less_than_a_block_that_runs_for_each_word() -> None:
    model = nn.Sequential(
        nn.Embedding(9, 16), nn.Linear(16, 16), nn.AdaptiveAvgPool2d((1, 16)), nn.Linear(16, 16)
    )
    by_weights, counted = Estimate.of(model), Estimate.of(model, torch.zeros(4, 50, dtype=torch.long))
    assert by_weights.costs[1] == by_weights.costs[3]
    assert counted.costs[1] > 20 * counted.costs[3]


# ---- the count -----------------------------------------------------------------------------------------------------


def test_products_count_in_forward_and_backward() -> None:
    layers = [nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)]
    work = work_of(layers, torch.zeros(10, 64))
    first, second = 2 * 10 * 64 * 64, 2 * 10 * 64 * 32
    # Inputs want no gradient; those of the second layer do.
    assert work.flops == [2 * first, 3 * second]
    assert work.sent == [4 * 10 * 64]
    for parameter in layers[0].parameters():
        parameter.requires_grad_(False)
    assert work_of(layers, torch.zeros(10, 64)).flops == [first, 2 * second]


def test_attention_and_recurrence_count() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    (attention,) = work_of([Attends()], torch.zeros(2, 4, 8, 16)).flops
    assert attention >= 2 * 2 * (2 * 4 * 8 * 8 * 16)
    (recurrence,) = work_of([Recurrent()], torch.zeros(16, 8, 32)).flops
    products = 2 * 16 * 8 * (4 * 32 * 64)
    assert 2 * products <= recurrence < 5 * products


def test_shapes_that_do_not_fit_are_reported_to_the_caller_alone(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch._subclasses import fake_tensor

    layers = [nn.Linear(4, 8), nn.Linear(6, 2)]
    was = fake_tensor.log.disabled
    with caplog.at_level(logging.WARNING, fake_tensor.log.name):
        fake_tensor.log.addHandler(caplog.handler)  # it may tell no other logger
        try:
            with pytest.raises(CannotCount, match=r"mat1 and mat2|must have same reduction dim"):
                work_of(layers, torch.zeros(3, 4))
        finally:
            fake_tensor.log.removeHandler(caplog.handler)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert fake_tensor.log.disabled == was


def test_counting_changes_nothing() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm, self.carry = nn.Linear(4, 4), nn.BatchNorm1d(4), Carry()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.carry.set(x)
            return self.norm(self.lin(functional.dropout(x))) * random.random() + torch.rand(4)

    layer, seen = Draws(), list[int]()
    layer.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 4)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    states = random.getstate(), torch.get_rng_state()
    work_of([layer], x)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert layer.calls == 0
    assert not seen
    assert not layer.carry.values
    assert layer.training
    for name, t in layer.state_dict().items():
        assert torch.equal(t, before[name])
    assert all(p.grad is None for p in layer.parameters())


def test_a_weight_that_is_computed_whenever_it_is_asked_for_stays_as_it_is() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    assert "made up" in Estimate.of([layer]).kind
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_layers_may_change_what_they_receive_and_come_compiled() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]
    plain = work_of(layers, torch.zeros(2, 4))

    def compiler(*_: Any) -> Any:
        raise AssertionError("compiled")

    layers[2].compile(backend=compiler)
    assert work_of(layers, torch.zeros(2, 4)) == plain


def test_one_sample_before_a_batch_norm_is_counted_in_evaluation() -> None:
    assert work_of([nn.Linear(4, 4), nn.BatchNorm1d(4)], torch.zeros(1, 4)).flops[0] > 0


def test_a_model_without_values_is_counted_on_the_meta_device() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    assert work_of(layers, torch.zeros(2, 4)).sent == [32]


@torch.library.custom_op("avgpipe_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


class Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(x.detach())


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Calls(), "there is no FLOP formula for avgpipe_tests.twice"),
        (Asks(), "Asks depends on the values of a tensor"),
    ],
)
def test_what_cannot_be_counted_goes_by_weights_and_says_why(layer: nn.Module, why: str) -> None:
    layers = [nn.Linear(4, 4), layer, nn.Linear(4, 4)]
    with pytest.raises(CannotCount, match=why):
        work_of(layers, torch.zeros(2, 4))
    found = Estimate.of(layers, torch.zeros(2, 4))
    assert found.costs == (21.0, 1.0, 21.0)
    assert why in found.kind
    assert "by the weights" in found.kind


def test_a_count_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_MOST_OPERATORS", 3)
    with pytest.raises(CannotCount, match="too many operators"):
        work_of([nn.Linear(4, 4)] * 4, torch.zeros(2, 4))


# ---- where the cut is ----------------------------------------------------------------------------------------------


def test_between_equal_cuts_the_one_that_sends_less_is_taken() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64)
            self.d, self.e = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.b(self.a(x))
            return self.e(self.d(x + 0.1 * self.c(x)))

    model = Wide()
    layers = layers_of(model)
    assert [layer.calls for layer in layers] == ["a", "b", "c", "d", "e"]
    estimate = Estimate.of(layers, torch.zeros(8, 64))
    assert stage_bounds(layers, 2, None, estimate) == [0, 3, 5]
    assert Estimate.of(layers).sent == (2, 1, 1, 1)


def test_the_pipeline_says_what_kind_of_estimate_it_has() -> None:
    def lines(example: Any) -> list[str]:
        plan = Plan(stages=2, micro_batches=2)
        loss = nn.CrossEntropyLoss()
        with Pipeline(ForImages(), plan, loss_fn=loss, optimizer=momentum, example_inputs=example) as p:
            return str(p).splitlines()

    assert lines(IMAGES)[-1] == (
        "cost: FLOPs and bytes moved in forward and backward, counted on example_inputs; measure with avgpipe.profile"
    )
    assert "which are made up; example_inputs= counts on yours" in lines(None)[-2]
