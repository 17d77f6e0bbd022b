"""Pipelines of a workload's layers against one device, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from avgpipe import Pipeline, Plan, Source
from avgpipe.model.layers import layers_of


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_equal_to_one_device(
    model: list[nn.Module] | nn.Module,
    batches: list[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    stages: tuple[int, ...] = (2, 3),
    micro_batches: tuple[int, ...] = (1, 3),
    loss_weight: Callable[[Any], float] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    tolerance: float = 1e-10,
) -> None:
    """Train on ``batches`` with K stages and M micro-batches, and in a plain loop over the whole batches: losses and
    the state after the last step must agree. ``model``: float64, without dropout and batch norm.
    """
    expected_losses, expected = one_device(model, batches, loss_fn, optimizer)
    for K in stages:
        for M in micro_batches:
            plan = Plan(stages=K, micro_batches=M)
            with Pipeline(
                model,
                plan,
                loss_fn=loss_fn,
                optimizer=optimizer,
                extensions=[Source(loss_weight=loss_weight)],
            ) as pipeline:
                losses = [result.loss for result in pipeline.train(batches)]
                state = pipeline.state_dict()
            assert state.keys() == expected.keys()
            worst = max((abs(a - b) for a, b in zip(losses, expected_losses)), default=0.0)
            assert worst < tolerance, f"K = {K}, M = {M}: losses {losses}, expected {expected_losses}"
            for name, value in expected.items():
                assert torch.allclose(state[name].double(), value.double(), rtol=0, atol=tolerance), (
                    f"K = {K}, M = {M}: {name} differs by {(state[name] - value).abs().max()}"
                )


def one_device(
    model: list[nn.Module] | nn.Module,
    batches: list[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of a plain training loop over the model's layers."""
    whole = copy.deepcopy(model if isinstance(model, nn.Module) else nn.ModuleList(model)).train()
    layers = layers_of(whole) if isinstance(model, nn.Module) else list(whole)
    step = optimizer([p for p in whole.parameters() if p.requires_grad])
    losses = []
    for inputs, targets in batches:
        value = inputs
        for layer in layers:
            value = layer(value)
        loss = loss_fn(value, targets)
        loss.backward()
        step.step()
        step.zero_grad()
        losses.append(float(loss.detach()))
    return losses, whole.state_dict()
