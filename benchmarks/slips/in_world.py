"""Slips with the world outside a model, and with what forwards take and return."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import torch
from torch import nn

from benchmarks.slips.around import around, place
from benchmarks.slips.script import Script
from benchmarks.slips.slip import COPIED, MIXES, float_input, is_chain, slip, tensor_output

# ---- the world outside -----------------------------------------------------------------------------------------------

SCALE = 1.0


@slip("a global constant", "A block reads a global that the loop changes from batch to batch.", mixes=True)
def _(script: Script, draw: random.Random) -> None:
    def change(user: Any) -> None:
        global SCALE
        SCALE *= 0.8

    global SCALE
    SCALE = 1.0
    around(script, place(draw), lambda inner, x: inner(x) * SCALE)
    script.body.append(change)


@slip(
    "an attribute of the model",
    "The loop sets model.alpha before each batch, and a block reads it.",
    design=COPIED,
    mixes=True,
)
def _(script: Script, draw: random.Random) -> None:
    script.model.alpha = 1.0

    class Reading(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.alpha = inner, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.alpha

    n = place(draw)
    script.replace(n, Reading)
    reader: Any = script.block(n)

    def change(user: Any) -> None:
        reader.alpha *= 0.8

    script.body.append(change)


@slip("an environment variable", "A block reads os.environ, which the loop changes.", mixes=True)
def _(script: Script, draw: random.Random) -> None:
    os.environ["SLIP"] = "0"

    def change(user: Any) -> None:
        os.environ["SLIP"] = str(user.step)

    around(script, place(draw), lambda inner, x: inner(x) * (1 + 0.1 * int(os.environ["SLIP"])))
    script.body.append(change)


# ---- what forwards take and return -----------------------------------------------------------------------------------


class Returning(nn.Module):
    """A model whose output comes in a container. ``kind``: which."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.model(x)
        if self.kind == "tuple":
            return y, y.square().mean()
        if self.kind == "list":
            return [y, None]
        return {"logits": y, "loss": None}


@slip(
    "output in a container",
    "The model returns a tuple, list or dict with None in it, of which the loss takes what it needs.",
    fits=lambda s: float_input(s) and tensor_output(s),
)
def _(script: Script, draw: random.Random) -> str:
    kind = draw.choice(("tuple", "list", "dict"))
    script.model = Returning(script.model, kind)
    script.blocks = [f"model.{name}" for name in script.blocks]
    loss_fn = script.loss_fn
    script.loss_fn = lambda output, target: loss_fn(output["logits"] if kind == "dict" else output[0], target)
    return kind


@slip("a forward that returns None", "The last module returns nothing.", fits=is_chain)
def _(script: Script, draw: random.Random) -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            pass

    script.model.append(Nothing())


class Defaults(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, scale: float = 0.5, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = self.model(x * scale)
        return y if shift is None else y + shift


@slip(
    "default arguments",
    "The model's forward has arguments with defaults, which no batch gives.",
    fits=lambda s: float_input(s) and tensor_output(s),
)
def _(script: Script, draw: random.Random) -> None:
    script.model = Defaults(script.model)
    script.blocks = [f"model.{name}" for name in script.blocks]


@slip("mixed dtypes", "A block computes in float32 inside a float64 model.")
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) + torch.tanh(x.float()).double() * 0.1)


@slip("complex numbers", "A block goes through a Fourier transform.")
def _(script: Script, draw: random.Random) -> None:
    around(script, place(draw), lambda inner, x: inner(x) + torch.fft.ifft(torch.fft.fft(x) * 1.1).real)


@slip("a device asked for", "A block makes a tensor by torch.arange(x.shape[1]) in its forward.")
def _(script: Script, draw: random.Random) -> None:
    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return inner(x) + torch.arange(x.shape[-1], dtype=x.dtype, device=x.device) * 0.01

    around(script, place(draw), forward)


@slip("a block that prints", "A block logs the norm of its input by float(x.norm()).")
def _(script: Script, draw: random.Random) -> None:
    log: list[float] = []

    def forward(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        log.append(float(x.detach().norm()))
        return inner(x)

    around(script, place(draw), forward)


@slip(
    "deep copies of parameters", "A block keeps a frozen copy of itself, as a teacher, and adds what it says."
)
def _(script: Script, draw: random.Random) -> None:
    class Taught(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.teacher = copy.deepcopy(inner).requires_grad_(False).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.inner(x) + 0.1 * target

    script.replace(place(draw), Taught)


@slip(
    "a teacher that follows",
    "A block moves the weights of its teacher after itself in each forward (EMA).",
    mixes=True,
    about=MIXES,
)
def _(script: Script, draw: random.Random) -> None:
    class Following(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.teacher = copy.deepcopy(inner).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if self.training:
                    for mine, theirs in zip(self.teacher.parameters(), self.inner.parameters()):
                        mine.lerp_(theirs, 0.5)
                target = self.teacher(x)
            return self.inner(x) + 0.1 * target

    script.replace(place(draw), Following)
