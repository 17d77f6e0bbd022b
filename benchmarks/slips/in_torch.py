"""Slips with what torch offers: writes in place, parametrizations, wrappers; globals, and forms of outputs."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from benchmarks.slips.around import Forward, around, place
from benchmarks.slips.script import Script
from benchmarks.slips.slip import MIXES, WRITES, float_input, is_chain, slip

# ---- in place, views -------------------------------------------------------------------------------------------------


@slip("in place on its input", "A block begins with x.mul_(1.1).")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x.mul_(1.1))

    around(script, 1 + draw.randrange(2), forward)


@slip("in place on its output", "A block ends with y += 1 and y[:, 0] = 0.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = inner(x) * 1.0
        y += 0.1
        y[:, 0] = 0
        return y

    around(script, place(draw), forward)


@slip(
    "in place on the batch",
    "The first layer writes to the batch, which the next epoch sees again.",
    fits=float_input,
    about=WRITES,
)
def _(script: Script, draw: random.Random) -> None:
    class Scaling(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x.mul_(1.5)
            return self.inner(x)

    if is_chain(script):
        script.model[0] = Scaling(script.model[0])
    else:
        script.model.stem = Scaling(script.model.stem)
    script.epochs = 2


@slip("a view", "A block returns a view of its input, and the next one writes to it.")
def _(script: Script, draw: random.Random) -> None:
    n = draw.randrange(2)
    around(script, n, lambda inner, x: inner(x).transpose(0, 1).transpose(0, 1))
    around(script, n + 1, lambda inner, x: inner(x.add_(0.1)))


@slip("an alias", "A block returns its very input, which a later block writes to.")
def _(script: Script, draw: random.Random) -> None:
    script.replace(0, lambda block: nn.Identity())

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x.add_(0.1) if x.requires_grad and not x.is_leaf else x + 0.1)

    around(script, 1, forward)


@slip("an input kept and written to", "A block keeps its input for a shortcut, and relu_ writes to it.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        short = x
        y = inner(torch.relu_(x * 1.0))
        return y + short

    around(script, place(draw), forward)


# ---- torch's own tricks ----------------------------------------------------------------------------------------------


def _first_matrix(block: nn.Module) -> nn.Module:
    return next(m for m in block.modules() if isinstance(m, nn.Linear | nn.Conv2d))


@slip("weight norm", "A layer has the parametrization weight_norm.")
def _(script: Script, draw: random.Random) -> None:
    parametrizations.weight_norm(_first_matrix(script.block(place(draw))))


@slip("old weight norm", "A layer has the older, hook-based weight_norm.")
def _(script: Script, draw: random.Random) -> None:
    nn.utils.weight_norm(_first_matrix(script.block(place(draw))))


@slip(
    "spectral norm",
    "A layer has the parametrization spectral_norm, whose forwards iterate.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    parametrizations.spectral_norm(_first_matrix(script.block(place(draw))))


@slip("old spectral norm", "A layer has the older, hook-based spectral_norm.", mixes=True, about=MIXES)
def _(script: Script, draw: random.Random) -> None:
    nn.utils.spectral_norm(_first_matrix(script.block(place(draw))))


@slip("orthogonal", "A layer has the parametrization orthogonal.")
def _(script: Script, draw: random.Random) -> None:
    linear = next((m for m in script.block(0).modules() if isinstance(m, nn.Linear)), None)
    if linear is not None:
        parametrizations.orthogonal(linear)


@slip("pruned", "A layer is pruned by nn.utils.prune.")
def _(script: Script, draw: random.Random) -> None:
    prune.random_unstructured(_first_matrix(script.block(place(draw))), "weight", 0.3)


def _checkpointed(reentrant: bool) -> Forward:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x, use_reentrant=reentrant)

    return forward


# On one device the running statistics of a BatchNorm move in both forwards of a block.
ONCE = "docs/how-it-works.md: running statistics move once per batch, also of layers that run twice"


@slip("checkpoint", "A block recomputes itself by torch.utils.checkpoint.", design=ONCE)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), _checkpointed(reentrant=False))


@slip(
    "reentrant checkpoint",
    "A block recomputes itself by checkpoint(..., use_reentrant=True).",
    design=ONCE,
)
def _(script: Script, draw: random.Random) -> None:
    around(script, 1 + draw.randrange(2), _checkpointed(reentrant=True))


@slip("checkpoint with dropout", "A checkpointed block has dropout.", draws=True)
def _(script: Script, draw: random.Random) -> None:
    n = place(draw)
    script.replace(n, lambda block: nn.Sequential(block, nn.Dropout(0.3)))
    around(script, n, _checkpointed(reentrant=False))


@slip("DataParallel", "The model comes in nn.DataParallel.")
def _(script: Script, draw: random.Random) -> None:
    script.model = nn.DataParallel(script.model)
    script.blocks = [f"module.{name}" for name in script.blocks]


@slip("compiled block", "A block is compiled by block.compile(backend='eager').")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).compile(backend="eager")


@slip("lazy layer", "A layer is an nn.LazyLinear that has seen no batch.")
def _(script: Script, draw: random.Random) -> None:
    script.block(0).lazy = nn.LazyLinear(4)


@slip(
    "attention with a mask",
    "A block is nn.MultiheadAttention with a causal mask in a buffer.",
    fits=lambda script: (
        not is_chain(script) and len(script.block(0)._modules) > 0 and script.output_is_tensor
    ),
)
def _(script: Script, draw: random.Random) -> None:
    script.replace(place(draw), lambda block: Attending())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        mask = torch.full((16, 16), float("-inf"), dtype=torch.float64).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if x.dim() == 3 else x.unsqueeze(1)
        length = y.shape[1]
        y, _ = self.attention(y, y, y, attn_mask=self.mask[:length, :length], need_weights=False)
        return x + y.view_as(x)


@slip("sparse embedding", "The embedding has sparse=True.", fits=lambda s: hasattr(s.model, "embedding"))
def _(script: Script, draw: random.Random) -> None:
    if hasattr(script.model, "position"):  # a tied head has dense gradients
        script.model.head.weight = nn.Parameter(script.model.head.weight.detach().clone())
    script.model.embedding.sparse = True
    script.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)


@slip(
    "embedding with max_norm",
    "The embedding has max_norm, so that forwards change its weight.",
    fits=lambda s: hasattr(s.model, "embedding"),
)
def _(script: Script, draw: random.Random) -> None:
    if hasattr(script.model, "position"):
        script.model.head.weight = nn.Parameter(script.model.head.weight.detach().clone())
    script.model.embedding.max_norm = 1.0
