"""Slips in modules: samples that mix, hooks, and what modules share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.slips.around import around, place
from benchmarks.slips.script import Script
from benchmarks.slips.slip import HOOKED, MIXES, float_input, is_chain, slip

# ---- samples of a batch ----------------------------------------------------------------------------------------------


@slip("centred by the batch", "A block takes the batch's mean away, x - x.mean(0).", mixes=True, about=MIXES)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x - x.mean(0)))


@slip(
    "mixes samples",
    "A block adds each sample to its neighbour, as a mixup does: x + x.roll(1, 0).",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x + 0.3 * x.roll(1, 0)))


@slip("asks for the batch size", "A block scales by x.shape[0].", mixes=True, about=MIXES)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) * (1 + x.shape[0] / 8))


@slip(
    "a branch by value",
    "A block goes one way where the mean of its input is above zero.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) if float(x.detach().mean()) > 0 else inner(-x))


@slip(
    "functional batch_norm",
    "A block calls functional.batch_norm with statistics of its own.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(functional.batch_norm(x, None, None, training=True))

    around(script, place(draw), forward)


class OwnNorm(nn.BatchNorm1d):
    """A subclass, as of a norm that clips its variance."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


@slip("subclass of BatchNorm", "A block begins with a subclass of nn.BatchNorm1d.", mixes=True)
def _(script: Script, draw: random.Random) -> None:
    def make(block: nn.Module) -> nn.Module:
        width = next(p.shape[-1] for p in block.parameters() if p.dim() == 2)
        return nn.Sequential(Flat(OwnNorm(width, dtype=torch.float64)), block)

    script.replace(place(draw), make)


