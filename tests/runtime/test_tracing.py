"""Traced models do in evaluation what they do, whatever mode they were in when they were traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from avgpipe import Pipeline, Plan
from avgpipe.model.example import prove
from avgpipe.model.layers import layers_of
from avgpipe.model.tracing import TracedLayer
from tests.runtime.cases import momentum, train_on_one_device, unequal


class Path(nn.Module):
    """Drops whole samples in training, and returns its input in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1) > 0.5)


class Drops(nn.Module):
    """With a function that is told the mode, a module that asks for it, and a noise that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.path = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), Path()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.dropout(self.a(x), 0.5 if self.training else 0.0, training=self.training)
        h = h + self.path(self.b(h))
        return self.c(functional.alpha_dropout(h, 0.2, self.training))


def _chained(layers: Any, value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("training", [True, False])
def test_functions_and_modules_go_by_the_mode_of_the_layer(training: bool) -> None:
    model = Drops().train(training)
    layers = nn.ModuleList(layers_of(model))
    assert all(m.training == training for m in model.modules())
    x = torch.randn(64, 4)
    torch.testing.assert_close(_chained(layers.eval(), x), copy.deepcopy(model).eval()(x))
    torch.manual_seed(0)
    ours = _chained(layers.train(), x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, copy.deepcopy(model).train()(x))
    assert not torch.equal(ours, _chained(layers.eval(), x))


def test_predictions_are_without_dropout_and_training_does_not_depend_on_stages() -> None:
    torch.manual_seed(0)
    model = Drops()
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    found = []
    for K in (1, 2, 4):
        with Pipeline(
            model, Plan(stages=K, micro_batches=2), loss_fn=nn.CrossEntropyLoss(), optimizer=momentum
        ) as p:
            torch.testing.assert_close(p.predict(batches[0][0]), copy.deepcopy(model).eval()(batches[0][0]))
            found.append([result.loss for result in p.train(batches)])
    assert unequal(found[0], found[1]) < 1e-6
    assert unequal(found[0], found[2]) < 1e-6


class Block(nn.Module):
    """Leaves out its layer in evaluation; its parent must not be cut inside then."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) if self.training else x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Block(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


def test_a_module_that_does_other_things_in_evaluation_stays_whole() -> None:
    model, x = Blocks(), torch.randn(3, 4)
    layers: list[Any] = layers_of(model)
    assert [layer.calls for layer in layers] == ["first", "block", "last"]
    prove(layers, model, x)
    torch.testing.assert_close(_chained(layers, x), model(x))


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.lin(x)
        return (h, self.aux(h)) if self.training else h


def test_a_model_that_returns_other_things_in_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Auxiliary differs between training and evaluation \(aux in"):
        layers_of(Auxiliary())


class TakesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.lin(batch["x"]) + batch["more"]


def test_a_dict_may_be_the_only_argument() -> None:
    model, inputs = TakesOne(), {"x": torch.randn(3, 4), "more": torch.randn(3, 4)}
    layers = layers_of(model, inputs)
    torch.testing.assert_close(_chained(layers, inputs), model(inputs))


def test_proof_finds_layers_that_compute_something_else() -> None:
    model = Blocks()
    layers = layers_of(model)
    layers[0] = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"Blocks was cut into do not compute what it does, on 3 of the samples"
    ):
        prove(layers, model, torch.randn(3, 4))
    layers[0] = nn.Linear(4, 5)
    with pytest.raises(ValueError, match=r"on 3 of the samples of example_inputs: mat1 and mat2 shapes"):
        prove(layers, model, torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"Blocks fails on example_inputs in evaluation mode: mat1 and mat2"):
        layers_of(model, torch.randn(3, 5))


def test_pieces_hold_only_the_parameters_that_they_use() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale
            return self.b(self.a(x)) * scale

    layers = layers_of(Scaled())
    assert [sorted(n.removeprefix("graph.") for n, _ in layer.named_parameters()) for layer in layers] == [
        ["a.bias", "a.weight"],
        ["b.bias", "b.weight", "scale"],
    ]
    assert all(isinstance(layer, TracedLayer) for layer in layers)


def test_an_encoder_of_torch_is_cut_inside() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(block, 3, norm=nn.LayerNorm(8))
        return nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 2)).double()

    model, x = make(), torch.randn(5, 3, 4, dtype=torch.float64)
    layers = layers_of(model)
    assert [type(layer).__name__ for layer in layers] == [
        *("Linear", "TransformerEncoderLayer", "TransformerEncoderLayer", "TransformerEncoderLayer"),
        *("LayerNorm", "Linear"),
    ]
    torch.testing.assert_close(_chained(layers, x), model(x))
    with Pipeline(model, Plan(stages=4), loss_fn=nn.MSELoss(), optimizer=momentum) as pipeline:
        model.load_state_dict(pipeline.state_dict())
        assert "1.layers.0" in str(pipeline)
    model[1].register_forward_hook(lambda *_: None)
    assert len(layers_of(model)) == 3


# ---- modules of one's own ------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class OwnBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.weight = RMSNorm(width), nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(functional.linear(self.norm(x), self.weight))


class OfOwnBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock(8) for _ in range(4))
        self.norm, self.out = RMSNorm(8), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.out)


class Quantised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, (self.weight * 16).round() / 16 + self.weight * 0.1, self.bias)


class OfQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(Quantised(8, 8) for _ in range(4)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def test_a_module_of_ones_own_that_holds_weights_begins_a_layer() -> None:
    names = [layer.calls for layer in layers_of(OfOwnBlocks())]
    assert names == [*(f"blocks.{n}{part}" for n in range(4) for part in (".norm", "")), "norm"]
    assert [layer.calls for layer in layers_of(OfQuantised())] == [*(f"layers.{n}" for n in range(4)), "out"]


@pytest.mark.parametrize("kind", [OfOwnBlocks, OfQuantised])
@pytest.mark.parametrize("K", [2, 4])
def test_models_of_ones_own_modules_train_as_on_one_device(kind: type[nn.Module], K: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    batches = [(torch.randn(8, 8, dtype=torch.float64), torch.randint(3, (8,))) for _ in range(3)]
    loss = nn.CrossEntropyLoss()
    with Pipeline(model, Plan(stages=K, micro_batches=2), loss_fn=loss, optimizer=momentum) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
        state = pipeline.state_dict()
    expected_losses, expected = train_on_one_device(model, batches, loss, momentum)
    assert unequal(losses, expected_losses) < 1e-9
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)


def test_a_block_of_ones_own_may_be_named_as_a_cut() -> None:
    plan = Plan(stages=3, partition=["blocks.1", "blocks.3"])
    with Pipeline(OfOwnBlocks(), plan, loss_fn=nn.MSELoss(), optimizer=momentum) as pipeline:
        assert pipeline._spec.model.bounds == [0, 2, 6, 9]


class OnlyItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b


@pytest.mark.parametrize("example", [None, torch.zeros(4, 4)])
def test_for_a_model_without_modules_the_error_lists_what_was_tried(example: torch.Tensor | None) -> None:
    with pytest.raises(
        ValueError, match="2 stages need at least as many layers, and the model has 1"
    ) as told:
        Pipeline(
            OnlyItself(), Plan(stages=2), loss_fn=nn.MSELoss(), optimizer=momentum, example_inputs=example
        )
    assert "modules that hold parameters" in str(told.value)
    assert "torch.fx" in str(told.value)
    assert "torch.export" in str(told.value)
    assert "example_inputs" in str(told.value)
    assert "names_of=model" in str(told.value)
