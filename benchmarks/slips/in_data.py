"""Slips in batches."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.slips.script import SAMPLES, Script
from benchmarks.slips.slip import WHOLE, class_targets, float_input, is_chain, slip, tensor_output


def _both(script: Script) -> bool:
    """Whether a model can be wrapped that takes one tensor of floats and returns one."""
    return float_input(script) and tensor_output(script)


class Wrapped(nn.Module):
    """A model that takes something beside its inputs. ``use``: of input and that, what the model gets."""

    def __init__(self, model: nn.Module, use: Any) -> None:
        super().__init__()
        self.model, self.use = model, use

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        return self.model(self.use(x, other))


def _wrap(script: Script, use: Any) -> None:
    script.model = Wrapped(script.model, use)
    script.blocks = [f"model.{name}" for name in script.blocks]


# ---- sizes -----------------------------------------------------------------------------------------------------------


@slip("odd last batch", "The last batch is shorter, and not a multiple of the micro-batches.")
def _(script: Script, draw: random.Random) -> str:
    samples = draw.randrange(2, 8)
    script.batches[-1] = pytree.tree_map(lambda t: t[:samples], script.batches[-1])
    return f"{samples} samples"


@slip("one sample at last", "The last batch has one sample.")
def _(script: Script, draw: random.Random) -> None:
    script.batches[-1] = pytree.tree_map(lambda t: t[:1], script.batches[-1])


@slip(
    "one sample at last, BatchNorm1d",
    "The last batch has one sample, and the model an nn.BatchNorm1d.",
    fits=lambda s: float_input(s) and is_chain(s),
)
def _(script: Script, draw: random.Random) -> None:
    script.model.insert(
        len(script.model) - 1, nn.BatchNorm1d(script.model[-1].in_features, dtype=torch.float64)
    )
    script.batches[-1] = pytree.tree_map(lambda t: t[:1], script.batches[-1])


@slip("uneven batches", "Every batch has another size.")
def _(script: Script, draw: random.Random) -> None:
    script.batches = [_some(batch, draw.randrange(4, 9)) for batch in script.batches]


def _some(batch: Any, samples: int) -> Any:
    return pytree.tree_map(lambda t: t[:samples], batch)


@slip("an empty batch", "A batch in the middle has no samples, as a filter may leave it.")
def _(script: Script, draw: random.Random) -> None:
    script.batches[3] = pytree.tree_map(lambda t: t[:0], script.batches[3])


# ---- kinds of values -------------------------------------------------------------------------------------------------


@slip(
    "a list of inputs",
    "Inputs come in a list, as the default collation makes it of a list.",
    fits=lambda s: isinstance(s.batches[0][0], tuple),
)
def _(script: Script, draw: random.Random) -> None:
    script.change_inputs(list)


@slip("a list of targets", "Targets are a list of ints, one for each sample.", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn
    script.change_targets(lambda t: t.tolist())
    script.loss_fn = lambda output, target: loss_fn(output, torch.tensor(target))


@slip(
    "a tuple of targets",
    "Targets are a tuple of ints, one for each sample.",
    fits=class_targets,
    about="tuple",
)
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn
    script.change_targets(lambda t: tuple(t.tolist()))
    script.loss_fn = lambda output, target: loss_fn(output, torch.tensor(target))


@slip(
    "a list of tensors as targets", "Targets are a list of tensors, one for each sample.", fits=class_targets
)
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn
    script.change_targets(lambda t: list(t))
    script.loss_fn = lambda output, target: loss_fn(output, torch.stack(target))


@slip(
    "weights of samples",
    "Targets are (classes, a list of weights), and the loss is weighed by them.",
    fits=class_targets,
)
def _(script: Script, draw: random.Random) -> None:
    script.change_targets(lambda t: (t, [round(draw.random(), 2) for _ in range(len(t))]))

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        each = nn.functional.cross_entropy(output, target[0], reduction="none")
        return (each * torch.tensor(target[1], dtype=output.dtype)).mean()

    script.loss_fn = loss


@slip("a number in the inputs", "Inputs are (x, a Python float).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x * other)
    script.change_inputs(lambda x: (x, 0.5 + draw.random()))


@slip("a 0-d tensor in the inputs", "Inputs are (x, a tensor without a dimension).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x * other)
    script.change_inputs(lambda x: (x, torch.tensor(0.5 + draw.random(), dtype=x.dtype)))


@slip("a tensor of one number", "Inputs are (x, a tensor of shape [1]).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x * other)
    script.change_inputs(lambda x: (x, torch.tensor([0.5 + draw.random()], dtype=x.dtype)))


@slip("None in the inputs", "Inputs are (x, None).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x if other is None else x * other)
    script.change_inputs(lambda x: (x, None))


@slip("a flag in the inputs", "Inputs are (x, a bool that says which way to go).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x if other else x * 0.5)
    script.change_inputs(lambda x: (x, draw.random() < 0.5))


@slip("a string in the inputs", "Inputs are (x, a word that says which way to go).", fits=_both)
def _(script: Script, draw: random.Random) -> None:
    _wrap(script, lambda x, other: x if other == "all" else x * 0.5)
    script.change_inputs(lambda x: (x, draw.choice(("all", "half"))))


@slip(
    "a table as long as the batch",
    "Inputs are (x, features' weights [F]), and a batch has F samples.",
    fits=_both,
    about=WHOLE,
)
def _(script: Script, draw: random.Random) -> None:
    features = script.batches[0][0].shape[-1]
    _wrap(script, lambda x, other: x * other)
    script.batches = [(x[:features], y[:features]) for x, y in script.batches]
    script.change_inputs(lambda x: (x, torch.linspace(0.5, 1.5, features, dtype=x.dtype)))


class Positions(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.model.embedding(words) + self.model.position[positions]
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x))


def _has_positions(script: Script) -> bool:
    return hasattr(script.model, "position")


def _with_positions(script: Script, samples: int, shape: tuple[int, ...]) -> None:
    script.model = Positions(script.model)
    script.blocks = [f"model.{name}" for name in script.blocks]
    positions = torch.arange(5).view(shape)
    script.batches = [((x[:samples], positions), y[:samples]) for x, y in script.batches]


@slip(
    "positions without a batch",
    "Inputs are (words [n, T], positions [T]), and a batch has n = T samples.",
    fits=_has_positions,
)
def _(script: Script, draw: random.Random) -> None:
    _with_positions(script, 5, (5,))


@slip("positions of a batch of one", "Inputs are (words [n, T], positions [1, T]).", fits=_has_positions)
def _(script: Script, draw: random.Random) -> None:
    _with_positions(script, 8, (1, 5))


class Masked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.model.embedding(words) + self.model.position
        x = x + (torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x) * 0.5
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x))


def _with_mask(script: Script, samples: int) -> None:
    script.model = Masked(script.model)
    script.blocks = [f"model.{name}" for name in script.blocks]
    mask = torch.full((5, 5), -1e9, dtype=torch.float64).triu(1)
    script.batches = [((x[:samples], mask), y[:samples]) for x, y in script.batches]


@slip(
    "a mask without a batch",
    "Inputs are (words [n, T], mask [T, T]), and a batch has n = 8 samples, T = 5.",
    fits=_has_positions,
)
def _(script: Script, draw: random.Random) -> None:
    _with_mask(script, SAMPLES)


@slip(
    "a mask as long as the batch",
    "Inputs are (words [n, T], mask [T, T]), and a batch has n = T samples.",
    fits=_has_positions,
)
def _(script: Script, draw: random.Random) -> None:
    _with_mask(script, 5)


@slip(
    "a mask as long as a batch of four",
    "The same with four samples and four words, so micro-batches of one.",
    fits=_has_positions,
    about=WHOLE,
)
def _(script: Script, draw: random.Random) -> None:
    _with_mask(script, 4)
    script.model.model.position = nn.Parameter(script.model.model.position[:4].detach().clone())
    script.batches = [((x[:, :4], mask[:4, :4]), y[:, :4]) for (x, mask), y in script.batches]


@slip(
    "samples in dimension 1",
    "Inputs are [T, n, F], time first, as nn.GRU takes them by default.",
    fits=lambda s: is_chain(s) and s.batches[0][0].dim() == 2,
)
def _(script: Script, draw: random.Random) -> str:
    length = draw.choice((3, SAMPLES))
    script.change_inputs(lambda x: torch.stack([x * (1 + t / 4) for t in range(length)]))
    script.model.append(Last())
    return f"{length} steps"


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-1]


# ---- types and memory ------------------------------------------------------------------------------------------------


@slip("float32 inputs", "Inputs are float32, and the model float64.", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    script.change_inputs(torch.Tensor.float)


@slip(
    "integers as inputs",
    "Inputs are integers, which the first layer makes floats of.",
    fits=lambda s: float_input(s) and is_chain(s),
)
def _(script: Script, draw: random.Random) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double() / 4

    script.model.insert(0, Doubled())
    script.blocks = [f"{int(name) + 1}" for name in script.blocks]
    script.change_inputs(lambda x: (4 * x).long())


@slip(
    "half targets",
    "Targets are float16, which the loss compares with float64.",
    fits=lambda s: not s.output_is_tensor,
)
def _(script: Script, draw: random.Random) -> None:
    script.change_targets(lambda t: {"class": t["class"], "number": t["number"].half()})


@slip("not contiguous", "Inputs are transposed views.", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    script.change_inputs(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))


@slip("expanded inputs", "Inputs are one sample, expanded to a batch.", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    script.change_inputs(lambda x: x[:1].expand_as(x))


@slip("inputs that want gradients", "Inputs require gradients, for a map of what matters.", fits=float_input)
def _(script: Script, draw: random.Random) -> None:
    script.change_inputs(lambda x: x.clone().requires_grad_())
    script.extras = lambda: {
        f"gradient of batch {n}": torch.zeros(1) if x.grad is None else x.grad.clone()
        for n, (x, _) in enumerate(script.batches)
    }


@slip("labels of another dtype", "Targets are int32, as NumPy makes them.", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn
    script.change_targets(torch.Tensor.int)
    script.loss_fn = lambda output, target: loss_fn(output, target.long())


@slip(
    "targets of another shape",
    "Targets are [n, 1], where mse_loss would broadcast against [n].",
    about="target size",
    fits=lambda s: not s.output_is_tensor,
)
def _(script: Script, draw: random.Random) -> None:
    script.change_targets(lambda t: {"class": t["class"], "number": t["number"][:, None]})


@slip(
    "NumPy arrays",
    "Inputs are arrays of NumPy, which the model makes tensors of.",
    fits=lambda s: float_input(s) and is_chain(s),
)
def _(script: Script, draw: random.Random) -> None:
    class FromNumpy(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            return torch.as_tensor(x)

    script.model.insert(0, FromNumpy())
    script.blocks = [f"{int(name) + 1}" for name in script.blocks]
    script.change_inputs(lambda x: x.numpy())
