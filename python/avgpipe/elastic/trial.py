"""Trial steps: how replicas continue whose reference has the optimizer, by rule "mean-gradient".

A replica publishes its gradient g, and continues from where the reference's optimizer would move z with this
gradient alone. That is a step from z with the optimizer's state, without changing it: the true step, by the
mean of all gradients, is the reference's. If an operator supports the optimizer, that is one pass over
memory; else the replica's own optimizer makes the step, on z's values and with a copy of the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import avgpipe_ext
from avgpipe.device import on_accelerator
from avgpipe.elastic.flat import FlatBuffers, Region, copied
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.replica import STATE, Replica, region_of, same_strides, settings_of

State = dict[str, Any]


class TrialSteps:
    """The trial steps of one replica.

    Args:
        inner: The replica's optimizer: of the same kind as the reference's, with its settings and a view of
            its state.
        number: The number of the replica.

    Attributes:
        is_published: Whether the gradient of the next step is published.

    Raises:
        ValueError: for weights that are not in flat buffers, and parameters that the reference's optimizer does not
            have.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, replica: Replica, reference: Reference, number: int
    ) -> None:
        outer = reference.outer
        assert outer is not None, "the rule needs an outer optimizer"
        if replica.not_flat:
            rule = reference.elasticity.rule
            raise ValueError(f"rule {rule!r} needs weights in flat buffers: {replica.not_flat}")
        if type(inner) is not type(outer):
            raise ValueError(
                f"the replica's optimizer is {type(inner).__name__} and the reference's {type(outer).__name__}: make "
                "both by the same function"
            )
        self._inner, self._replica, self._reference, self._number = inner, replica, reference, number
        self._outer = outer
        assert reference.outer_steps is not None
        self._steps = reference.outer_steps
        steps = {region: z for z, region in self._steps.places}
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
        self._shown: tuple[Any, int, int] = None, 0, 0
        self._calls: list[Call] | None = None
        self.is_published = False
        # Weights, reference and update of parameters without a step.
        self._still: list[list[torch.Tensor]] = []
        self._seen: tuple[Any, Any] = None, None  # what the calls were planned for
        self.share()

    def share(self) -> None:
        """Make the reference's state the inner optimizer's; removals from the latter apply to both."""
        whole, shown = self._outer.state, self._inner.state
        if self._shown[0] is whole and len(shown) < self._shown[2]:
            for p, z, _ in self._pairs:
                if p not in shown:
                    whole.pop(z, None)
        if self._shown[0] is whole and self._shown[1] == len(whole) and self._shown[2] <= len(shown):
            return  # unchanged
        shown.clear()
        shown.update({p: whole[z] for p, z, _ in self._pairs if z in whole})
        self._shown = whole, len(whole), len(shown)

    def restore(self) -> None:
        """Make the inner optimizer's state, which was loaded, that of the reference and all replicas."""
        known = self._inner.state
        # A new object, by which the other replicas detect the new state.
        self._outer.state = defaultdict(dict, {z: known[p] for p, z, _ in self._pairs if p in known})
        self.share_settings()

    def share_settings(self) -> None:
        """Make the inner optimizer's settings the reference's, for its next step."""
        for mine, theirs in zip(self._outer.param_groups, self._inner.param_groups):
            mine.update({name: value for name, value in theirs.items() if name != "params"})

    @torch.no_grad()
    def __call__(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Publish the gradient and make the step; return counts of nonfinite values, published just now."""
        is_published, self.is_published = self.is_published, False
        self.share_settings()
        grads, there = self._begin()
        tries = not self._reference.elasticity.synchronous(self._reference.round)
        if tries and (calls := self._planned(grads, there, z)) is not None:
            if self._still:
                x, z_, update = self._still
                torch._foreach_copy_(x, z_)
                torch._foreach_zero_(update)
            counts = [call(grads) for call in calls]
        else:
            counts = [] if is_published else self._publish(grads)
            if tries:
                self._try(z)
        return [] if is_published else counts

    def gradients(self) -> dict[Region, torch.Tensor] | None:
        """Return the replica's gradients by their places; None if some cannot be read together with z."""
        if not all(_fits(p.grad, pair) for pair in self._pairs for p in pair[:1]):
            return None
        return {region: p.grad for p, _, region in self._pairs if p.grad is not None}

    @torch.no_grad()
    def publish(self, skips: bool) -> list[torch.Tensor]:
        """Publish the gradient alone, or that there is none; return counts of nonfinite values."""
        if skips:
            self._inner.zero_grad()
        return self._publish(self._begin()[0])

    def _begin(self) -> tuple[list[torch.Tensor | None], tuple[bool, ...]]:
        """Note which parameters have a gradient; return the gradients, and this."""
        self._replica.load()
        self.share()
        grads = [p.grad for p, _, _ in self._pairs]
        there = tuple(grad is not None for grad in grads)
        self._steps.published[self._number] = {pair[2] for pair, has in zip(self._pairs, there) if has}
        return grads, there

    def _publish(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        update = self._update
        there = ((pair[2], g) for pair, g in zip(self._pairs, grads) if g is not None)
        given = [(region.view(update.flats), g.to_dense() if g.is_sparse else g) for region, g in there]
        if len(given) < len(grads):
            update.zero_()
        if given and on_accelerator(given[0][0]):  # two launches for all
            torch._foreach_copy_([view for view, _ in given], [g for _, g in given])
            torch._foreach_neg_([view for view, _ in given])
        else:  # one pass over memory
            for view, g in given:
                torch.neg(g, out=view)
        # On a CPU norms of infinite order take ten times as long.
        return [~torch.stack(flat.aminmax()).isfinite().all() for flat in update.flats if flat.numel()]

    @property
    def _update(self) -> FlatBuffers:
        assert self._replica.update is not None, "a replica of a rule with updates"
        return self._replica.update

    # ---- in one pass ---------------------------------------------------------------------------------------------

    def _planned(
        self, grads: Sequence[torch.Tensor | None], there: tuple[bool, ...], z: FlatBuffers
    ) -> list[Call] | None:
        """Return the calls of the step; None at the first, or if no operator supports the optimizer."""
        inner, whole = self._inner, self._outer.state
        odd = any(group.get("amsgrad") or group.get("differentiable") for group in inner.param_groups)
        hooked = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        if type(inner) not in STATE or odd or hooked or not all(map(_fits, grads, self._pairs)):
            return None
        before, state = self._seen
        if before != (there, len(whole)) or state is not whole:
            self._calls, self._seen = self._plan(there, z), ((there, len(whole)), whole)
        return self._calls

    def _plan(self, there: tuple[bool, ...], z: FlatBuffers) -> list[Call] | None:
        """Sort the parameters by the calls that step them; those without a gradient become z's."""
        buffers = self._replica.x.flats, z.flats, self._update.flats
        numbers = {p: n for n, (p, _, _) in enumerate(self._pairs)}

        def views(members: Sequence[int]) -> list[list[torch.Tensor]]:
            return [[self._pairs[n][2].view(flats) for n in members] for flats in buffers]

        still = [n for n, has in enumerate(there) if not has]
        self._still = views(still) if still else []
        calls: list[Call] = []
        for group in self._inner.param_groups:
            names = STATE[type(self._inner)] if group.get("momentum", 1) else ()
            by_steps: dict[float, list[int]] = {}
            for n in (numbers[p] for p in group["params"] if p in numbers):
                state = self._outer.state.get(self._pairs[n][1], {})
                if there[n] and any(state.get(name) is None for name in names):
                    return None
                if there[n]:
                    by_steps.setdefault(float(state.get("step", 0)), []).append(n)
            for members in by_steps.values():
                states = [self._outer.state.get(self._pairs[n][1], {}) for n in members]
                moments = [[state[name] for state in states] for name in names]
                calls.append(Call(group, members, moments, states[0].get("step"), *views(members)))
        return calls

    # ---- by the replica's own optimizer --------------------------------------------------------------------------

    def _try(self, z: FlatBuffers) -> None:
        """Step from z with the shared state, without changing it."""
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
        """Copy a state into memory that is reused."""
        own = self._own.setdefault(p, {})
        for name, value in state.items():
            known: Any = own.get(name)
            if not isinstance(value, torch.Tensor):
                own[name] = value
            elif type(known) is type(value) and (known.shape, known.dtype) == (value.shape, value.dtype):
                known.copy_(value)
            else:
                own[name] = copied(value)
        return own


@dataclass
class Call:
    """A call of an operator, for parameters of one group that have made equally many steps.

    Attributes:
        group: the settings.
        numbers: the indices of their gradients.
        moments: the shared state, a list of each kind.
        step: Adam's counter; all others count with it.
    """

    group: dict[str, Any]
    numbers: list[int]
    moments: list[list[torch.Tensor]]
    step: torch.Tensor | None
    x: list[torch.Tensor]
    z: list[torch.Tensor]
    update: list[torch.Tensor]

    def __call__(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        own = [g for n in self.numbers if (g := grads[n]) is not None]
        if self.step is None:
            settings = settings_of(torch.optim.SGD, self.group) | {"check_finite": True}
            momenta = self.moments[0] if self.moments else None
            return avgpipe_ext.trial_sgd_(self.x, self.z, own, momenta, self.update, **settings)
        settings = settings_of(torch.optim.Adam, self.group) | {"step": self.step, "check_finite": True}
        first, second = self.moments
        return avgpipe_ext.trial_adam_(self.x, self.z, own, first, second, self.update, **settings)


def _fits(grad: torch.Tensor | None, pair: tuple[torch.Tensor, torch.Tensor, Region]) -> bool:
    """Whether an operator can read the gradient together with its parameter."""
    p = pair[0]
    return grad is None or (grad.layout == torch.strided and grad.dtype == p.dtype and same_strides(grad, p))


# ---- rounds with staleness 0 in one process --------------------------------------------------------------------------


@dataclass
class WaitingGradient:
    """A replica's part of a round that waits for the others' gradients, with its settings and flag.

    Attributes:
        found_inf: Whether the step is left out, if only the device knows.
    """

    trial: TrialSteps
    found_inf: torch.Tensor | None

    def __call__(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Publish the gradient alone, as settings may have changed since."""
        return self.trial.publish(self.found_inf is not None and bool(self.found_inf))


def step_by_all(waiting: Sequence[WaitingGradient], reference: Reference) -> list[torch.Tensor] | None:
    """Step the reference by the mean of all replicas' gradients, read where they are.

    Before the step this moves 4 N + 12 bytes per parameter in float32; to publish each and sum takes 28 N + 12.
    Returns counts of nonfinite values; None, with nothing done, if some gradient cannot be read so, or if a host
    that checks them finds such values: then whole updates are dropped.
    """
    gradients = [one.trial.gradients() for one in waiting]
    given = [own for own in gradients if own is not None]
    flags = [one.found_inf for one in waiting if one.found_inf is not None]
    outer = reference.outer_steps
    if outer is None or len(given) < len(gradients) or len(flags) not in (0, len(waiting)):
        return None
    # Other lanes' streams have allocated these, and they are dropped before this stream has read them: what those
    # lanes issue next is ordered after this round.
    # The norm that decides is that of the batch, and the same for all.
    return outer.move_by(given, reference.elasticity.scale, reference._on_cpu, flags[0] if flags else None)
