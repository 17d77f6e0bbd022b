"""Tensors of one value that lie in each other's memory are one memory again behind a cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe import Pipeline, Plan
from avgpipe.runtime.stage import folded, unfolded

X = torch.arange(24.0).reshape(4, 6)
PLANS = [
    Plan(stages=2, micro_batches=2),
    Plan(stages=2, micro_batches=2, recompute="always"),
    Plan(stages=2, pipelines=2, micro_batches=2, staleness=0),
    Plan(stages=2, micro_batches=2, schedule="zero-bubble-h1"),
]


def sent(value: Any) -> Any:
    """Return what comes out of a message: each tensor in memory of its own."""
    return unfolded(pytree.tree_map_only(torch.Tensor, torch.clone, folded(value)))


@pytest.mark.parametrize(
    "value",
    [(X, X), (X, X[:, :2]), (X[1:3], X), {"a": X, "b": [X.t(), X[::2, ::3]]}, (X, X.view(-1)), (X, X[0, 0])],
    ids=["itself", "columns", "rows before", "in a dict", "flat", "one number"],
)
def test_views_of_a_value_are_its_memory_again(value: Any) -> None:
    got = sent(value)
    assert pytree.tree_structure(got) == pytree.tree_structure(value)
    first, *_ = leaves = pytree.tree_leaves(got)
    for ours, theirs in zip(leaves, pytree.tree_leaves(value)):
        assert torch.equal(ours, theirs)
        assert ours.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        X,
        (X, X.clone()),
        (X.clone().requires_grad_().detach(), X),
        (X.t(), X[:2]),
        (X, "a word", None, 3),
        [X[:2], X[2:]],
    ],
    ids=["one tensor", "copies", "detached", "views of what is not sent", "no tensors", "parts"],
)
def test_all_else_is_sent_as_it_is(value: Any) -> None:
    assert folded(value) is value
    assert unfolded(value) is value


def test_what_is_detached_is_not_what_wants_a_gradient() -> None:
    x = (X * 1).requires_grad_() * 2
    value = x.detach(), x
    assert folded(value) is value


class F(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


CHAINS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "of a view": (lambda x: (x, x[:, :4]), lambda v: (v[0].mul_(2), v[1])),
    "through a view": (lambda x: (x, x[:, :4]), lambda v: (v[0], v[1].mul_(2))),
    "of itself": (lambda x: (x, x), lambda v: (v[0].mul_(2), v[1])),
    "of nothing": (lambda x: (x, x[:, 1:3]), lambda v: (v[0] * 2, v[1])),
}


@pytest.mark.parametrize("plan", PLANS, ids=["two stages", "recomputed", "two pipelines", "zero bubble"])
@pytest.mark.parametrize("kind", CHAINS)
def test_writes_behind_a_cut_are_those_of_one_device(kind: str, plan: Plan) -> None:
    torch.manual_seed(0)
    send, write = CHAINS[kind]
    join = F(lambda v: torch.cat([t.reshape(len(t), -1) for t in v], 1))
    width = {"of itself": 12, "of nothing": 8}.get(kind, 10)
    model = nn.Sequential(nn.Linear(4, 6), F(send), F(write), join, nn.Linear(width, 2)).double()
    batches = [(torch.randn(4, 4).double(), torch.randn(4, 2).double()) for _ in range(3)]
    for cut in (2, 3):
        by_plan = Plan.from_json(plan.to_json().replace('"partition": null', f'"partition": [{cut}]'))
        with Pipeline(
            model, by_plan, loss_fn=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        ) as pipeline:
            losses = [result.loss for result in pipeline.train(batches)]
            found = pipeline.state_dict()
        expected_losses, expected = plainly(model, batches)
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=1e-12, atol=1e-14), name


def plainly(model: nn.Module, batches: list[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a copy of the model on one device."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()
