"""Models that torch.fx cannot trace, and torch.export can, train as on one device."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from avgpipe import Carry, Pipeline, Plan, Source, StageError
from avgpipe.model.layers import layers_of
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    Trained,
    assert_same_training,
    momentum,
    train_on_one_device,
    train_pipeline,
    unequal,
)
from tests.runtime.exports import GPT, Checked, transformer


def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def _tokens(count: int, samples: int, length: int, last: int) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    sizes = [samples] * (count - 1) + [last]
    return [
        (torch.randint(11, (n, length), generator=draw), torch.randint(11, (n, length), generator=draw))
        for n in sizes
    ]


def _pairs(count: int, samples: int, last: int) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [
        (
            (
                torch.randn(n, 5, 8, dtype=torch.float64, generator=draw),
                torch.randn(n, 3 + n % 2, 8, dtype=torch.float64, generator=draw),
            ),
            torch.randn(n, 3 + n % 2, 8, dtype=torch.float64, generator=draw),
        )
        for n in [samples] * (count - 1) + [last]
    ]


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any], Any]] = {
    "gpt": (GPT, _tokens(3, 6, 7, 5), over_tokens),
    "transformer": (transformer, _pairs(3, 6, 5), nn.MSELoss()),
}


class Spread(nn.Module):
    """Calls a model on a tuple, as a pipeline does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: Any) -> Any:
        return self.model(*value) if isinstance(value, tuple) else self.model(value)


class Made(NamedTuple):
    """A model, its layers (which take seconds to export), and what plain training makes of it."""

    model: nn.Module
    layers: list[nn.Module]
    trained: Trained


@cache
def made(name: str) -> Made:
    make, batches, loss_fn = CASES[name]
    torch.manual_seed(1)
    model = make().double()
    losses, state = train_on_one_device(Spread(model), batches, loss_fn, momentum)
    layers = layers_of(model, batches[0][0])
    return Made(model, layers, (losses, {key.removeprefix("model."): t for key, t in state.items()}))


def check_case(name: str, K: int, recompute: str = "never", exports: bool = False) -> bool:
    _, batches, loss_fn = CASES[name]
    model, layers, expected = made(name)
    plan = Plan(stages=K, micro_batches=4, recompute=recompute)
    how: dict[str, Any] = {"example_inputs": batches[0][0]} if exports else {"names_of": model}
    with Pipeline(
        model if exports else layers,
        plan,
        **grouped(loss_fn=loss_fn, optimizer=momentum, timeout_s=60, **how),
    ) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
        state = pipeline.state_dict()
        predicted = pipeline.predict(batches[-1][0])
    assert_same_training((losses, state), expected)
    whole = copy.deepcopy(model).eval()
    whole.load_state_dict(state)
    torch.testing.assert_close(predicted, Spread(whole)(batches[-1][0]), rtol=1e-10, atol=1e-10)
    return True


@pytest.mark.grid(1)
@pytest.mark.parametrize("K", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_exported_models_train_as_on_one_device(name: str, K: int) -> None:
    check_case(name, K, "always" if K == 3 else "never")


@pytest.mark.slow
@pytest.mark.ranks
def test_exported_models_train_on_ranks() -> None:
    assert run(2, check_case, name="transformer", K=2, exports=True, timeout_s=110) == [True] * 2


@pytest.mark.slow
def test_a_pipeline_exports_by_itself() -> None:
    check_case("gpt", 2, exports=True)


def test_blocks_are_pieces_by_name() -> None:
    names = [layer.calls for layer in made("gpt").layers]
    blocks = [f"transformer.h.{n}" for n in range(4)]
    assert names == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        *blocks,
        "transformer.ln_f",
        "lm_head",
    ]
    assert [layer.calls for layer in made("transformer").layers] == [
        *("encoder.layers.0", "encoder.layers.1", "encoder.norm"),
        *("decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "decoder.norm"),
    ]


def test_only_tensors_travel_between_pieces() -> None:
    layers: list[Any] = made("transformer").layers
    assert [len(layer.values.takes) for layer in layers] == [0, 2, 2, 2, 2, 2, 1]
    held = [name for name, _ in layers[1].named_parameters()]
    assert held
    assert all("encoder.layers.1" in name for name in held)


def test_asserts_on_values_still_hold_and_norms_see_whole_batches() -> None:
    torch.manual_seed(0)
    model = Checked().double()
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 6, dtype=torch.float64, generator=draw), torch.randint(3, (8,), generator=draw))
        for _ in range(3)
    ]
    expected = train_on_one_device(model, batches, nn.CrossEntropyLoss(), momentum)
    layers = nn.ModuleList(layers_of(model, batches[0][0]))
    for K in (1, 2, 4):
        plan = Plan(stages=K, micro_batches=1)
        ours = train_pipeline(layers, plan, batches, nn.CrossEntropyLoss(), momentum, names_of=model)
        assert_same_training(ours, expected)
    assert sum(isinstance(m, nn.BatchNorm1d) for m in layers.modules()) == 4
    with pytest.raises(RuntimeError, match="values explode"):
        _run(layers[:4], batches[0][0] * 1e9)


