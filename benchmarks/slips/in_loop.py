"""Slips around the loop: learning rates, what the loop does beside, and what surrounds it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.slips.script import Script, User
from benchmarks.slips.slip import COPIED, slip

# ---- learning rates --------------------------------------------------------------------------------------------------


@slip("a schedule", "A learning-rate schedule for each batch.")
def _(script: Script, draw: random.Random) -> None:
    script.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


@slip("a schedule of lambdas", "A schedule whose lambda reads a variable that the loop changes.")
def _(script: Script, draw: random.Random) -> None:
    factor = [1.0]
    script.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor[0])

    def change(user: User) -> None:
        factor[0] *= 0.7

    script.body.append(change)


@slip(
    "a schedule in the optimizer's function",
    "The optimizer's function makes a schedule, which the loop steps.",
)
def _(script: Script, draw: random.Random) -> None:
    schedules: list[Any] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, lr=0.1)
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(made, 0.7))
        return made

    def step(user: User) -> None:
        for schedule in schedules:
            schedule.step()

    script.optimizer = optimizer
    script.body.append(step)


@slip("the rate set in the loop", "The loop sets the learning rate of the optimizers after each batch.")
def _(script: Script, draw: random.Random) -> None:
    def change(user: User) -> None:
        for optimizer in user.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7

    script.body.append(change)


@slip("the optimizer's state cleared", "The loop clears the optimizers' state after the third batch.")
def _(script: Script, draw: random.Random) -> None:
    def clear(user: User) -> None:
        if user.step == 3:
            for optimizer in user.optimizers:
                optimizer.state.clear()

    script.body.append(clear)


@slip("clip_grad_norm", "The norm of gradients is limited, by the option.")
def _(script: Script, draw: random.Random) -> None:
    script.clip = 0.1


# ---- what the loop does beside ---------------------------------------------------------------------------------------


@slip(
    "weights edited in the loop", "The loop changes the weights of its model between batches.", design=COPIED
)
def _(script: Script, draw: random.Random) -> None:
    @torch.no_grad()
    def edit(user: User) -> None:
        for p in user.model.parameters():
            p.mul_(0.9)

    script.body.append(edit)


@slip(
    "weights edited through the optimizer",
    "The loop changes the parameters in the optimizers' groups.",
    design="Pipeline.optimizers: weights may not be changed there",
)
def _(script: Script, draw: random.Random) -> None:
    @torch.no_grad()
    def edit(user: User) -> None:
        for optimizer in user.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)

    script.body.append(edit)


@slip("frozen in the loop", "The loop freezes a block of its model after the second batch.", design=COPIED)
def _(script: Script, draw: random.Random) -> None:
    def freeze(user: User) -> None:
        if user.step == 2:
            script.block(0).requires_grad_(False)

    script.body.append(freeze)


@slip("eval in the loop", "The loop puts a block of its model into evaluation mode.", design=COPIED)
def _(script: Script, draw: random.Random) -> None:
    script.replace(0, lambda block: nn.Sequential(block, nn.Dropout(1e-9), Mode()))

    def change(user: User) -> None:
        script.block(0).eval()

    script.body.append(change)


class Mode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.training else x


@slip("the script's weights averaged", "The loop keeps an AveragedModel of its model.", design=COPIED)
def _(script: Script, draw: random.Random) -> None:
    averaged = AveragedModel(script.model)
    script.body.append(lambda user: averaged.update_parameters(user.model))
    script.extras = lambda: {f"averaged {n}": p.detach().clone() for n, p in enumerate(averaged.parameters())}


@slip(
    "the script's model at the end",
    "The script saves model.state_dict(), and not the pipeline's.",
    design=COPIED,
)
def _(script: Script, draw: random.Random) -> None:
    script.extras = lambda: {
        f"saved {n}": p.detach().clone() for n, p in enumerate(script.model.parameters())
    }


@slip("gradients read in the loop", "The loop sums the norms of p.grad of its model.", design=COPIED)
def _(script: Script, draw: random.Random) -> None:
    norms: list[float] = []

    def read(user: User) -> None:
        norms.append(sum(float(p.grad.norm()) for p in user.model.parameters() if p.grad is not None))

    script.body.append(read)
    script.extras = lambda: {"norms of gradients": torch.tensor(norms)}


@slip("train called twice", "Two epochs, train() for each.")
def _(script: Script, draw: random.Random) -> None:
    script.epochs = 2


@slip("a model that trained before", "The model was trained for some batches before, and has gradients.")
def _(script: Script, draw: random.Random) -> None:
    for inputs, targets in script.batches[:2]:
        loss = script.loss_fn(script.call(script.model, inputs), targets)
        loss.backward()


@slip(
    "a layer replaced after the optimizer",
    "The script replaces a layer of its model after the first batch.",
    design=COPIED,
)
def _(script: Script, draw: random.Random) -> None:
    def change(user: User) -> None:
        if user.step == 1:
            script.replace(2, lambda block: nn.Identity())

    script.body.append(change)


@slip(
    "the loop evaluates by its model",
    "The loop computes the loss of its model in no_grad after each batch.",
    design=COPIED,
)
def _(script: Script, draw: random.Random) -> None:
    losses: list[float] = []

    @torch.no_grad()
    def evaluate(user: User) -> None:
        inputs, targets = script.batches[0]
        losses.append(float(script.loss_fn(script.call(user.model, inputs), targets)))

    script.body.append(evaluate)
    script.extras = lambda: {"losses of the loop": torch.tensor(losses, dtype=torch.float64)}


@slip("the default dtype changed", "The default dtype is float64 while the script trains.")
def _(script: Script, draw: random.Random) -> None:
    @contextmanager
    def changed() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    script.around.append(changed)


# ---- what surrounds it -----------------------------------------------------------------------------------------------


@slip("inside of no_grad", "The script trains inside of torch.no_grad().")
def _(script: Script, draw: random.Random) -> None:
    script.around.append(torch.no_grad)


@slip("inside of inference_mode", "The script trains inside of torch.inference_mode().")
def _(script: Script, draw: random.Random) -> None:
    script.around.append(torch.inference_mode)


@slip("inside of autocast", "The script trains inside of torch.autocast.", dtype=torch.float32, rounds=True)
def _(script: Script, draw: random.Random) -> None:
    script.around.append(lambda: torch.autocast("cpu", torch.bfloat16))


@slip("gradients off", "torch.set_grad_enabled(False) was called before.")
def _(script: Script, draw: random.Random) -> None:
    script.around.append(lambda: torch.set_grad_enabled(False))


@slip("anomaly detection", "The script trains inside of torch.autograd.detect_anomaly().")
def _(script: Script, draw: random.Random) -> None:
    script.around.append(torch.autograd.detect_anomaly)


@slip("saved tensors packed", "Saved tensors are rounded to float32 by saved_tensors_hooks around the loop.")
def _(script: Script, draw: random.Random) -> None:
    def pack(t: torch.Tensor) -> Any:
        return t.float() if t.dtype == torch.float64 else t

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t.double() if t.dtype == torch.float32 else t

    script.around.append(lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))
    script.extras = None


@slip("a default device", "The script trains inside of torch.device('cpu') as a context.")
def _(script: Script, draw: random.Random) -> None:
    script.around.append(lambda: torch.device("cpu"))


@slip(
    "a dispatch mode", "The script counts operators by a TorchDispatchMode around the loop, and changes one."
)
def _(script: Script, draw: random.Random) -> None:
    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * 1.01 if func is torch.ops.aten.tanh.default else found

    script.around.append(Rounding)


@slip(
    "a NaN",
    "One input is NaN in the third batch.",
    about="infinities|NaN|nan",
    fits=lambda s: s.input_is_float,
)
def _(script: Script, draw: random.Random) -> None:
    script.batches[2][0].flatten()[0] = float("nan")
