"""Replicas with the emulation's weights and gradients, and other things that several tests here need."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic import emulation


def weights(dtype=torch.float64):
    return [nn.Parameter(torch.tensor(v, dtype=dtype)) for v in emulation.start()]


def set_gradients(params, replica, step):
    with torch.no_grad():
        for p, g in zip(params, emulation.gradient([p.double().numpy() for p in params], replica, step)):
            p.grad = torch.tensor(np.asarray(g), dtype=p.dtype)


class Crew:
    """N replicas in one process and their reference."""

    def __init__(self, n, inner=emulation.Momentum, dtype=torch.float64, fused=True, **options):
        self.x = [weights(dtype) for _ in range(n)]
        self.reference = Reference(weights(dtype), n, **options)
        self.opts = [
            ElasticAveraging(inner.torch(x), self.reference, i, fused=fused) for i, x in enumerate(self.x)
        ]
        self.t = 0

    def step_one(self, i, t=None):
        set_gradients(self.x[i], i, self.t if t is None else t)
        self.opts[i].step()

    def step(self, order=None):
        for i in order or range(len(self.x)):
            self.step_one(i)
        self.t += 1

    def state(self):
        """Copies of all weights: z first, then every replica's."""
        return [[p.detach().clone() for p in ps] for ps in (self.reference.parameters, *self.x)]


def assert_bitwise(first, second):
    for ps, qs in zip(first, second, strict=True):
        for p, q in zip(ps, qs, strict=True):
            assert torch.equal(p, q)


def assert_follows(crew, emulated, bound=1e-12):
    for mine, theirs in [(crew.reference.parameters, emulated.z), *zip(crew.x, emulated.x)]:
        for p, v in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), v, rtol=bound, atol=bound)
