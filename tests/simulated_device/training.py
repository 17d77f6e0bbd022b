"""A small training that is hard to get right on streams, and its results on a device, to compare bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.options import grouped
from tests.runtime.cases import Fork, Join, Tied, token_batches

Results = dict[str, torch.Tensor]


def small_model(dropout: float = 0.3) -> nn.Sequential:
    """Tied weights in the first and last stages, batch normalisation, dropout, and a fork between stages."""
    torch.manual_seed(7)
    embedding = nn.Embedding(11, 8)
    layers = [
        embedding,
        nn.BatchNorm1d(8),
        Fork(),
        Join(),
        nn.Dropout(dropout),
        nn.ReLU(inplace=True),
        Tied(embedding.weight),
    ]
    return nn.Sequential(*layers).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    """Without the passes over many tensors that torch chooses on accelerators, which round otherwise."""
    return torch.optim.Adam(params, lr=0.01, foreach=False)


def pipeline_of(plan: Plan, device: str, **options: Any) -> Pipeline:
    chosen: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": sgd, "clip_grad_norm": 0.5}
    return Pipeline(
        small_model(), plan, **grouped(**{"device": device, "timeout_s": 60, **chosen, **options})
    )


def on_host(state: Any, name: str = "") -> Results:
    """All tensors and numbers of nested dicts and lists, by their places."""
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    elif isinstance(state, torch.Tensor):
        return {name: state.detach().cpu()}
    else:
        return {name: torch.tensor(state)} if isinstance(state, int | float) else {}
    found: Results = {}
    for key, value in items:
        found |= on_host(value, f"{name}.{key}")
    return found


def batches_for(plan: Plan, count: int = 6) -> list[Any]:
    """Batches of which the last is smaller and uneven; batch normalisation needs two samples per micro-batch."""
    m = plan.micro_batches
    return token_batches(count, 3 * m, last=2 * m + 1)


def train(plan: Plan, device: str, **options: Any) -> Results:
    """Losses and the final state."""
    with pipeline_of(plan, device, **options) as p:
        losses = [result.loss for result in p.train(batches_for(plan))]
        return on_host({"losses": losses, "state": p.state_dict()})


def differences(ours: Results, theirs: Results) -> list[str]:
    if list(ours) != list(theirs):
        return sorted(set(ours) ^ set(theirs)) or ["the order of names"]
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
