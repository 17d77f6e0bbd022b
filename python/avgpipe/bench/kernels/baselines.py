"""What one writes without fused kernels: torch's optimizers, then the averaging rules in `torch._foreach_*`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_step
from torch.optim.sgd import sgd as sgd_step

from avgpipe.bench.kernels.workspace import Workspace

ALPHA, LR, MU = 0.25, 1e-5, 0.9
STEP = 100  # the first step measured: beyond the first ones, whose bias corrections are large
ADAMW: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SGD: dict[str, Any] = {"lr": LR, "momentum": MU}


def adamw(space: Workspace, **options: Any) -> torch.optim.Optimizer:
    """AdamW over the workspace's x, grad, first and second; its state is theirs."""
    parameters = _parameters(space)
    optimizer = torch.optim.AdamW(parameters, **ADAMW, **options)
    on_device = options.get("fused") or options.get("capturable")
    for parameter, first, second in zip(parameters, space.tensors("first"), space.tensors("second")):
        step = torch.full((), STEP - 1.0, device=space.device if on_device else "cpu")
        optimizer.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return optimizer


def sgd(space: Workspace, **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum over the workspace's x, grad and first; its state is theirs."""
    parameters = _parameters(space)
    optimizer = torch.optim.SGD(parameters, **SGD, **options)
    for parameter, first in zip(parameters, space.tensors("first")):
        optimizer.state[parameter] = {"momentum_buffer": first}
    return optimizer


def _parameters(space: Workspace) -> list[Tensor]:
    parameters = [x.detach() for x in space.tensors("x")]
    for parameter, grad in zip(parameters, space.tensors("grad")):
        parameter.requires_grad_()
        parameter.grad = grad
    return parameters


def step_then_rule(space: Workspace, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """x_before is kept, the optimizer steps, and rule avgpipe (staleness 1) follows; nothing is allocated here."""
    xs, befores = space.tensors("x"), space.tensors("before")
    rule = step_rule(space)

    def run() -> None:
        torch._foreach_copy_(befores, xs)
        optimizer.step()
        rule()

    return run


def step_rule(space: Workspace) -> Callable[[], None]:
    """update += x - x_before; x += alpha (z - x_before): four passes, since foreach knows no sum of three."""
    xs, befores, zs, updates = (space.tensors(name) for name in ("x", "before", "z", "update"))

    def run() -> None:
        torch._foreach_add_(updates, xs)
        torch._foreach_sub_(updates, befores)
        torch._foreach_add_(xs, zs, alpha=ALPHA)
        torch._foreach_sub_(xs, befores, alpha=ALPHA)

    return run


def whole_update(space: Workspace, step: Callable[[], None]) -> Callable[[], None]:
    """The same for a compiler, which sees everything at once: x_before is a value, not a buffer."""
    xs, zs, updates = (space.tensors(name) for name in ("x", "z", "update"))

    def run() -> None:
        befores = [x.clone() for x in xs]
        step()
        for x, before, z, update in zip(xs, befores, zs, updates):
            update.add_(x - before)
            x.add_(z - before, alpha=ALPHA)

    return run


# A compiler's graph ends at Optimizer.step, and with it the fusion; so it gets torch's functional form.


def adamw_function(space: Workspace) -> Callable[[], None]:
    """AdamW's step as a function of the workspace's x, grad, first and second."""
    on_device = space.device == "cuda"
    xs, grads, firsts, seconds = (space.tensors(name) for name in ("x", "grad", "first", "second"))
    steps = [torch.full((), STEP - 1.0, device=space.device) for _ in xs]
    options = dict(ADAMW, foreach=False, capturable=on_device, amsgrad=False, maximize=False)
    options["beta1"], options["beta2"] = options.pop("betas")

    def step() -> None:
        adamw_step(xs, grads, firsts, seconds, [], steps, **options)

    return step


def sgd_function(space: Workspace) -> Callable[[], None]:
    """SGD's step as a function of the workspace's x, grad and first."""
    xs, grads, firsts = (space.tensors(name) for name in ("x", "grad", "first"))

    options = dict(SGD, foreach=False, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)

    def step() -> None:
        sgd_step(xs, grads, [*firsts], **options)

    return step
