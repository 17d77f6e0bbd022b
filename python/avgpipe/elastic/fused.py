"""The step of torch.optim.SGD, Adam or AdamW and the averaging rule in one pass over memory.

What is decided once and what at each step:

    Places   where the parameters lie in the replica's tensors       again if one has moved
    Steps    momenta and counters, at the same places                what others have replaced is moved there
    Plan     which memory each call of an operator works on          again if gradients or counters have changed so
    force    the calls, with this step's learning rates              every step, under the rounds' lock
    whole    the calls of all replicas as one                        again if one has another plan
"""

from __future__ import annotations

from itertools import accumulate
from operator import is_
from typing import Any

import torch

from avgpipe.elastic import Buffers
from avgpipe.elastic.force import FusedForce
from avgpipe.elastic.places import Places, Unfusable
from avgpipe.elastic.plan import Grads, Plan, Settled
from avgpipe.elastic.replica import Replica
from avgpipe.elastic.states import Watch
from avgpipe.elastic.steps import AdamSteps, Group, SgdSteps, Steps

STEPS: dict[type, type[SgdSteps] | type[AdamSteps]] = {
    torch.optim.SGD: SgdSteps,
    torch.optim.Adam: AdamSteps,
    torch.optim.AdamW: AdamSteps,
}


class FusedStep:
    """The fused steps of one replica: :meth:`prepare` gives the force with which it arrives in its round."""

    def __init__(self, inner: torch.optim.Optimizer, replica: Replica, z: Buffers) -> None:
        self._inner, self._replica, self._z = inner, replica, z
        self._never = _obstacle(inner, replica)
        self._places: Places | None = None
        self._steps: Steps
        self._members: list[range] = []
        self._plan: Plan | None = None
        self._watch: Watch | None = None
        self._watched_for: tuple[Any, ...] = ()

    def check(self) -> None:
        """Unfusable if the next step cannot be fused, whatever its gradients."""
        if self._never:
            raise Unfusable(self._never)
        if self._inner._optimizer_step_post_hooks:
            raise Unfusable(
                "the inner optimizer's post-step hooks see the weights between step and averaging"
            )
        step = vars(self._inner).get("step")  # a learning-rate scheduler's wrapper only notes the call
        wraps_own = getattr(step, "__wrapped__", None) is type(self._inner).step
        if step is not None and not (wraps_own and hasattr(step, "_wrapped_by_lr_sched")):
            raise Unfusable("the inner optimizer's step method is not its class's")
        for group in self._inner.param_groups:
            _check_group(group)
        if self._places is None:
            self._locate()

    def skips(self, found_inf: torch.Tensor | None) -> bool | None:
        """Whether a GradScaler skips the step; None if only the device knows, and nothing here needs to."""
        if found_inf is None:
            return False
        on_host = found_inf.device.type == "cpu" or any(flat.device.type == "cpu" for flat in self._z.flats)
        needs = on_host or any(map(self._steps.needs_to_know, self._inner.param_groups))
        return bool(found_inf) if needs else None

    @torch.no_grad()
    def prepare(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor | None, skips: bool | None
    ) -> FusedForce:
        """Of a step with the gradients of now. Unfusable, with nothing stepped, if it cannot be fused.

        scale, found_inf: a GradScaler's; skips: what :meth:`skips` returned.
        """
        self._locate()  # after hooks and closure
        assert self._places is not None
        grads: Grads = [None if skips else p.grad for p in self._places.params]
        plan = self._plan_for(self._places, grads)
        if plan.grads is None:
            for call in plan.calls:
                call.grad = [g for i in call.params if (g := grads[i]) is not None]
        options = [self._steps.options(group) for group in self._inner.param_groups]
        scaling = {"grad_scale": scale, "found_inf": found_inf if skips is None else None}
        return FusedForce(plan, self._steps, self._members, options, scaling, self._replica.elasticity)

    def _locate(self) -> None:
        groups = self._inner.param_groups
        params = [p for group in groups for p in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        if (
            self._places is not None
            and len(self._places.params) == len(params)
            and all(map(is_, self._places.params, params))
            and self._places.are_current()
            and sizes == list(map(len, self._members))
        ):
            return
        self._places = self._plan = self._watch = None
        try:
            places = Places(params, self._replica, self._z)
        except Unfusable as reason:
            self._never = str(reason)  # not looked for again at every step
            raise
        ends = list(accumulate(sizes))
        self._members = [range(end - size, end) for size, end in zip(sizes, ends)]
        self._strides, self._dtypes = [p.stride() for p in params], [p.dtype for p in params]
        self._steps = STEPS[type(self._inner)](self._inner, places)
        self._places = places

    def _plan_for(self, places: Places, grads: Grads) -> Plan:
        groups, plan = self._inner.param_groups, self._plan
        known = plan is not None and plan.grads is not None and all(map(is_, plan.grads, grads))
        if not known:
            self._check_grads(places, grads)
        stepping = [[i for i in members if grads[i] is not None] for members in self._members]
        self._adopt(places, stepping)
        keys = [self._steps.keys(*each) for each in zip(groups, self._members, stepping)]
        eps_is_0 = [group.get("eps") == 0 for group in groups]
        settled = Settled(stepping, keys, eps_is_0, self._steps.revision)
        serves = known or (plan is not None and plan.grads is None)  # one over flat memory only its gradients
        if plan is None or not serves or plan.settled != settled:
            plan = self._plan = Plan(places, self._steps, groups, settled, grads)
        return plan

    def _adopt(self, places: Places, stepping: list[list[int]]) -> None:
        """State where the steps expect it; looked through only if something may be different."""
        groups, state = self._inner.param_groups, self._inner.state
        flags = [
            tuple(bool(group.get(flag)) for flag in ("momentum", "fused", "capturable")) for group in groups
        ]
        known = (stepping, flags, torch.get_default_dtype())
        if self._watch is not None and self._watched_for == known and self._watch.holds(state):
            return
        for each in zip(groups, self._members, stepping):
            self._steps.adopt(*each)
        names = self._steps.names
        watched = [
            places.params[i] for g, f in enumerate(flags) if f[0] or len(names) > 1 for i in stepping[g]
        ]
        try:
            self._watch, self._watched_for = Watch(state, watched, names), known
        except KeyError:  # momentum before the first step
            self._watch = None

    def _check_grads(self, places: Places, grads: Grads) -> None:
        present = [g for g in grads if g is not None]
        if (
            len(present) == len(grads)
            and {g.layout for g in present} <= {torch.strided}
            and [g.stride() for g in present] == self._strides
            and [g.dtype for g in present] == self._dtypes
        ):
            return
        for i, (g, p, stride) in enumerate(zip(grads, places.params, self._strides)):
            if g is None or (g.layout is torch.strided and g.dtype is p.dtype and g.stride() == stride):
                continue
            if g.layout != torch.strided or g.dtype != p.dtype or not _same_order(g, p):
                raise Unfusable(f"the gradient of parameter {i} has another layout, dtype or strides")


def _obstacle(inner: torch.optim.Optimizer, replica: Replica) -> str | None:
    """Why no step of ``inner`` can ever be fused."""
    if type(inner) not in STEPS:
        return f"{type(inner).__name__} is not one of torch.optim.SGD, Adam and AdamW"
    if replica.update is None:
        return "one replica without elasticity has nothing to average: the reference follows it"
    if replica.elasticity.period > 1:
        return (
            f"the period is {replica.elasticity.period}, and only a step that is a whole round can be fused"
        )
    if replica.x.any_staged:
        return "a parameter is sparse, or its strides, dtype or device are not those of the reference"
    if any(t.is_complex() for t in replica.x.tensors):
        return "a parameter is complex"
    return None


def _check_group(group: Group) -> None:
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise Unfusable(f"{option} is on")
    for option, value in (("lr", group["lr"]), ("weight_decay", group["weight_decay"])):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise Unfusable(f"{option} is a tensor on {value.device}, which would have to be waited for")
    for beta in group.get("betas", ()):
        if isinstance(beta, torch.Tensor) and beta.device.type != "cpu":
            raise Unfusable(f"betas are tensors on {beta.device}, which would have to be waited for")


def _same_order(g: torch.Tensor, p: torch.Tensor) -> bool:
    """Strides are equal where they matter."""
    return all(a == b for size, a, b in zip(p.shape, g.stride(), p.stride()) if size != 1)
