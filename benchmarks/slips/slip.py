"""A slip: a change of a training script that an ordinary user may make, and which warnings are about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.slips.script import Script

# What several slips differ by, where the documentation says so.
COPIED = (
    "docs/tutorial.md: the model is copied, and what is done with the caller's own changes nothing in the run"
)

# What warnings of several slips match.
MIXES = "|".join(
    (
        "branches on the values",
        "in . micro-batches",
        "not do the same twice",
        "draws from the generator of",
        "outside of the model",
    )
)
WHOLE = "say so by Source(batch_dim)"
TOGETHER = "which other parameters its optimizer has"
HOOKED = "has a hook, which"
EVALUATED = "in evaluation mode as a whole"
KEEPS = "when it is called again"
WRITES = "writes to its inputs"

Make = Callable[[Script, random.Random], str | None]


@dataclass(frozen=True)
class Slip:
    """A slip.

    Attributes:
        name: in tables.
        what: a sentence for readers.
        make: changes a script, and may return what it has drawn.
        fits: whether a script can have it.
        about: what a warning must match to be about this slip; None: no warning is.
        design: where the documentation says that training differs; "" if it does not.
        dtype: of the weights.
        rounds: whether 16 bits round in it.
        draws: whether layers draw from torch's generators.
        mixes: whether samples of a batch have to do with each other, beside BatchNorm.
    """

    name: str
    what: str
    make: Make
    fits: Callable[[Script], bool] = lambda script: True
    about: str | None = None
    design: str = ""
    dtype: torch.dtype = torch.float64
    rounds: bool = False
    draws: bool = False
    mixes: bool = False

    def applies(self, script: Script) -> bool:
        return self.fits(script)


SLIPS: dict[str, Slip] = {}


def slip(name: str, what: str, **options: Any) -> Callable[[Make], Make]:
    """Register a slip."""

    def register(make: Make) -> Make:
        if name in SLIPS:
            raise ValueError(f"there are two slips {name!r}")
        SLIPS[name] = Slip(name, what, make, **options)
        return make

    return register


def float_input(script: Script) -> bool:
    return script.input_is_float


def tensor_output(script: Script) -> bool:
    return script.output_is_tensor


def class_targets(script: Script) -> bool:
    """Whether targets are a class for each sample."""
    target = script.batches[0][1]
    return isinstance(target, torch.Tensor) and target.dim() == 1


def is_chain(script: Script) -> bool:
    return isinstance(script.model, torch.nn.Sequential)
