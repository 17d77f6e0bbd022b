"""Memory that parameters share, and hooks of parameters, are looked at before anything is copied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.runtime.requirements import check_memory
from tests.runtime.cases import momentum, train_pipeline

LOSS = nn.MSELoss()

# ---- memory ----------------------------------------------------------------------------------------------------------


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    return model


def a_part_of_another() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data[2:6]
    return model


def in_a_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("copy", model.weight.data)
    return model


def a_trained_and_a_frozen_one() -> nn.Module:
    model = tied_by_data()
    model[2].requires_grad_(False)
    return model


def transposed() -> nn.Module:
    """Both are contiguous in some order, and have all elements in common."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    return model


SHARED: list[Callable[[], nn.Module]] = [
    *(tied_by_data, a_part_of_another, in_a_buffer, a_trained_and_a_frozen_one, transposed)
]


@pytest.mark.parametrize("make", SHARED)
def test_parameters_in_the_same_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"are two tensors in the same memory, .*let both be one parameter"):
        check_memory(make())


@pytest.mark.parametrize("as_list", [False, True])
def test_a_pipeline_refuses_them_by_name(as_list: bool) -> None:
    model: Any = tied_by_data()
    names = "'0.weight' and '2.weight'"
    with pytest.raises(ValueError, match=names):
        Pipeline(list(model) if as_list else model, Plan(stages=2), loss_fn=LOSS, optimizer=momentum)


class Columns(nn.Module):
    """Parameters that are columns of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 4)
        self.a, self.b = nn.Parameter(whole[:, :2]), nn.Parameter(whole[:, 2:])


class Rows(nn.Module):
    """Parameters that follow one another in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 4)
        self.a, self.b = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])


def really_tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def emptied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in model:
        module.bias = nn.Parameter(module.bias.detach()[:0])
    return model


def all_frozen() -> nn.Module:
    return tied_by_data().requires_grad_(False)


def expanded() -> nn.Module:
    """Buffers that are views of each other train nothing."""
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(4).expand(3, 4))
    model.register_buffer("row", model.get_buffer("mask")[0])
    return model


def on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")


APART: list[Callable[[], nn.Module]] = [
    *(Columns, Rows, really_tied, emptied, all_frozen, expanded, on_meta),
    lambda: nn.LSTM(4, 4, 2),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
]


@pytest.mark.parametrize("make", APART)
def test_parameters_with_memory_of_their_own_are_not(make: Callable[[], nn.Module]) -> None:
    check_memory(make())


# ---- hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "times"),
    [
        ({"pipelines": 2}, 1),
        ({"pipelines": 2, "staleness": 0}, 1),
        ({"pipelines": 2, "batch": "per-pipeline"}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_a_hook_that_sees_a_share_of_a_batch_is_warned_of(
    plan: dict[str, Any], times: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    with caplog.at_level(logging.WARNING, "avgpipe"):
        train_pipeline(
            model,
            Plan(stages=2, micro_batches=2, **plan),
            [(torch.randn(8, 4), torch.randn(8, 2))] * 2,
            LOSS,
            momentum,
        )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == times
    assert all(
        "'2.bias' has a hook, which each of the 2 pipelines that share a batch" in text for text in said
    )


def test_pipelines_that_share_a_batch_without_hooks_are_not(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, "avgpipe"):
        plan = Plan(stages=2, micro_batches=2, pipelines=2)
        train_pipeline(model, plan, [(torch.randn(8, 4), torch.randn(8, 2))] * 2, LOSS, momentum)
    assert not caplog.records


# ---- modes -----------------------------------------------------------------------------------------------------------


class ReadsItsMode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


class AndAPart(nn.Module):
    """Does not read its mode itself; a part of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsItsMode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("inner", "is_evaluated", "times"),
    [
        (ReadsItsMode, True, 1),
        (AndAPart, True, 1),
        (nn.BatchNorm1d, True, 1),
        (ReadsItsMode, False, 0),
        (nn.Tanh, True, 0),
    ],
)
def test_a_model_in_evaluation_whose_layers_read_their_mode_is_warned_of(
    inner: Any, is_evaluated: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = inner(4) if inner is nn.BatchNorm1d else inner()
    model = nn.Sequential(nn.Linear(4, 4), made, nn.Linear(4, 2))
    with caplog.at_level(logging.WARNING, "avgpipe"):
        options: dict[str, Any] = {"loss_fn": LOSS, "optimizer": momentum}
        Pipeline(model.eval() if is_evaluated else model, Plan(stages=2), **options).close()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == times
    assert all("the model is in evaluation mode as a whole" in text for text in said)
