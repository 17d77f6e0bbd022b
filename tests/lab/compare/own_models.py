"""A small model and data for a comparison; what workers import."""

import torch
from torch import nn

from avgpipe import Task

SAMPLES, FEATURES = 8, 6


def make_model():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, SAMPLES, FEATURES, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def make(lr=0.05, **changes):
    """The task of summing features; ``changes``: other fields of it."""
    given = {
        "model": make_model(),
        "loader": lambda epoch: data(12, epoch),
        "loss_fn": nn.MSELoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=lr),
        "held_out": data(4, 99),
        "epochs": 2,
    }
    return Task(**{**given, **changes})


def to_target():
    return make(lr=0.04, target=2.0)


def broken():
    return make(optimizer=_no_optimizer)


def _no_optimizer(params):
    raise ValueError("no such optimizer")


def no_task():
    return make_model()
