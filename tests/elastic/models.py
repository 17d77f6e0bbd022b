"""A small model and its replicas, for tests that need a real backward."""

from __future__ import annotations

import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference


def model(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def batch(i, t):
    g = torch.Generator().manual_seed(100 * i + t)
    return torch.randn(8, 3, generator=g)


def loss_of(m, i, t):
    x = batch(i, t)
    return (m(x) - x[:, :2]).square().mean()


def crew(n=2, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options):
    replicas = [model() for _ in range(n)]
    reference = Reference(model().parameters(), n, **options)
    opts = [ElasticAveraging(make(r.parameters()), reference, i) for i, r in enumerate(replicas)]
    return replicas, reference, opts


def train(replicas, opts, steps, first=0):
    for t in range(first, first + steps):
        for i, (r, opt) in enumerate(zip(replicas, opts)):
            opt.zero_grad()
            loss_of(r, i, t).backward()
            opt.step()


def weights_of(replicas, reference):
    every = [reference.parameters, *(list(r.parameters()) for r in replicas)]
    return [[p.detach().clone() for p in ps] for ps in every]
