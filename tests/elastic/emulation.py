"""Elastic averaging in float64 numpy, straight from the formulas; shares no code with the library.

Weights are lists of arrays. Gradients come from ``gradient``, which depends on the weights, the replica and
the step, so that every step's result enters the next one.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def start(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in SHAPES]


def gradient(x, replica, step):
    """Of a bowl whose bottom lies elsewhere for every replica and step."""
    rng = np.random.default_rng([replica, step])
    return [(0.5 + n) * v - rng.standard_normal(v.shape) + 0.1 * v**3 for n, v in enumerate(x)]


class Momentum:
    """torch.optim.SGD(lr=0.05, momentum=0.9)."""

    torch = staticmethod(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))

    def __init__(self):
        self.buffers = None

    def step(self, x, grads):
        if self.buffers is None:
            self.buffers = [g.copy() for g in grads]
        else:
            self.buffers = [0.9 * b + g for b, g in zip(self.buffers, grads)]
        return [v - 0.05 * b for v, b in zip(x, self.buffers)]


class AdamW:
    """torch.optim.AdamW(lr=0.03, weight_decay=0.1): Loshchilov and Hutter 2019, algorithm 2."""

    torch = staticmethod(lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1))

    def __init__(self):
        self.t, self.m, self.v = 0, None, None

    def step(self, x, grads):
        self.t += 1
        self.m = [0.1 * g if self.m is None else 0.9 * m + 0.1 * g for m, g in zip(self.m or grads, grads)]
        self.v = [
            0.001 * g * g if self.v is None else 0.999 * v + 0.001 * g * g
            for v, g in zip(self.v or grads, grads)
        ]
        out = []
        for w, m, v in zip(x, self.m, self.v):
            w = w * (1 - 0.03 * 0.1)
            out.append(w - 0.03 * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8))
        return out


class Nesterov:
    """torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True), the outer optimizer of DiLoCo."""

    torch = staticmethod(lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))

    def __init__(self):
        self.buffers = None

    def step(self, z, grads):
        self.buffers = [
            g.copy() if self.buffers is None else 0.9 * b + g for b, g in zip(self.buffers or grads, grads)
        ]
        return [v - 0.7 * (g + 0.9 * b) for v, g, b in zip(z, grads, self.buffers)]


def default_alpha(rule, n):
    if rule == "easgd":
        return 0.9 / n
    return 1 / n if n > 1 else 0.0


class Emulation:
    def __init__(self, n, rule="avgpipe", staleness=0, period=1, alpha=None, inner=Momentum, outer=None):
        self.n, self.rule, self.staleness, self.period = n, rule, staleness, period
        self.alpha = default_alpha(rule, n) if alpha is None else alpha
        self.z = start()
        self.x = [start() for _ in range(n)]
        self.inner = [inner() for _ in range(n)]
        self.outer = outer() if outer else None
        self.t = 0

    def step(self, gradient=gradient):
        """One local step of every replica, in order, and the rule at the end of a period."""
        if self.t % self.period == 0:
            self.before = copy.deepcopy(self.x)
        for i in range(self.n):
            self.x[i] = self.inner[i].step(self.x[i], gradient(self.x[i], i, self.t))
        self.t += 1
        if self.t % self.period == 0:
            if self.staleness == "asynchronous":
                for i in range(self.n):
                    self._exchange([i])
            else:
                self._exchange(range(self.n))

    def _exchange(self, replicas):
        a, old = self.alpha, copy.deepcopy(self.z)
        total = [np.zeros_like(v) for v in self.z]
        for i in replicas:
            for k in range(len(old)):
                d = self.x[i][k] - self.before[i][k]
                e = a * (self.x[i][k] - old[k])
                if self.rule == "easgd":
                    self.x[i][k] = self.x[i][k] - e
                    total[k] = total[k] + e
                else:
                    total[k] = total[k] + d / self.n
                    if self.staleness != 0:
                        self.x[i][k] = self.before[i][k] + d + a * (old[k] - self.before[i][k])
        if self.outer:
            self.z = self.outer.step(self.z, [-v for v in total])
        else:
            self.z = [v + s for v, s in zip(self.z, total)]
        if self.rule == "avgpipe" and self.staleness == 0:
            for i in replicas:
                self.x[i] = [x + a * (z - x) for x, z in zip(self.x[i], self.z)]
