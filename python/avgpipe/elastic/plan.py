"""Which memory each call of a fused step works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from avgpipe.elastic.places import Places, Span, Unfusable, around, is_mirrored, memory, merged
from avgpipe.elastic.steps import Call, Group, Steps

Grads: TypeAlias = "list[torch.Tensor | None]"


@dataclass
class Rest:
    """The memory of one buffer that makes no step: it only takes part in the averaging."""

    x: list[torch.Tensor] = field(default_factory=list)
    z: list[torch.Tensor] = field(default_factory=list)
    update: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Settled:
    """What a plan was made for: of each group the parameters that step, their keys, and whether eps is 0.

    revision: of the state tensors.
    """

    stepping: list[list[int]]
    keys: list[list[Any]]
    divides_by_zero: list[bool]
    revision: int


class Plan:
    """``calls`` step the parameters of ``settled``, ``rests`` are the others.

    ``flat``: the parameters that are stepped as part of a run. Its memory and that of their gradients was looked
    up for ``grads``, and the plan is for these only.
    """

    def __init__(
        self, places: Places, steps: Steps, groups: Sequence[Group], settled: Settled, grads: Grads
    ) -> None:
        self.settled = settled
        self._places, self._steps, self._groups, self._all_grads = places, steps, groups, grads
        self._keys: dict[int | None, tuple[int, Any]] = {
            i: (g, key) for g, each in enumerate(zip(settled.stepping, settled.keys)) for i, key in zip(*each)
        }
        for i in self._keys:
            if i is not None and places.homes[i] is None and places.params[i].numel():
                raise Unfusable(f"parameter {i} of the optimizer is not among those that are averaged")
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._rests: dict[int, Rest] = {}
        self.flat: list[torch.Tensor] = []
        for run in merged(places.spans, self._is_joined):
            self._add(run)
        self.calls, self.rests = list(self._calls.values()), list(self._rests.values())
        self.grads = grads if self.flat else None
        del self._all_grads  # gradients of one step are not kept alive until the next

    def _is_joined(self, a: Span, b: Span) -> bool:
        """One call may go over both neighbours and the zeros between them."""
        key = self._keys.get(a.param)
        if key != self._keys.get(b.param):
            return False
        if key is None:
            return True
        g, h = self._grad(a), self._grad(b)
        if not is_mirrored(g, h, b.start - a.start):
            return False
        if a.stop == b.start:
            return True
        if self.settled.divides_by_zero[key[0]]:
            return False
        return not bool(memory(g, a.numel, b.start - a.stop).any())

    def _grad(self, span: Span) -> torch.Tensor:
        assert span.param is not None
        grad = self._all_grads[span.param]
        assert grad is not None
        return grad

    def _add(self, run: list[Span]) -> None:
        key, buffer, places = self._keys.get(run[0].param), self._places.buffer(run[0]), self._places
        if key is None:
            span, rest = around(run), self._rests.setdefault(buffer, Rest())
            rest.x.append(places.x(span))
            rest.z.append(places.z(span))
            rest.update.append(places.update(span))
            return
        group, params = key[0], [s.param for s in run if s.param is not None]
        call = self._calls.setdefault((*key, buffer), Call(group, is_first=key[1] is True))
        call.params += params
        is_one = len(run) == 1
        span = run[0] if is_one else around(run)
        grad, slots = self._grad(run[0]), self._steps.slots(self._groups[group])
        call.x.append(places.params[params[0]] if is_one else places.x(span))
        call.grad.append(grad if is_one else memory(grad, 0, span.numel))
        call.z.append(places.z(span))
        call.update.append(places.update(span))
        call.states = call.states or [[] for _ in slots]
        for states, slot in zip(call.states, slots):
            states.append(slot.of(params[0]) if is_one else slot.flat(span))
        if not is_one:
            self.flat += [places.params[i] for i in params]
