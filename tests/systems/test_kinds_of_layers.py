"""Every system trains every kind of layer: weights equal those of the emulation.

A backward reads what its forward saved, and layers save weights in many ways: the parameter, a transpose, a slice, an
expanded or a permuted view of it, something computed from it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from avgpipe import Pipeline, Plan
from tests.runtime.cases import assert_same_training, momentum
from tests.systems import emulation

WIDTH, LENGTH, SAMPLES, K = 4, 3, 6, 3


class First(nn.Module):
    """The first of what a module returns, such as a recurrent layer's sequence."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


class Apply(nn.Module):
    """A function of the input and a matrix of weights, or a module."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], inner: Any = None) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Parameter(0.5 * torch.randn(WIDTH, WIDTH)) if inner is None else inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.inner)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.heads(x, x, x, need_weights=False)[0]


class Gated(nn.Module):
    """As in a Llama: a root-mean-square norm, and three projections without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def channels_first(module: nn.Module) -> nn.Module:
    return Apply(lambda x, inner: inner(x.transpose(1, 2)).transpose(1, 2), module)


def as_images(module: nn.Module) -> nn.Module:
    return Apply(lambda x, inner: inner(x.transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2), module)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "bilinear": lambda: Apply(
        lambda x, inner: inner(torch.tanh(x), x), nn.Bilinear(WIDTH, WIDTH, WIDTH, bias=False)
    ),
    "matmul": lambda: Apply(lambda x, w: x @ w),
    "matmul of a transpose": lambda: Apply(lambda x, w: x @ w.mT),
    "einsum": lambda: Apply(lambda x, w: torch.einsum("bld,od->blo", x, w)),
    "slices": lambda: Apply(lambda x, w: x[..., :2] @ w[:2] - x[..., 2:] @ w[2:]),
    "expanded": lambda: Apply(lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1))),
    "viewed": lambda: Apply(lambda x, w: x * w.view(2, 2, WIDTH).sum(0)[0] * w.flatten()[:WIDTH]),
    "cast": lambda: Apply(lambda x, w: (x.float() @ w.float()).double()),
    "elementwise": lambda: Apply(lambda x, w: torch.tanh(x * w[0] + w[1]) * w[2].exp()),
    "conv1d without bias": lambda: channels_first(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)),
    "conv2d": lambda: as_images(nn.Conv2d(WIDTH, WIDTH, 1, groups=2)),
    "transposed conv1d": lambda: channels_first(nn.ConvTranspose1d(WIDTH, WIDTH, 1, bias=False)),
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "lstm without bias": lambda: First(nn.LSTM(WIDTH, WIDTH, bias=False, batch_first=True)),
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: channels_first(nn.GroupNorm(2, WIDTH)),
    "batch norm": lambda: channels_first(nn.BatchNorm1d(WIDTH)),
    "instance norm": lambda: channels_first(nn.InstanceNorm1d(WIDTH, affine=True)),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "prelu": lambda: nn.PReLU(),
    "attention": Attention,
    "transformer layer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 8, dropout=0.0, bias=False, batch_first=True
    ),
    "gated": Gated,
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH, bias=False)),
}


def chain(kind: str) -> list[nn.Module]:
    """Layers of a kind, of which each stage has one at least; embeddings and head are tied, without a bias.

    The second stage has nothing else: where that is one parameter, its own memory is laid out as a stage's is.
    """
    torch.manual_seed(1)
    table = nn.Embedding(WIDTH, WIDTH)
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = table.weight
    layers = [table, *(KINDS[kind]() for _ in range(4)), head]
    return list(nn.Sequential(*layers).double())


def batches(kind: str, count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(WIDTH, (SAMPLES, LENGTH), generator=draw),
            torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=draw),
        )
        for _ in range(count)
    ]


SYSTEMS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "gpipe": (3, {}, emulation.one_device),
    "dapple": (3, {}, emulation.one_device),
    "pipedream": (1, {}, emulation.pipedream),
    "pipedream, micro-batches": (3, {"schedule": "pipedream"}, emulation.pipedream),
    "pipedream-2bw": (3, {}, emulation.two_buffered),
    "zero-bubble-h1": (3, {"schedule": "zero-bubble-h1"}, emulation.one_device),
}


@pytest.mark.grid(54)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_system_trains_a_kind_of_layer(kind: str, system: str, recompute: str) -> None:
    M, options, emulate = SYSTEMS[system]
    bounds = [0, 2, 3, 6]
    data = batches(kind, 8)
    case = emulation.Case(
        layers=lambda: copy.deepcopy(chain(kind)),
        loss_fn=nn.MSELoss(),
        optimizer=momentum,
        bounds={K: bounds},
        micro_batches=M,
    )
    expected = emulate(case, data, K)
    options = options | {"stages": K, "micro_batches": M, "partition": bounds[1:-1], "recompute": recompute}
    plan = Plan(**options) if "schedule" in options else Plan.for_system(system, **options)
    with Pipeline(nn.Sequential(*chain(kind)), plan, loss_fn=nn.MSELoss(), optimizer=momentum) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
        state = pipeline.state_dict()
    assert_same_training((losses, state), (expected.losses, expected.state))
