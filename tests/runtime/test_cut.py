"""The cut of a model, as it is printed, and the names of a model that a list of layers is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Source
from avgpipe.model.cut import expected_traffic
from avgpipe.model.layers import layers_of
from avgpipe.model.model import Model
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import momentum, train_on_one_device
from tests.runtime.test_skips import BOUNDS, Skipping

TOKENS = torch.arange(24).reshape(4, 6)


class Language(nn.Module):
    """With blocks in a list, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(2, 2)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


class Activated(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.block(x))


def listed(model: Language) -> list[nn.Module]:
    return [model.embed, *map(Activated, model.blocks), model.head]


def pipeline_of(model: Any, stages: int, **options: Any) -> Pipeline:
    plan = options.pop("plan", Plan(stages=stages, micro_batches=2))
    return Pipeline(model, plan, **grouped(loss_fn=nn.MSELoss(), optimizer=momentum, **options))


def words(line: str) -> str:
    return " ".join(line.split())


# ---- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.host  # the stand-in of a device has another name
def test_the_table_names_layers_and_says_what_travels() -> None:
    with pipeline_of(Language(), 2, example_inputs=TOKENS) as pipeline:
        lines = str(pipeline).splitlines()
        assert lines[0] == "Pipeline: 2 stages of 6 layers, 1 pipeline, advance-forward, on cpu"
        assert words(lines[1]) == "stage layers parameters cost sends of a micro-batch"
        assert words(lines[2]) == "0 embed .. blocks.1 (3) 336 51 % 384 B to stage 1"
        assert words(lines[3]) == "1 blocks.2 .. head (3) 336 49 % -"
        assert len(lines) == 5
        assert "\n" not in repr(pipeline)


def test_before_the_first_batch_what_travels_is_unknown_and_then_seen() -> None:
    with pipeline_of(Language(), 3) as pipeline:
        before = str(pipeline)
        assert before.count("unknown") == 3
        pipeline.step(TOKENS, torch.zeros(4, 6, 24))
        after = str(pipeline)
    assert "unknown" not in after
    assert after.count("384 B to stage") == 2


def test_numbers_get_their_class_and_one_stage_sends_nothing() -> None:
    with pipeline_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 1) as pipeline:
        lines = str(pipeline).splitlines()
    assert words(lines[2]) == "0 0 Linear .. 1 ReLU (2) 6 100 % -"
    assert len(lines) == 4


def test_values_that_skip_stages_are_counted_on_their_way() -> None:
    torch.manual_seed(3)
    model = Skipping().double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    bounds = BOUNDS[6][1:-1]
    plan = Plan(stages=6, micro_batches=2, partition=bounds)
    with pipeline_of(model, 6, plan=plan) as pipeline:
        pipeline.step(x, torch.zeros(4, 3, dtype=torch.float64))
        seen = dict(pipeline._seen_cut().traffic)
    layers = layers_of(model)
    expected = expected_traffic(Model.cut(model, layers, 6, bounds), layers, x, 2)
    assert seen == expected
    width = 2 * 5 * 8 * 8  # bytes of a micro-batch between layers
    assert expected[0, 1] == expected[1, 3] == width
    assert expected[0, 4] == 2 * 5  # the mask
    assert expected[0, 5] == 2 * 5 * 6 * 8  # the input


def test_layers_that_need_values_tell_nothing() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.detach().sum()) > 0 else x

    with pipeline_of(
        nn.Sequential(nn.Linear(2, 2), Asks(), nn.Linear(2, 2)), 3, example_inputs=torch.ones(4, 2)
    ) as p:
        assert str(p).count("unknown") == 3


def check_on_ranks() -> bool:
    with pipeline_of(Language(), 2) as pipeline:
        pipeline.step(TOKENS, torch.zeros(4, 6, 24))
        return ("384 B" in str(pipeline)) == (pipeline.world.rank == 0)


@pytest.mark.ranks
def test_a_rank_knows_what_it_sends() -> None:
    assert run(2, check_on_ranks, timeout_s=110) == [True, True]


# ---- names of a model ----------------------------------------------------------------------------------------------


def test_a_list_of_layers_keeps_the_models_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    batches = [(TOKENS, torch.randn(4, 6, 24)) for _ in range(2)]
    names: list[str] = []

    def optimizer(named_params: Any) -> torch.optim.Optimizer:
        pairs = list(named_params)
        names.extend(name for name, _ in pairs)
        return momentum([p for _, p in pairs])

    plan = Plan(stages=3, micro_batches=2)
    with Pipeline(
        listed(model), plan, loss_fn=nn.MSELoss(), optimizer=optimizer, extensions=[Source(names_of=model)]
    ) as pipeline:
        list(pipeline.train(batches))
        state = pipeline.state_dict()
        pipeline.save(tmp_path / "saved")
        assert "embed .. 2 Activated (3)" in str(pipeline)
    _, expected = train_on_one_device(model, batches, nn.MSELoss(), momentum)
    assert list(state) == list(model.state_dict())
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)
    assert set(names) == {"embed.weight", *(f"blocks.{n}.{p}" for n in range(4) for p in ("weight", "bias"))}
    with pipeline_of(model, 2) as whole:
        whole.load(tmp_path / "saved")
        torch.testing.assert_close(whole.state_dict(), state)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_what_the_model_does_not_have_is_refused(kind: str) -> None:
    model = Language()
    extra = nn.Linear(8, 8) if kind == "parameter" else nn.Identity()
    if kind == "buffer":
        extra.register_buffer("scale", torch.ones(1))
    layers = [*listed(model)[:2], extra, *listed(model)[2:]]
    name = "weight" if kind == "parameter" else "scale"
    with pytest.raises(
        ValueError, match=rf"{kind} '{name}' of layer 2 \({type(extra).__name__}\) is none of Language"
    ):
        pipeline_of(layers, 2, names_of=model)
