"""Runs that differ only in being fused or not."""

from __future__ import annotations

import torch

from avgpipe import ElasticAveraging, Reference
from avgpipe.elastic.flat import Arena
from tests.elastic.models import batch, model

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01, dtype=torch.float64), betas=(0.8, 0.95), eps=1e-6
    ),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


class Run:
    """Replicas of a small model, whose parameters are separate or views of an arena."""

    def __init__(self, make, fused, n=2, arena=False, dtype=torch.float64, **options):
        self.models = [model().to(dtype) for _ in range(n)]
        self.arenas = [Arena(m.parameters()) for m in self.models] if arena else [None] * n
        self.grads = [a.layout.zeros().flats if a else [] for a in self.arenas]
        self.reference = Reference(self.tensors(0), n, **options)
        self.opts = [
            ElasticAveraging(
                make(list(m.parameters())), self.reference, i, parameters=self.tensors(i), fused=fused
            )
            for i, m in enumerate(self.models)
        ]
        self.t = 0

    def tensors(self, i):
        return self.arenas[i].weights if self.arenas[i] else list(self.models[i].parameters())

    def zero_grad(self, i):
        """In an arena's run the gradients are views of flat memory too."""
        arena = self.arenas[i]
        if not arena:
            self.opts[i].zero_grad()
            return
        for flat in self.grads[i]:
            flat.zero_()
        for p, view in zip(arena.parameters, arena.layout.tensors(self.grads[i]), strict=True):
            p.grad = view

    def backward(self, i, without=()):
        m = self.models[i]
        self.zero_grad(i)
        x = batch(i, self.t).to(next(m.parameters()).dtype)
        (m(x) - x[:, :2]).square().mean().backward()
        for n in without:
            list(m.parameters())[n].grad = None

    def step(self, without=()):
        for i, opt in enumerate(self.opts):
            self.backward(i, without if i == 0 else ())
            opt.step()
        self.t += 1

    def values(self):
        return [
            [t.detach().clone() for t in ts]
            for ts in (self.reference.parameters, *map(self.tensors, range(len(self.opts))))
        ]


def assert_close(mine, theirs, bound=1e-11):
    for ps, qs in zip(mine, theirs, strict=True):
        for p, q in zip(ps, qs, strict=True):
            torch.testing.assert_close(p, q, rtol=bound, atol=bound)


def assert_same_state(mine, theirs):
    assert mine.keys() == theirs.keys()
    for i in mine:
        assert mine[i].keys() == theirs[i].keys()
        for name, value in theirs[i].items():
            own = mine[i][name]
            assert (own.dtype, own.shape, own.stride(), own.device) == (
                value.dtype,
                value.shape,
                value.stride(),
                value.device,
            )
            torch.testing.assert_close(own, value, rtol=1e-10, atol=1e-12)
