"""torch.optim's own step on given tensors."""

from __future__ import annotations

import torch

_DEFAULTS = {
    "momentum": "mu",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "maximize": "maximize",
    "weight_decay": "weight_decay",
}


def torch_optimizer(case, x, state, **how):
    """A torch optimizer of parameter x (not copied) whose state is that of the case; `how`: foreach, fused."""
    options = dict(case.options)
    parameter = torch.nn.Parameter(x)
    is_round = case.name == "elastic_round_"
    if case.name == "elastic_sgd_" or options.get("optimizer") == "sgd":
        given = {theirs: options[ours] for theirs, ours in _DEFAULTS.items() if ours in options}
        optimizer = torch.optim.SGD([parameter], lr=options["lr"], **given, **how)
        if state and not options.get("first_step"):
            optimizer.state[parameter]["momentum_buffer"] = state[0]
        return optimizer, parameter
    decoupled = options["optimizer"] == "adamw" if is_round else options.get("decoupled", True)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [parameter],
        lr=options["lr"],
        betas=(options.get("beta1", 0.9), options.get("beta2", 0.999)),
        eps=options.get("eps", 1e-8),
        weight_decay=options.get("weight_decay", 0.0 if is_round else 1e-2),
        maximize=options.get("maximize", False),
        **how,
    )
    done = torch.tensor(float(options["step"] - 1))
    optimizer.state[parameter] = {"step": done, "exp_avg": state[0], "exp_avg_sq": state[1]}
    return optimizer, parameter


def torch_step(case, x, grad, state, **how):
    """One step of it, in place on x and on state."""
    optimizer, parameter = torch_optimizer(case, x, state, **how)
    parameter.grad = grad.clone()
    optimizer.step()
    x.copy_(parameter.detach())
    if case.options.get("first_step") and state:
        state[0].copy_(optimizer.state[parameter]["momentum_buffer"])
