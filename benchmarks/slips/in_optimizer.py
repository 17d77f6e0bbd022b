"""Slips in the function that makes the optimizer."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from benchmarks.slips.script import Script
from benchmarks.slips.slip import TOGETHER, slip


@slip("optimizer over the script's model", "optimizer=lambda params: SGD(model.parameters()).")
def _(script: Script, draw: random.Random) -> None:
    model = script.model
    script.optimizer = lambda params: torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05
    )


@slip("an optimizer made before", "The optimizer was made before, and the function returns it.")
def _(script: Script, draw: random.Random) -> None:
    made = torch.optim.SGD([p for p in script.model.parameters() if p.requires_grad], lr=0.05)
    script.optimizer = lambda params: made


@slip("half of the parameters", "The optimizer gets the first half of its parameters.", about="leaves out")
def _(script: Script, draw: random.Random) -> None:
    script.optimizer = lambda params: torch.optim.SGD(list(params)[: len(list(params)) // 2 + 1], lr=0.05)


@slip("groups by place", "The first third of the parameters gets a lower rate, by their place in the list.")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        third = max(1, len(params) // 3)
        groups = [{"params": params[:third], "lr": 0.01}, {"params": params[third:]}]
        return torch.optim.SGD(groups, lr=0.1)

    script.optimizer = optimizer


@slip("groups by identity", "Parameters of model.named_parameters() without decay are found by id().")
def _(script: Script, draw: random.Random) -> None:
    plain = {id(p) for p in script.model.parameters() if p.dim() < 2}

    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": [p for p in params if id(p) in plain], "weight_decay": 0.0},
            {"params": [p for p in params if id(p) not in plain], "weight_decay": 0.5},
        ]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)

    script.optimizer = optimizer


@slip("groups by dimension", "Matrices decay, vectors do not.")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
        ]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)

    script.optimizer = optimizer


@slip("groups by name", "Biases do not decay, by named_params.")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(named_params: Any) -> torch.optim.Optimizer:
        named = list(named_params)
        groups = [
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.5},
        ]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)

    script.optimizer = optimizer


@slip("names of model.named_parameters()", "Rates by position in the names of the script's model.")
def _(script: Script, draw: random.Random) -> None:
    names = [name for name, p in script.model.named_parameters() if p.requires_grad]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [p], "lr": 0.01 if "bias" in name or "norm" in name else 0.1}
            for name, p in zip(names, params)
        ]
        return torch.optim.SGD(groups, lr=0.1)

    script.optimizer = optimizer


@slip("one parameter twice", "The optimizer gets a parameter twice.", about="duplicate parameters")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([*params, params[0]], lr=0.05)

    script.optimizer = optimizer


@slip("a foreign parameter", "The optimizer gets a parameter that is none of the model's.")
def _(script: Script, draw: random.Random) -> None:
    other = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    script.optimizer = lambda params: torch.optim.SGD([*params, other], lr=0.05)


@slip("an optimizer with a closure", "The optimizer is LBFGS, whose step needs a closure.")
def _(script: Script, draw: random.Random) -> None:
    script.optimizer = lambda params: torch.optim.LBFGS(list(params))


@slip("Adam", "The optimizer is Adam, whose eps is large enough for rounding not to matter.")
def _(script: Script, draw: random.Random) -> None:
    script.optimizer = lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-3, weight_decay=0.01)


@slip("Adafactor", "The optimizer is Adafactor, whose steps depend on whole tensors.")
def _(script: Script, draw: random.Random) -> None:
    script.optimizer = lambda params: torch.optim.Adafactor(params, lr=0.05)


@slip(
    "a norm over all parameters",
    "The optimizer scales by the norm of all gradients that it has.",
    about=TOGETHER,
)
def _(script: Script, draw: random.Random) -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, 0.05)
            return super().step(closure)

    script.optimizer = lambda params: Normed(params, lr=0.2)


@slip(
    "clipping in a step hook",
    "A hook before the step clips the norm of the optimizer's gradients.",
    about=TOGETHER,
)
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        made = torch.optim.SGD(params, lr=0.2)
        made.register_step_pre_hook(lambda *_: [nn.utils.clip_grad_norm_(params, 0.05)].clear())
        return made

    script.optimizer = optimizer


@slip("clipping by value in a step hook", "A hook before the step clips each gradient by its value.")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        made = torch.optim.SGD(params, lr=0.2)
        made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(params, 1e-3))
        return made

    script.optimizer = optimizer


@slip(
    "noise in a step",
    "The optimizer adds noise from torch's generator to each step, as SGLD does.",
    draws=True,
    about=TOGETHER,
)
def _(script: Script, draw: random.Random) -> None:
    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
            return super().step(closure)

    script.optimizer = lambda params: Noisy(params, lr=0.05)


@slip(
    "a counter in an optimizer", "The optimizer counts its steps in a variable of the script.", about=TOGETHER
)
def _(script: Script, draw: random.Random) -> None:
    steps = [0]

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps[0] += 1
            for group in self.param_groups:
                group["lr"] = 0.1 / steps[0]
            return super().step(closure)

    script.optimizer = lambda params: Counting(params, lr=0.1)


@slip("two optimizers", "A list of two optimizers, of matrices and of vectors.")
def _(script: Script, draw: random.Random) -> None:
    def optimizer(params: Any) -> Any:
        params = list(params)
        vectors, matrices = ([p for p in params if (p.dim() < 2) == which] for which in (True, False))
        return [
            torch.optim.SGD([{"params": matrices}], lr=0.05),
            torch.optim.Adam([{"params": vectors}], lr=0.01, eps=1e-3),
        ]

    script.optimizer = optimizer


@slip("momentum and nothing to do", "Momentum and decay, where parts of the model get no gradient.")
def _(script: Script, draw: random.Random) -> None:
    script.block(1).spare = nn.Linear(3, 3, dtype=torch.float64)
    script.optimizer = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)
