"""A fused step that is ready to be done: alone, or with those of all replicas as one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import avgpipe_ext
from avgpipe.elastic import Buffers
from avgpipe.elastic.plan import Plan, Rest
from avgpipe.elastic.steps import Call, Steps
from avgpipe.rules import Elasticity

# In these, together and in turn give equal bits; 16 bits round less often together.
_EXACT = (torch.float32, torch.float64)


@dataclass
class FusedForce:
    """One replica's step and averaging with the gradients and learning rates of when it was made.

    members: of each parameter group. options: of each group, for the operators. scaling: a GradScaler's tensors.
    """

    plan: Plan
    steps: Steps
    members: list[range]
    options: list[dict[str, Any]]
    scaling: dict[str, torch.Tensor | None]
    elasticity: Elasticity

    def __call__(self, z: Buffers) -> list[torch.Tensor]:
        """Step and average; returns the operators' counts of what is not finite."""
        e, plan, scaling = self.elasticity, self.plan, self.scaling
        alpha, staleness = e.force
        common = e.shares | {"accumulate": False, "check_finite": True}
        self.count(1.0)
        counts = []
        for call in plan.calls:
            device = call.x[0].device
            moved = {k: None if v is None else v.to(device, non_blocking=True) for k, v in scaling.items()}
            settings = self.options[call.group] | common | moved
            counts.append(self.steps.apply(call, self.members[call.group], alpha, staleness, **settings))
        if scaling["found_inf"] is not None:
            self.count(-scaling["found_inf"])
        self.leave()
        for rest in plan.rests:
            counts += self._average(rest)
        return counts

    @property
    def may_wait(self) -> bool:
        """Done later, with those of the other replicas, it would give the same bits."""
        exact = all(
            x.dtype == z.dtype and x.dtype in _EXACT
            for call in self.plan.calls
            for x, z in zip(call.x, call.z)
        )
        return exact and all(value is None for value in self.scaling.values())

    def round_options(self, call: Call) -> dict[str, Any] | None:
        """The settings of `elastic_round_` for one call; None if only the device knows them."""
        return self.steps.round_options(call, self.members[call.group], self.options[call.group])

    def count(self, by: float | torch.Tensor) -> None:
        for members, stepping in zip(self.members, self.plan.settled.stepping):
            if stepping:
                self.steps.count(members, stepping, by)

    def leave(self) -> None:
        """Once the calls are done."""
        if self.plan.grads is None:
            for call in self.plan.calls:
                call.grad = []  # not kept alive until the next step
        if self.plan.flat:  # so that a backward pass that needs the old values fails
            torch.autograd.graph.increment_version(self.plan.flat)

    def is_finite(self) -> bool:
        """Whether all weights that it steps are."""
        return all(bool(x.isfinite().all()) for call in self.plan.calls for x in call.x)

    def _average(self, rest: Rest) -> list[torch.Tensor]:
        """The averaging of what has made no step."""
        e = self.elasticity
        alpha, _ = e.force
        if from_force := e.coefficients.from_force:
            options: dict[str, Any] = {
                "from_force": from_force,
                "accumulate": False,
                "check_finite": True,
            }
            return [avgpipe_ext.easgd_step_(rest.x, rest.z, rest.update, alpha, **options)]
        torch._foreach_zero_(rest.update)
        return [avgpipe_ext.elastic_pull_(rest.x, rest.z, alpha, check_finite=True)] if alpha else []


class Whole:
    """The calls of all replicas' plans as one, for rounds of rule avgpipe with staleness 0.

    28 N + 8 bytes of memory traffic per parameter in float32 with Adam, where N steps, the sum and N pulls take
    52 N + 8.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)
        first = plans[0].calls
        self._may_join = all(
            len(p.calls) == len(first) and all(map(_same_places, p.calls, first)) for p in plans
        )
        self._xs, self._states = [], []
        for calls in zip(*(p.calls for p in plans)) if self._may_join else ():
            self._xs.append([x for call in calls for x in call.x])
            slots = zip(*(call.states for call in calls))
            self._states.append([state for slot in slots for states in slot for state in states])

    def serves(self, forces: Sequence[FusedForce]) -> bool:
        return len(forces) == len(self.plans) and all(f.plan is p for f, p in zip(forces, self.plans))

    def act(self, forces: Sequence[FusedForce]) -> list[torch.Tensor] | None:
        """All steps, the move of z and all pulls; returns the operators' counts of what is not finite.

        None, with nothing done, unless all replicas step the same places with the same settings.
        """
        if not self._may_join:
            return None
        settings = [[f.round_options(call) for call in f.plan.calls] for f in forces]
        mine = settings[0]
        if any(each is None for each in mine) or any(theirs != mine for theirs in settings[1:]):
            return None
        alpha = forces[0].elasticity.alpha
        for f in forces:
            f.count(1.0)
        counts = []
        for n, options in enumerate(mine):
            assert options is not None
            calls = [p.calls[n] for p in self.plans]
            grads = [g for call in calls for g in call.grad]
            tensors = (self._xs[n], grads, self._states[n], calls[0].z)
            counts.append(avgpipe_ext.elastic_round_(*tensors, alpha, check_finite=True, **options))
        for f in forces:
            f.leave()
            for rest in f.plan.rests:
                avgpipe_ext.elastic_pull_(rest.x, rest.z, alpha)
        return counts


def _same_places(a: Call, b: Call) -> bool:
    """Both step the same memory of z."""
    return (a.group, len(a.z), len(a.states)) == (b.group, len(b.z), len(b.states)) and all(
        x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
        for x, y in zip(a.z, b.z)
    )
