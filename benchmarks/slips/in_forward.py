"""Slips in forwards: modes, gradients, coins, counters, and what a forward leaves behind."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional

from benchmarks.slips.around import around, place
from benchmarks.slips.script import Script
from benchmarks.slips.slip import MIXES, slip

# ---- modes and gradients ---------------------------------------------------------------------------------------------


@slip("eval of a part", "One block of the model is in evaluation mode, as a frozen backbone is.")
def _(script: Script, draw: random.Random) -> None:
    script.block(place(draw)).eval()


@slip(
    "eval of the whole",
    "The model was loaded with eval(), and train() is never called.",
    about="evaluation mode",
)
def _(script: Script, draw: random.Random) -> None:
    script.model.eval()


@slip("detach in the middle", "A block returns a tensor that is detached.")
def _(script: Script, draw: random.Random) -> None:
    around(script, 1 + draw.randrange(2), lambda inner, x: inner(x).detach())


@slip("no_grad in a block", "A block computes inside of torch.no_grad().")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return inner(x)

    around(script, place(draw), forward)


@slip("partial no_grad", "A block adds something that it computes without gradients.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.tanh(x)
        return inner(x) + y

    around(script, place(draw), forward)


@slip("frozen parts", "Some parameters do not require gradients.")
def _(script: Script, draw: random.Random) -> None:
    parameters = list(script.model.parameters())
    for p in draw.sample(parameters, len(parameters) // 3):
        p.requires_grad_(False)


@slip("asks grad mode", "A block asks torch.is_grad_enabled() which way to go.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x) if torch.is_grad_enabled() else inner(x) * 0.5

    around(script, place(draw), forward)


@slip("asks requires_grad", "A block asks its input whether it requires a gradient, and scales it if so.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x * 1.5) if x.requires_grad else inner(x)

    around(script, draw.randrange(3), forward)


@slip("asks is_leaf", "A block asks whether its input is a leaf of the graph.", about="asks for is_leaf")
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x * 1.5) if x.is_leaf else inner(x))


@slip(
    "gradient in the forward",
    "A block uses the gradient of its own output for its input, as force fields do.",
)
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            y = inner(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 0.1 * grad

    around(script, place(draw), forward)


# ---- coins and counters ----------------------------------------------------------------------------------------------


@slip("coin of random", "A block is left out where random.random() says so.", mixes=True, about=MIXES)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) if random.random() < 0.5 else x * 0.5)


@slip("coin of numpy", "A block is left out where numpy.random says so.", mixes=True, about=MIXES)
def _(script: Script, draw: random.Random) -> None:
    import numpy

    around(script, place(draw), lambda inner, x: inner(x) if numpy.random.rand() < 0.5 else x * 0.5)


@slip("coin of torch", "A block is left out where torch.rand(()) says so, as LayerDrop does.", draws=True)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) if float(torch.rand(())) < 0.5 else x * 0.5)


@slip(
    "coin of its own generator",
    "A block draws from a torch.Generator that it has made.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    own = torch.Generator().manual_seed(draw.randrange(1000))

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x) * (1 + torch.rand((), generator=own, dtype=x.dtype))

    around(script, place(draw), forward)


@slip(
    "coin of random.Random", "A block draws from a random.Random that it has made.", mixes=True, about=MIXES
)
def _(script: Script, draw: random.Random) -> None:
    own = random.Random(draw.randrange(1000))
    around(script, place(draw), lambda inner, x: inner(x) * (1 + own.random()))


@slip(
    "one coin for two blocks",
    "The model's forward draws a number that two blocks use.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    drawn = [0.0]

    def first(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        drawn[0] = random.random()
        return inner(x) * (0.5 + drawn[0])

    around(script, 0, first)
    around(script, 2, lambda inner, x: inner(x) * (1.5 - drawn[0]))


@slip("noise", "A block adds torch.randn_like(x).", draws=True)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) + 0.1 * torch.randn_like(x))


@slip("dropout", "Two blocks have nn.Dropout.", draws=True)
def _(script: Script, draw: random.Random) -> None:
    for n in (0, 2):
        script.replace(n, lambda block: nn.Sequential(block, nn.Dropout(draw.choice((0.1, 0.5)))))


@slip(
    "functional dropout",
    "A block calls functional.dropout without training=, so that it drops in evaluation, too.",
    draws=True,
)
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: functional.dropout(inner(x), 0.3))


class Counter(nn.Module):
    """Counts its calls, as a module does that warms something up. ``buffer``: in a buffer, else in an int."""

    def __init__(self, inner: nn.Module, buffer: bool) -> None:
        super().__init__()
        self.inner, self.buffer, self.calls = inner, buffer, 0
        if buffer:
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.buffer:
            if self.training:
                self.steps += 1
            return self.inner(x) * (self.steps / 10).clamp(max=1.0).to(x.dtype)
        if self.training:
            self.calls += 1
        return self.inner(x) * min(1.0, self.calls / 10)


@slip(
    "counter on a module", "A module counts its calls in an int, and warms up by it.", mixes=True, about=MIXES
)
def _(script: Script, draw: random.Random) -> None:
    script.replace(place(draw), lambda block: Counter(block, buffer=False))


@slip(
    "counter in a buffer",
    "A module counts its calls in a buffer, and warms up by it.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    script.replace(place(draw), lambda block: Counter(block, buffer=True))


@slip(
    "counter in a closure",
    "A function that a module calls counts in a variable of its script.",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    calls = [0]

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls[0] += 1
        return inner(x) * min(1.0, calls[0] / 10)

    around(script, place(draw), forward)


# ---- state that forwards leave ---------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Scales by a moving mean of what it gets. ``how``: where that is kept, and how it moves."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        mean = torch.zeros((), dtype=torch.float64)
        if how == "attribute":
            self.mean = mean
        else:
            self.register_buffer("mean", mean, persistent=how != "not saved")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                if self.how in ("in place", "not saved"):
                    self.mean.lerp_(x.mean(), 0.3)
                elif self.how == "by data":
                    self.mean.data = torch.lerp(self.mean, x.mean(), 0.3)
                else:
                    self.mean = torch.lerp(self.mean, x.mean(), 0.3)
        return self.inner(x) * (1 + self.mean)


def _centred(name: str, how: str, what: str) -> None:
    @slip(name, what, mixes=True, about=MIXES)
    def _(script: Script, draw: random.Random) -> None:
        script.replace(place(draw), lambda block: Centred(block, how))


_centred("buffer moved in place", "in place", "A moving mean in a buffer, moved in place by each forward.")
_centred(
    "buffer replaced", "replaced", "A moving mean in a buffer, to which each forward assigns another tensor."
)
_centred("buffer by data", "by data", "A moving mean in a buffer, whose .data each forward assigns.")
_centred("buffer not saved", "not saved", "A moving mean in a buffer with persistent=False.")
_centred("state in an attribute", "attribute", "A moving mean in a plain tensor attribute.")


class Remembers(nn.Module):
    """Adds the mean of what it returned the last time, as a layer with a memory does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.last is not None:
            y = y + 0.2 * self.last
        self.last = y.detach().mean()
        return y


@slip(
    "memory of the last call", "A module adds what it has kept of the batch before.", mixes=True, about=MIXES
)
def _(script: Script, draw: random.Random) -> None:
    script.replace(place(draw), Remembers)


class Keeps(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner(x)
        return self.kept


@slip("side channel", "A block keeps its output in an attribute, where a later block reads it.")
def _(script: Script, draw: random.Random) -> None:
    keeper = Keeps(script.block(0))
    script.replace(0, lambda block: keeper)
    around(script, 2, lambda inner, x: inner(x) + 0.1 * keeper.kept.mean())


@slip("cached by shape", "A block caches a mask by the shape of its input.")
def _(script: Script, draw: random.Random) -> None:
    cache: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        key = tuple(x.shape[1:])
        if key not in cache:
            cache[key] = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        return inner(x * cache[key])

    around(script, place(draw), forward)
