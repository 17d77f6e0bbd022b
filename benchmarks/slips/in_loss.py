"""Slips in the loss."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.slips.script import Script, User
from benchmarks.slips.slip import KEEPS, class_targets, slip

_NO_MEAN = "no mean|sum over the samples"


def _has_words(script: Script) -> bool:
    return script.loss_fn.__class__.__name__ == "function" and script.output_is_tensor


def _change(script: Script, change: Any) -> None:
    loss_fn = script.loss_fn
    script.loss_fn = lambda output, target: change(loss_fn(output, target), output, target)


@slip("a sum", "The loss is a sum over the samples.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss * len(_first(output)))
    script.optimizer = lambda params: torch.optim.SGD(params, lr=0.005)


def _first(output: Any) -> torch.Tensor:
    return next(iter(output.values())) if isinstance(output, dict) else output


@slip("a sum by torch", "The loss is nn.CrossEntropyLoss(reduction='sum').", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    script.loss_fn = nn.CrossEntropyLoss(reduction="sum")
    script.optimizer = lambda params: torch.optim.SGD(params, lr=0.005)


@slip("a sum over a constant", "The loss is a sum, divided by a constant batch size.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss * len(_first(output)) / 8)


@slip(
    "padding as a function",
    "The loss is a function, cross_entropy with ignore_index.",
    fits=_has_words,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    def hide(target: torch.Tensor) -> torch.Tensor:
        hidden = target.clone()
        for row in hidden:
            row[draw.randrange(1, len(row)) :] = -100
        return hidden

    script.change_targets(hide)


@slip(
    "padding that comes late",
    "As before, but the first four batches have no padding.",
    fits=_has_words,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    for n, (inputs, target) in list(enumerate(script.batches))[4:]:
        hidden = target.clone()
        for row in hidden:
            row[draw.randrange(1, len(row)) :] = -100
        script.batches[n] = inputs, hidden


@slip("padding as a module", "The loss is nn.CrossEntropyLoss(ignore_index=0).", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    script.loss_fn = nn.CrossEntropyLoss(ignore_index=0)


@slip("class weights", "The loss is nn.CrossEntropyLoss with weights of classes.", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    weight = torch.tensor([draw.random() + 0.1 for _ in range(4)], dtype=torch.float64)
    script.loss_fn = nn.CrossEntropyLoss(weight=weight)


@slip(
    "class weights as a function",
    "A function calls cross_entropy with weights of classes.",
    fits=class_targets,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    weight = torch.tensor([draw.random() + 0.1 for _ in range(4)], dtype=torch.float64)
    script.loss_fn = lambda output, target: functional.cross_entropy(output, target, weight=weight)


@slip(
    "class weights in a subclass",
    "A subclass of nn.CrossEntropyLoss calls cross_entropy with its own weights.",
    fits=class_targets,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(input, target, reduction="none")
            weight = (1 - torch.exp(-each)) ** 2
            return (weight * each).sum() / weight.sum().detach()

    script.loss_fn = Focal()


@slip("contrastive", "The loss compares each sample with all others of the batch.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    def add(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        flat = _first(output).flatten(1)
        return loss + functional.cross_entropy(flat @ flat.T, torch.arange(len(flat)))

    _change(script, add)


@slip(
    "spread of the batch",
    "The loss adds the standard deviation of the outputs over the batch.",
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    _change(
        script, lambda loss, output, target: loss + _first(output).flatten(1).var(0, unbiased=False).mean()
    )


@slip("a root", "The loss is the root of the mean.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss.sqrt())


@slip("the hardest sample", "The loss is the largest of the samples' own.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss + _first(output).flatten(1).square().mean(1).max())


@slip("a median", "The loss adds the median over the samples.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss + _first(output).flatten(1).square().mean(1).median())


@slip("half and half", "The loss adds the mean of the first half, without the rest.", about=_NO_MEAN)
def _(script: Script, draw: random.Random) -> None:
    def add(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        rows = _first(output).flatten(1).square().mean(1)
        return loss + rows[: max(1, len(rows) // 2)].mean()

    _change(script, add)


@slip("a float", "The loss is a Python float, by item().")
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss.item())


@slip("detached", "The loss is detached.")
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss.detach())


@slip("of one element", "The loss is a tensor of shape [1].")
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: loss[None])


@slip("a vector", "The loss is one number for each sample.")
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: _first(output).flatten(1).square().mean(1))


@slip("None", "The loss function returns nothing.")
def _(script: Script, draw: random.Random) -> None:
    _change(script, lambda loss, output, target: None)


@slip(
    "a pair for its own use",
    "The loss returns (loss, accuracy as a tensor).",
    fits=class_targets,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    _change(
        script,
        lambda loss, output, target: (loss, (output.argmax(1) == target).double().mean() + 0.25),
    )
    script.value = lambda pair: pair[0]  # loss, accuracy = loss_fn(...)


@slip("parameters in the loss", "The loss is a module with a parameter, which trains beside the model.")
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, output: Any, target: Any) -> torch.Tensor:
            return loss_fn(output, target) * torch.exp(-self.log_weight) + self.log_weight

    weighed = script.loss_fn = Weighed()
    script.optimizer = lambda params: torch.optim.SGD([*params, *weighed.parameters()], lr=0.05)
    script.extras = lambda: {"log_weight": weighed.log_weight.detach().clone()}


@slip("a parameter in a closure of the loss", "The loss function uses a parameter that it does not hold.")
def _(script: Script, draw: random.Random) -> None:
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    _change(script, lambda loss, output, target: loss * torch.exp(-weight) + weight)
    script.optimizer = _with_more(weight)
    script.extras = lambda: {"weight": weight.detach().clone()}


def _with_more(weight: nn.Parameter) -> Any:
    given: list[nn.Parameter] = [weight]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*params, *(given.pop() for _ in given[:])], lr=0.05)

    return optimizer


@slip("a parameter of the loss with its own optimizer", "As before, and the body of the loop steps it.")
def _(script: Script, draw: random.Random) -> None:
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    own = torch.optim.SGD([weight], lr=0.05)
    _change(script, lambda loss, output, target: loss * torch.exp(-weight) + weight)

    def step(user: User) -> None:
        own.step()
        own.zero_grad()

    script.body.append(step)
    script.extras = lambda: {"weight": weight.detach().clone()}


@slip("the model's weights in the loss", "The loss adds an L2 norm of model.parameters(), by a closure.")
def _(script: Script, draw: random.Random) -> None:
    model = script.model
    _change(
        script,
        lambda loss, output, target: loss + 0.01 * sum(p.square().sum() for p in model.parameters()),
    )


@slip(
    "the model in the loss",
    "The loss calls the model once more, as for consistency between two passes.",
    fits=lambda s: s.input_is_float and s.output_is_tensor,
)
def _(script: Script, draw: random.Random) -> None:
    model, fixed = script.model, script.batches[0][0]
    _change(script, lambda loss, output, target: loss + 0.1 * model(fixed).square().mean())


@slip(
    "a weight that grows",
    "The loss counts its calls, and adds a term whose weight grows.",
    mixes=True,
    about=KEEPS,
)
def _(script: Script, draw: random.Random) -> None:
    calls = [0]

    def add(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            calls[0] += 1
        return loss + min(1.0, calls[0] / 10) * _first(output).square().mean()

    _change(script, add)


@slip("a weight that the loop changes", "The loss reads a variable that the body of the loop changes.")
def _(script: Script, draw: random.Random) -> None:
    weight = [0.0]
    _change(script, lambda loss, output, target: loss + weight[0] * _first(output).square().mean())

    def change(user: User) -> None:
        weight[0] += 0.1

    script.body.append(change)


@slip(
    "a running mean in the loss",
    "The loss is a module that divides by a moving mean in a buffer.",
    mixes=True,
    about=KEEPS,
)
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones((), dtype=torch.float64))

        def forward(self, output: Any, target: Any) -> torch.Tensor:
            loss = loss_fn(output, target)
            if self.training and torch.is_grad_enabled():
                self.mean.lerp_(loss.detach(), 0.3)
            return loss / self.mean

    script.loss_fn = Normalised()


@slip("targets changed in the loss", "The loss writes to its targets: target.sub_(1).", fits=class_targets)
def _(script: Script, draw: random.Random) -> None:
    script.change_targets(lambda t: t + 1)
    loss_fn = script.loss_fn
    script.loss_fn = lambda output, target: loss_fn(output, target.sub_(1).clamp_(min=0))
    last = script.batches[0]
    script.batches[0] = last[0], last[1].clone()


@slip(
    "targets masked in the loss",
    "The loss writes to its targets: target[target == 0] = -100.",
    fits=class_targets,
    about=_NO_MEAN,
)
def _(script: Script, draw: random.Random) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target[target == 0] = -100
        return functional.cross_entropy(output, target)

    script.loss_fn = loss


@slip("outputs changed in the loss", "The loss writes to the model's output: output.mul_(2).")
def _(script: Script, draw: random.Random) -> None:
    loss_fn = script.loss_fn

    def loss(output: Any, target: Any) -> torch.Tensor:
        _first(output).mul_(2)
        return loss_fn(output, target)

    script.loss_fn = loss


@slip("a backward in the loss", "The loss calls backward() of a term by itself, and returns the rest.")
def _(script: Script, draw: random.Random) -> None:
    def add(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            (0.5 * _first(output).square().mean()).backward(retain_graph=True)
        return loss

    _change(script, add)


@slip("noise in the loss", "The loss adds noise to outputs, by torch.randn_like.", draws=True)
def _(script: Script, draw: random.Random) -> None:
    def add(loss: torch.Tensor, output: Any, target: Any) -> torch.Tensor:
        first = _first(output)
        return loss + (first * torch.randn_like(first)).mean()

    _change(script, add)
