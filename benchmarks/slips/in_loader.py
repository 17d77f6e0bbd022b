"""Slips in loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.slips.script import SAMPLES, Script, User
from benchmarks.slips.slip import float_input, slip, tensor_output


def _both(script: Script) -> bool:
    """Whether a model can be wrapped that takes one tensor of floats and returns one."""
    return float_input(script) and tensor_output(script)


def _dataset(script: Script) -> TensorDataset:
    return TensorDataset(*(torch.cat(column) for column in zip(*script.batches)))


class Generated:
    """A loader that makes another iterator each time."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _reused(name: str, what: str, write: Any) -> None:
    @slip(name, what)
    def _(script: Script, draw: random.Random) -> None:
        given = script.batches

        def batches() -> Iterator[Any]:
            kept = pytree.tree_map(torch.clone, given[0])
            for batch in given:
                pytree.tree_map(write, kept, batch)
                yield kept

        script.loader = Generated(batches)


_reused("a buffer reused", "The loader writes each batch into the same tensors by copy_.", torch.Tensor.copy_)


def _write_by_numpy(to: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    to.numpy()[...] = value.numpy()
    return to


_reused(
    "a buffer reused by NumPy",
    "The loader writes each batch into the arrays under the same tensors.",
    _write_by_numpy,
)


@slip(
    "inputs with a graph",
    "Inputs come from an encoder outside the model, which trains beside it.",
    fits=float_input,
)
def _(script: Script, draw: random.Random) -> None:
    gain = nn.Parameter(torch.ones((), dtype=torch.float64))
    script.loader = Generated(lambda: ((x * gain, y) for x, y in script.batches))
    script.extras = lambda: {"gain": torch.zeros(()) if gain.grad is None else gain.grad.clone()}


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _plain_tensors(script: Script) -> bool:
    return all(isinstance(part, torch.Tensor) for part in script.batches[0])


@slip("DataLoader", "A DataLoader shuffles by torch's generator, two epochs.", fits=_plain_tensors)
def _(script: Script, draw: random.Random) -> None:
    script.loader = DataLoader(_dataset(script), batch_size=SAMPLES, shuffle=True)
    script.epochs = 2


@slip(
    "shuffled twice",
    "A generator of its own shuffles, and the loader was counted by list() before.",
    fits=_plain_tensors,
)
def _(script: Script, draw: random.Random) -> None:
    own = torch.Generator().manual_seed(draw.randrange(1000))
    script.loader = DataLoader(_dataset(script), batch_size=SAMPLES, shuffle=True, generator=own)
    script.epochs = 2
    list(script.loader)


@slip("an iterator for two epochs", "Each epoch takes three batches of one iterator by islice.")
def _(script: Script, draw: random.Random) -> None:
    from itertools import islice

    source = iter(script.batches)
    script.loader = Generated(lambda: islice(source, 3))
    script.epochs = 2


@slip("augmentation by random", "The loader scales each batch by random.random().", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches
    script.loader = Generated(lambda: ((x * (0.5 + random.random()), y) for x, y in given))


@slip("augmentation by torch", "The loader adds torch.randn_like(x).", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches
    script.loader = Generated(lambda: ((x + torch.randn_like(x), y) for x, y in given))


@slip(
    "augmentation beside dropout",
    "The loader adds noise, and the model has dropout.",
    fits=float_input,
    draws=True,
)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches
    script.loader = Generated(lambda: ((x + torch.randn_like(x), y) for x, y in given))
    script.replace(0, lambda block: nn.Sequential(block, nn.Dropout(0.2)))


@slip(
    "the body draws, too",
    "The loader and the body of the loop draw from torch's generator.",
    design="Pipeline.train: the loader is a batch ahead of the loop",
    fits=float_input,
)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches
    script.loader = Generated(lambda: ((x + torch.randn_like(x), y) for x, y in given))
    script.body.append(lambda user: torch.rand(draw.randrange(1, 2)))


@slip(
    "a curriculum",
    "The loop sets how hard the loader makes the next batch, by the last loss.",
    design="Pipeline.train: the loader is a batch ahead of the loop",
    fits=float_input,
)
def _(script: Script, draw: random.Random) -> None:
    hard = [1.0]
    given = script.batches
    script.loader = Generated(lambda: ((x * hard[0], y) for x, y in given))

    def harder(user: User) -> None:
        hard[0] += 0.1 * user.loss

    script.body.append(harder)


@slip("a batch edited after use", "The loop overwrites the tensors of a batch once it was trained on.")
def _(script: Script, draw: random.Random) -> None:
    given = pytree.tree_map(torch.clone, script.batches)
    script.loader = given

    def wipe(user: User) -> None:
        for t in pytree.tree_leaves(given[user.step - 1]):
            t.zero_()

    script.body.append(wipe)


@slip(
    "a loop that is left",
    "The loop breaks after three batches.",
    design="Pipeline.train: when the result of a batch is yielded, the next one is in flight",
)
def _(script: Script, draw: random.Random) -> None:
    script.stop = 3


@slip(
    "dictionaries with labels",
    "Batches are dictionaries, as collators of transformers make them.",
    fits=_both,
)
def _(script: Script, draw: random.Random) -> None:
    class Named(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.model(pixels * scale)

    script.model = Named(script.model)
    script.blocks = [f"model.{name}" for name in script.blocks]
    given = script.batches
    script.batches = [{"pixels": x, "scale": torch.tensor(0.5, dtype=x.dtype), "labels": y} for x, y in given]


@slip(
    "dictionaries in another order",
    "Dictionaries of inputs have their keys in another order in each batch.",
    fits=lambda s: isinstance(s.batches[0][0], tuple) and hasattr(s.model, "words"),
)
def _(script: Script, draw: random.Random) -> None:
    orders = [("x", "word"), ("word", "x")]

    def named(inputs: Any) -> dict[str, Any]:
        whole = dict(zip(("x", "word"), inputs))
        return {name: whole[name] for name in draw.choice(orders)}

    script.change_inputs(named)


@slip("a teacher in the loader", "The loader yields inside of torch.no_grad().")
def _(script: Script, draw: random.Random) -> None:
    given = script.batches

    def batches() -> Iterator[Any]:
        with torch.no_grad():
            yield from given

    script.loader = Generated(batches)


@slip("a loader in inference mode", "The loader makes its batches, and yields, inside of inference_mode().")
def _(script: Script, draw: random.Random) -> None:
    given = script.batches

    def batches() -> Iterator[Any]:
        with torch.inference_mode():
            for batch in given:
                yield pytree.tree_map(torch.clone, batch)

    script.loader = Generated(batches)


@slip(
    "inference tensors",
    "The loader makes its batches in inference_mode(), and yields outside of it.",
    fits=float_input,
)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches

    def batches() -> Iterator[Any]:
        for batch in given:
            with torch.inference_mode():
                made = pytree.tree_map(torch.clone, batch)
            yield made

    script.loader = Generated(batches)


@slip(
    "autocast in the loader", "The loader yields inside of torch.autocast.", dtype=torch.float32, rounds=True
)
def _(script: Script, draw: random.Random) -> None:
    given = script.batches

    def batches() -> Iterator[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from given

    script.loader = Generated(batches)