def _run(layers: Any, value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.slow
def test_dropout_depends_neither_on_stages_nor_remains_in_evaluation() -> None:
    torch.manual_seed(0)
    model = GPT(dropout=0.3)
    batches = CASES["gpt"][1]
    found, layers = [], layers_of(model, batches[0][0])
    for K in (1, 2, 3):
        plan = Plan(stages=K, micro_batches=2)
        with Pipeline(
            layers, plan, loss_fn=over_tokens, optimizer=momentum, extensions=[Source(names_of=model)]
        ) as pipeline:
            whole = copy.deepcopy(model).eval()
            torch.testing.assert_close(pipeline.predict(batches[0][0]), whole(batches[0][0]))
            found.append([result.loss for result in pipeline.train(batches)])
    assert unequal(found[0], found[1]) < 1e-6
    assert unequal(found[0], found[2]) < 1e-6
    expected, _ = train_on_one_device(GPT(), batches, over_tokens, momentum)
    assert unequal(found[0], expected) > 1e-4


def test_other_lengths_run_and_longer_ones_are_refused() -> None:
    model, layers = made("gpt").model, copy.deepcopy(nn.ModuleList(made("gpt").layers)).eval()
    for shape in ((1, 1), (1, 7), (5, 9)):
        idx = torch.randint(11, shape)
        torch.testing.assert_close(_run(layers, idx), copy.deepcopy(model).eval()(idx))
    with pytest.raises(ValueError, match=r"exported for inputs like example_inputs.*idx.size\(\)\[1\] <= 12"):
        _run(layers, torch.randint(11, (2, 13)))
    with pytest.raises(ValueError, match="a tensor of 2 dimensions became"):
        _run(layers, torch.randint(11, (2, 2, 2)))


@pytest.mark.slow
def test_an_example_as_long_as_can_be_says_nothing_about_shorter_ones() -> None:
    torch.manual_seed(0)
    model = GPT(blocks=1).eval()
    layers = nn.ModuleList(layers_of(model, torch.randint(11, (3, 12)))).eval()
    for length in (12, 11, 5, 1):
        idx = torch.randint(11, (2, length))
        torch.testing.assert_close(_run(layers, idx), model(idx))
    with pytest.raises(ValueError, match="exported for inputs like example_inputs"):
        _run(layers, torch.randint(11, (2, 13)))


def test_a_stage_says_what_inputs_it_was_made_for() -> None:
    with (
        Pipeline(made("gpt").layers, Plan(stages=2), loss_fn=over_tokens, optimizer=momentum) as pipeline,
        pytest.raises(StageError, match="exported for inputs like example_inputs"),
    ):
        pipeline.predict(torch.randint(11, (2, 13)))


def test_an_example_of_one_sample_is_enough() -> None:
    layers = layers_of(made("gpt").model, torch.randint(11, (1, 7)))
    assert _run(layers, torch.randint(11, (4, 7))).shape == (4, 7, 11)


def test_tensors_are_made_where_the_stage_is() -> None:
    layers = copy.deepcopy(nn.ModuleList(made("gpt").layers)).to("meta")
    assert _run(layers, torch.empty(2, 7, dtype=torch.long, device="meta")).is_meta


class Nests(nn.Module):
    """Takes and gives nests of tensors, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], times: int = 2) -> dict[str, Any]:
        assert batch["x"].shape[1] == 4
        h = self.a(batch["x"]) * times
        return {"first": h, "both": (h, self.b(h + batch["more"][0]))}


def test_nests_go_in_and_come_out() -> None:
    model = Nests()
    inputs = {"batch": {"x": torch.randn(3, 4), "more": [torch.randn(3, 4)]}, "times": 3}
    layers = nn.ModuleList(layers_of(model, inputs)).eval()
    torch.testing.assert_close(_run(layers, inputs), model(**inputs))
    with pytest.raises(ValueError, match="3 became 4"):
        _run(layers, {**inputs, "times": 4})
    with pytest.raises(ValueError, match="batch is "):
        _run(layers, {"batch": {"x": torch.randn(3, 4)}, "times": 3})


class Masked(nn.Module):
    """An encoder and a decoder with masks, as people write them; neither is told whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.both, self.head = nn.Embedding(11, 8), transformer(), nn.Linear(8, 11)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        size = tgt.size(1)
        mask = torch.triu(torch.ones(size, size, dtype=torch.bool, device=tgt.device), 1)
        padded = src == 0
        out = self.both(
            self.words(src),
            self.words(tgt),
            tgt_mask=mask,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return self.head(out)


def _sentences(samples: int, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    src = torch.randint(1, 11, (samples, source))
    src[::2, -1] = 0
    return src, torch.randint(1, 11, (samples, target))


def test_a_transformer_with_a_causal_mask_is_exported() -> None:
    torch.manual_seed(0)
    model = Masked().double()
    layers = layers_of(model, _sentences(4, 6, 5))
    assert "both.decoder.layers.2" in [layer.calls for layer in layers]
    for sizes in ((4, 6, 5), (3, 7, 4), (1, 4, 9)):
        inputs = _sentences(*sizes)
        torch.testing.assert_close(_run(layers, inputs), model(*inputs), rtol=1e-10, atol=1e-10)


class TakesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), 2)

    def forward(self, x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        assert x.size(1) < 20
        near = torch.arange(x.size(1), device=x.device)
        far = (near[:, None] - near[None]).abs() > window.max()
        return self.encoder(x, mask=far | (near[:, None] < near[None]))


def test_a_mask_that_is_causal_in_the_example_alone_stays_a_mask() -> None:
    torch.manual_seed(0)
    model = TakesMask().double()
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    wide, narrow = torch.full((4, 1), 9), torch.full((4, 1), 1)
    layers = layers_of(model, (x, wide))
    for window in (wide, narrow):
        torch.testing.assert_close(_run(layers, (x, window)), model(x, window), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model(x, wide), model(x, narrow))


def test_a_failing_export_prints_nothing_and_names_the_place(capfd: pytest.CaptureFixture[str]) -> None:
    class Inside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.inside = nn.Linear(4, 4), Inside()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(self.lin(x))

    with pytest.raises(ValueError, match=r"torch.export cannot export Outside") as told:
        layers_of(Outside(), torch.randn(3, 4))
    assert re.search(r"in 'inside' \(Inside\), forward, test_exported.py, line \d+\): pass", str(told.value))
    assert told.value.__cause__ is None
    assert len(traceback.format_exception(told.value)) < 20
    assert capfd.readouterr().err == ""


class Samples(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) % 2 else x * 3 + len(x)


class Aux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        assert x.shape[1] == 4
        return (self.lin(x), x) if self.training else self.lin(x)


class Carries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 4
        self.kept.set(x)
        return x


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches(), "torch.export cannot export Branches .*pass nn.Sequential or a list of layers"),
        (Aux(), "Aux differs between training and evaluation"),
        (Carries(), "'kept' of Carries is a Carry"),
        (nn.Transformer(4, 2, 1, 1, 4), r"example_inputs do not fit Transformer.forward.*missing.*tgt"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_is_refused_in_words(model: nn.Module, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        layers_of(model, torch.randn(3, 4))


def test_without_an_example_the_refusal_names_the_line_and_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"GPT cannot be traced \(.* line \d+\): give example_inputs=.*torch.export"
    ):
        layers_of(GPT())


def test_modes_and_generators_are_the_callers() -> None:
    model = made("gpt").model
    model.train()
    model.transformer["drop"].eval()  # type: ignore[index,operator]
    layers_of(model, torch.randint(11, (2, 7)))
    assert model.training
    assert not model.transformer["drop"].training  # type: ignore[index,operator]
