"""Trial steps: how replicas go on that leave the optimizer to their reference, by the rule "mean-gradient".

A replica tells its gradient g, and goes on from where the reference's optimizer would bring z with this gradient alone.
That takes a step from z with the optimizer's state, which stays as it is: the true step, by the mean of all gradients,
is the reference's. Where an operator knows the optimizer that is one pass over memory; else the replica's own optimizer
makes the step, on z's values and with a copy of the state.
"""

from __future__ import annotations

from typing import Any

import torch

from avgpipe.elastic.flat import FlatBuffers, Region
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.replica import Replica, region_of

State = dict[str, Any]


class TrialSteps:
    """Those of one replica.

    Args:
        inner: The replica's optimizer: of the kind of the reference's, whose settings it has and whose state it shows.
        number: The replica's.

    Raises:
        ValueError: for weights that are not in flat buffers, and parameters that the reference's optimizer does not
            have.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, replica: Replica, reference: Reference, number: int
    ) -> None:
        outer = reference.outer
        assert outer is not None, "a rule that needs it was given none"
        if replica.not_flat:
            raise ValueError(
                f"rule {reference.elasticity.rule!r} needs weights in flat buffers: {replica.not_flat}"
            )
        if type(inner) is not type(outer):
            raise ValueError(
                f"the replica's optimizer is {type(inner).__name__} and the reference's {type(outer).__name__}: make "
                "both by the same function"
            )
        self._inner, self._replica, self._reference, self._number = inner, replica, reference, number
        self._outer = outer
        steps = {region: z for z, region in reference.stepped}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, Region]] = []
        for p in (p for group in inner.param_groups for p in group["params"] if p.numel()):
            region = region_of(p, replica.x.flats)
            if region not in steps:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is none of those that the reference's optimizer steps: "
                    "make both by the same function, of the same parameters"
                )
            self._pairs.append((p, steps[region], region))
        self._own: dict[torch.Tensor, State] = {}  # states of trial steps
        self._shown: tuple[Any, int] = None, 0
        self.share()

    def share(self) -> None:
        """Show the reference's state as the inner optimizer's."""
        whole = self._outer.state
        if self._shown[0] is whole and self._shown[1] == len(whole):
            return  # the same values in the same places
        self._shown = whole, len(whole)
        self._inner.state.clear()
        self._inner.state.update({p: whole[z] for p, z, _ in self._pairs if z in whole})

    def restore(self) -> None:
        """Make the inner optimizer's state, which was loaded, the reference's, and that of the other replicas."""
        for p, z, _ in self._pairs:
            if p in self._inner.state:
                self._outer.state[z] = self._inner.state[p]
            else:
                self._outer.state.pop(z, None)
        self._shown = self._outer.state, len(self._outer.state)
        self._tell_settings()

    def _tell_settings(self) -> None:
        for mine, theirs in zip(self._outer.param_groups, self._inner.param_groups):
            mine.update({name: value for name, value in theirs.items() if name != "params"})

    @torch.no_grad()
    def __call__(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Tell the gradient and make the step; returns counts of what is not finite."""
        replica, update = self._replica, self._replica.update
        assert update is not None, "a replica of a rule with updates"
        replica.load()
        self._tell_settings()
        update.zero_()
        told = [(p, region) for p, _, region in self._pairs if p.grad is not None]
        views = [region.view(update.flats) for _, region in told]
        if told:
            torch._foreach_copy_(views, [_dense(p.grad) for p, _ in told])
            torch._foreach_neg_(views)
        self._reference.told[self._number] = {region for _, region in told}
        if self._reference.elasticity.staleness == 1:
            self._try(z)
        norms = torch._foreach_norm([flat for flat in update.flats if flat.numel()], float("inf"))
        return [~norm.isfinite() for norm in norms]

    def _try(self, z: FlatBuffers) -> None:
        """Step from z with the shared state, and leave that as it is."""
        self.share()
        torch._foreach_copy_(self._replica.x.flats, z.flats)
        shared = dict(self._inner.state)
        self._inner.state.clear()
        for p, state in shared.items():
            self._inner.state[p] = self._copied(p, state)
        try:
            self._inner.step()
        finally:
            self._inner.state.clear()
            self._inner.state.update(shared)

    def _copied(self, p: torch.Tensor, state: State) -> State:
        """Copy a state into memory that is used again."""
        own = self._own.setdefault(p, {})
        for name, value in state.items():
            known = own.get(name)
            if not isinstance(value, torch.Tensor):
                own[name] = value
            elif (
                isinstance(known, torch.Tensor) and known.shape == value.shape and known.dtype == value.dtype
            ):
                known.copy_(value)
            else:
                own[name] = value.clone()
        return own


def _dense(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None, "only those with a gradient are told"
    return grad.to_dense() if grad.is_sparse else grad
