"""How far replicas are from their reference and from each other, beside plain computations on their state dicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.runtime import distances as distances_module
from avgpipe.runtime.distances import Distances
from tests.runner import run
from tests.runtime.cases import adamw, language_model, token_batches

SHAPES: list[dict[str, Any]] = [
    {"stages": 1, "pipelines": 2},
    {"stages": 3, "pipelines": 3, "micro_batches": 3},  # the first and the last stage hold the tied embedding
    {"stages": 2, "pipelines": 2, "micro_batches": 4, "replication": [2, 1]},
    {"stages": 2, "pipelines": 2, "micro_batches": 2, "staleness": 0, "rule": "avgpipe"},
    {"stages": 2, "pipelines": 2, "micro_batches": 2, "spread": True},
]


def weights(pipeline: Pipeline, which: str | int, frozen: tuple[str, ...] = ()) -> torch.Tensor:
    """All weights of the unsplit model in one tensor; a tied one stands there once."""
    state = pipeline.state_dict(which)
    names = [name for name in state if name not in ("6.weight", *frozen)]
    return torch.cat([state[name].double().flatten() for name in names])


def plain(pipeline: Pipeline, frozen: tuple[str, ...] = ()) -> Distances:
    z = weights(pipeline, "reference", frozen)
    xs = [weights(pipeline, i, frozen) for i in range(pipeline.plan.pipelines)]
    between = tuple(tuple(float((x - y).norm()) for y in xs) for x in xs)
    return Distances(float(z.norm()), tuple(float((x - z).norm()) for x in xs), between)


def assert_same(found: Distances, expected: Distances) -> None:
    assert found.norm == pytest.approx(expected.norm, rel=1e-12)
    assert found.to_reference == pytest.approx(expected.to_reference, rel=1e-9)
    assert found.between is not None
    assert expected.between is not None
    for mine, theirs in zip(found.between, expected.between, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def trained(options: dict[str, Any], model: nn.Module) -> Pipeline:
    pipeline = Pipeline(model, Plan(**options), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw, timeout_s=60)
    list(pipeline.train(token_batches(6, 9)))
    return pipeline


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("piece", [2**18, 7])
def test_distances_are_those_of_the_state_dicts(
    options: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances_module, "_PIECE", piece)
    with trained(options, language_model()) as pipeline:
        found = pipeline.distances()
        assert_same(found, plain(pipeline))
        assert min(found.to_reference) > 0
        assert pipeline.distances() == found  # and nothing has moved


def test_frozen_parameters_are_left_out() -> None:
    with trained(SHAPES[0], language_model(frozen=True)) as pipeline:
        assert_same(pipeline.distances(), plain(pipeline, frozen=("1.weight", "1.bias")))


def test_squares_of_16_bits_are_summed_in_64() -> None:
    with trained(SHAPES[0], language_model().bfloat16()) as pipeline:
        assert_same(pipeline.distances(), plain(pipeline))


def test_one_pipeline_is_at_its_reference() -> None:
    with trained({"stages": 2, "micro_batches": 2}, language_model()) as pipeline:
        found = pipeline.distances()
        assert found.norm == pytest.approx(float(weights(pipeline, 0).norm()))
    assert (found.to_reference, found.between) == ((0.0,), ((0.0,),))


def test_relative_distances_are_shares_of_the_norm() -> None:
    found = Distances(2.0, (1.0, 0.5), ((0.0, 3.0), (3.0, 0.0))).relative
    assert found == Distances(2.0, (0.5, 0.25), ((0.0, 1.5), (1.5, 0.0)))
    assert math.isnan(Distances(0.0, (1.0,), None).relative.to_reference[0])


def on_ranks(options: dict[str, Any]) -> tuple[float, list[float], Any]:
    with trained(options, language_model()) as pipeline:
        found, expected = pipeline.distances(), plain(pipeline)
    if found.between is not None:
        assert_same(found, expected)
    assert found.to_reference == pytest.approx(expected.to_reference, rel=1e-9)
    return found.norm, list(found.to_reference), found.between


@pytest.mark.ranks
@pytest.mark.parametrize("options", [SHAPES[1], SHAPES[4]], ids=str)
def test_all_ranks_learn_them(options: dict[str, Any]) -> None:
    first, *others = run(Plan(**options).workers, on_ranks, options=options)
    assert all(other == first for other in others)
    assert (first[2] is None) == bool(options.get("spread"))