class Flat(nn.Module):
    """Applies a norm over features to what may have positions, too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


@slip("BatchNorm", "A block begins with nn.BatchNorm1d.")
def _(script: Script, draw: random.Random) -> None:
    def make(block: nn.Module) -> nn.Module:
        width = next((p.shape[-1] for p in block.parameters() if p.dim() == 2), 6)
        momentum = draw.choice((0.1, None))
        return nn.Sequential(Flat(nn.BatchNorm1d(width, momentum=momentum, dtype=torch.float64)), block)

    if any(isinstance(m, nn.Conv2d) for m in script.model.modules()):
        return
    script.replace(place(draw), make)


# ---- hooks -----------------------------------------------------------------------------------------------------------


@slip("forward hook", "A forward hook changes what a block returns.")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).register_forward_hook(lambda module, given, output: output * 0.7)


@slip("forward pre-hook", "A forward pre-hook changes what a block gets.")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).register_forward_pre_hook(lambda module, given: (given[0] * 0.7,))


@slip("full backward hook", "A full backward hook halves the gradient of a block's input.")
def _(script: Script, draw: random.Random) -> None:
    script.block(1 + draw.randrange(2)).register_full_backward_hook(
        lambda module, into, out: tuple(None if g is None else g * 0.5 for g in into)
    )


@slip(
    "full backward hook that limits",
    "A full backward hook gives gradients the norm 1e-3.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    script.block(1 + draw.randrange(2)).register_full_backward_hook(
        lambda module, into, out: tuple(None if g is None else 1e-3 * g / g.norm() for g in into)
    )


@slip("backward pre-hook", "A full backward pre-hook halves the gradient of a block's output.")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).register_full_backward_pre_hook(
        lambda module, grads: tuple(g * 0.5 for g in grads)
    )


@slip("tensor hook in a forward", "A block scales the gradient of its output by x.register_hook.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y

    around(script, place(draw), forward)


@slip(
    "tensor hook that limits",
    "A block clips the gradient of its output, element by element.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return y

    around(script, place(draw), forward)


@slip(
    "hooks on parameters", "Parameters clip their own gradients by register_hook.", mixes=True, about=HOOKED
)
def _(script: Script, draw: random.Random) -> None:
    for p in script.model.parameters():
        if p.requires_grad:
            p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


@slip("hooks after accumulation", "Parameters have hooks that run when a gradient has been accumulated.")
def _(script: Script, draw: random.Random) -> None:
    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    for p in script.model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(halve)


@slip("a hook that thaws", "A forward hook lets a frozen block train from its third call on.", mixes=True)
def _(script: Script, draw: random.Random) -> None:
    calls = [0]
    block = script.block(1)
    frozen = [p for p in block.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)

    def thaw(module: nn.Module, given: Any) -> None:
        calls[0] += 1
        if calls[0] > 3:
            module.requires_grad_(True)

    block.register_forward_pre_hook(thaw)


@slip("activations gathered by a hook", "A hook gathers activations, of which the loss takes the last.")
def _(script: Script, draw: random.Random) -> None:
    seen: list[torch.Tensor] = []
    script.block(0).register_forward_hook(lambda module, given, output: seen.append(output))
    loss_fn = script.loss_fn

    def loss(output: Any, target: Any) -> torch.Tensor:
        return loss_fn(output, target) + 0.1 * seen[-1].square().mean()

    script.loss_fn = loss


# ---- what modules share ----------------------------------------------------------------------------------------------


@slip("a block twice", "Two places of the model hold the same block.")
def _(script: Script, draw: random.Random) -> None:
    first = script.block(0)
    script.replace(2, lambda block: first)


@slip("a tied weight", "Two layers of different blocks have the same nn.Parameter.")
def _(script: Script, draw: random.Random) -> None:
    pairs = zip(script.block(0).named_parameters(), script.block(2).parameters())
    (name, first), _ = next(pair for pair in pairs if pair[0][1].shape == pair[1].shape)
    parent, _, key = name.rpartition(".")
    setattr(script.block(2).get_submodule(parent), key, first)


@slip("tied by data", "Two parameters are tied by q.data = p.data, and not by being one.")
def _(script: Script, draw: random.Random) -> None:
    for p, q in zip(script.block(0).parameters(), script.block(2).parameters()):
        if p.shape == q.shape and p.dim() > 1:
            q.data = p.data
            return


@slip("views of one parameter", "Two modules use halves of a parameter that a third one holds.")
def _(script: Script, draw: random.Random) -> None:
    holder = nn.Module()
    holder.gains = nn.Parameter(torch.ones(4, dtype=torch.float64))

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module, first: int) -> None:
            super().__init__()
            self.inner, self.holder, self.first = inner, holder, first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.holder.gains[self.first : self.first + 2].sum()

    script.replace(0, lambda block: Scaled(block, 0))
    script.replace(2, lambda block: Scaled(block, 2))


@slip("a parameter in a closure", "A block uses a parameter of another block that its module does not hold.")
def _(script: Script, draw: random.Random) -> None:
    other = next(p for p in script.block(0).parameters() if p.requires_grad)
    around(script, 2, lambda inner, x: inner(x) * (1 + other.square().mean()))


@slip("a module in a list", "A block keeps another block in a Python list, and uses a parameter of it.")
def _(script: Script, draw: random.Random) -> None:
    class Knowing(nn.Module):
        def __init__(self, inner: nn.Module, other: nn.Module) -> None:
            super().__init__()
            self.inner, self.others = inner, [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            p = next(p for p in self.others[0].parameters() if p.requires_grad)
            return self.inner(x) * (1 + p.square().mean())

    first = script.block(0)
    script.replace(2, lambda block: Knowing(block, first))


@slip("never used", "The model has a layer that its forward never calls.")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).spare = nn.Linear(3, 3, dtype=torch.float64)


@slip(
    "used now and then",
    "A layer is used in every other batch, by a value in the inputs; the plain optimizer skips it in the others.",
    fits=lambda script: float_input(script) and is_chain(script),
)
def _(script: Script, draw: random.Random) -> None:
    for n, (inputs, _) in enumerate(script.batches):
        flat = inputs.flatten(1)
        flat[:, 0] = flat[:, 0].abs() * (-1) ** n
    width = script.batches[0][0].shape[-1]
    script.model.insert(0, Gated(width))
    script.blocks = [f"{int(name) + 1}" for name in script.blocks]


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.extra = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.flatten()[0]) > 0:
            return x + self.extra(x)
        return x


@slip("an unused output", "A block returns a pair, of which the next one takes the first.", fits=is_chain)
def _(script: Script, draw: random.Random) -> None:
    n = draw.randrange(2)
    script.replace(n, lambda block: Pair(block))
    script.replace(n + 1, lambda block: First(block))


class Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.inner(x), x.square().mean(-1)


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.inner(pair[0])
