"""Optimizers that are made of parameters with their names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Audit, Pipeline, Plan
from avgpipe.runtime.options import with_names
from tests.runtime.cases import assert_trains_as_one_device, language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
PAIRS = [("a", "first"), ("b", "second")]


def named(named_params: Any) -> Any:
    return named_params


def between(lr: float, named_parameters: Any, *, momentum: float = 0.0) -> Any:
    return named_parameters


class Made:
    def __init__(self, named_params: Any, lr: float = 0.1) -> None:
        self.got = named_params


class Called:
    def __call__(self, named_params: Any) -> Any:
        return named_params


@pytest.mark.parametrize(
    "function",
    [
        named,
        lambda named_parameters: named_parameters,
        partial(between, 0.1),
        partial(between, 0.1, momentum=0.9),
        lambda named_params: Made(named_params).got,
        Called(),
    ],
)
def test_a_function_that_asks_for_names_gets_pairs(function: Any) -> None:
    assert with_names(function, ["a", "b"])(["first", "second"]) == PAIRS


def test_a_class_may_ask_for_names() -> None:
    assert with_names(Made, ["a", "b"])(["first", "second"]).got == PAIRS


@pytest.mark.parametrize(
    "function",
    [
        lambda params: params,
        lambda params, named_params=None: params,
        lambda *named_params: named_params[0],
        lambda params, *, named_parameters=None: params,
        list,  # a builtin
    ],
)
def test_others_get_the_parameters_alone(function: Any) -> None:
    assert with_names(function, ["a", "b"])(["first", "second"]) == ["first", "second"]


# ---- in a pipeline ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Not sequential, so it is traced; one weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.head(self.norm(x + self.inner(x)))


def residual() -> nn.Module:
    torch.manual_seed(3)
    return Residual().double()


MODELS = {
    "Sequential": language_model,
    "frozen": lambda: language_model(frozen=True),
    "list": lambda: list(language_model()),
    "traced": residual,
}


def first_names(model: Any) -> dict[int, str]:
    """By parameter, the name that comes first in ``state_dict``."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    found: dict[int, str] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if tensor.requires_grad:
            found.setdefault(id(tensor), name)
    return found


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_names_are_those_of_the_unsplit_model(kind: str, K: int) -> None:
    model, seen = MODELS[kind](), []

    def noting(named_params: Any) -> torch.optim.Optimizer:
        seen.append(dict(named_params))
        return momentum([p for _, p in named_params])

    plan = Plan(stages=K, pipelines=2, micro_batches=2, rule="avgpipe")
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=noting, extensions=[Audit("off")]) as pipeline:
        state = pipeline.state_dict()
        assert len(seen) == K * 2
        for found in seen:
            for name, parameter in found.items():
                assert torch.equal(parameter, state[name])
        assert {name for found in seen for name in found} == set(first_names(model).values())
        tied = {"traced": "table.weight"}.get(kind, "0.weight")
        assert sum(tied in found for found in seen) == (2 if K == 1 else 4)  # first and last stage have it


def by_name(named_params: Any) -> torch.optim.Optimizer:
    """What is tied learns slowest, biases decay."""
    options = {"0.weight": {"lr": 0.02}, "1.bias": {"weight_decay": 0.5}, "4.lin.weight": {"lr": 0.3}}
    groups = [{"params": [p], **options.get(name, {})} for name, p in named_params]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_parameters_may_be_treated_by_name(K: int) -> None:
    model, batches = language_model(), token_batches(5, 6)
    assert_trains_as_one_device(model, Plan(stages=K, micro_batches=3), batches, LOSS, by_name)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "plan",
    [{"pipelines": 2, "rule": rule, "staleness": s} for rule in ("avgpipe", "mean-gradient") for s in (0, 1)]
    + [{"schedule": "pipedream"}],
)
def test_torchs_optimizers_train_the_same_with_names(kind: type, plan: dict[str, Any]) -> None:
    def trained(optimizer: Any) -> Any:
        made = Plan(**{"stages": 2, "micro_batches": 2, **plan})
        with Pipeline(language_model(), made, loss_fn=LOSS, optimizer=optimizer) as pipeline:
            losses = [r.loss for r in pipeline.train(token_batches(6, 6))]
            return losses, pipeline.state_dict(), [o.param_groups[0] for o in pipeline.optimizers]

    losses, state, _ = trained(lambda params: kind(params, lr=0.01))
    found, also, groups = trained(lambda named_params: kind(named_params, lr=0.01))
    assert found == losses
    assert all(torch.equal(also[name], state[name]) for name in state)
    assert [len(group["param_names"]) for group in groups] == [len(group["params"]) for group in groups]
