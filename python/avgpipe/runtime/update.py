"""What a lane does between a batch's last backward and the next forwards.

A   tell the other replicas of the stage this one's part of gradients, loss and statistics
G   add up theirs, in the order of replicas
T   send the gradients of parameters that other stages hold too
S   receive theirs and add up, in stage order, so all holders step alike
N   add this stage's squared gradient norm to that of the stages behind it (only when somebody asks for it); before S
    where earlier stages count all that is shared
U   scale the gradients by the norm of all stages, or drop them, step the optimizer, average
L   learn the batch's loss, where it did not come with a gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from avgpipe.links.message import Key
from avgpipe.runtime.nonfinite import NonfiniteNotice
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.steps import Place, Step
from avgpipe.runtime.work import Progress

Send = Callable[[str, int, Step, Any], None]  # kind, seat, step and value
Take = Callable[[Key], Any]


class Update:
    """``shared``: for every other stage, which of this stage's parameters it holds too (indices into the arena, in an
    order that both agree on).
    """

    def __init__(
        self,
        replica: Replica,
        place: Place,
        shared: Mapping[int, list[int]],
        options: TrainingOptions,
        send: Send,
        take: Take,
        notice: NonfiniteNotice,
    ) -> None:
        self._notice, self._on_cpu = notice, replica.stage.device.type == "cpu"
        self._replica, self._place, self._shared = replica, place, shared
        self._limit, self._send, self._take = options.clip_grad_norm, send, take
        # Gradients with infinities or NaN, on whichever stage, are dropped; and all traces of their batch.
        self._skips = options.skip_nonfinite or options.loss_scale is not None
        self._forgets = options.skip_nonfinite
        self.skipped = 0  # updates
        # Parameters whose gradient norm another, earlier stage counts.
        self._foreign = {p for other, mine in shared.items() if other < place.stage for p in mine}

    def scale(self, now: Progress) -> None:
        """Multiply the batch's gradients with what was not known before all backwards, if there is such a thing. Then
        they are what one device has, and the caller's hooks may see them.
        """
        now.is_scaled = True
        if now.told is not None and now.told.dim():
            self._replica.scale_grads(now.told[1])
        self._replica.run_hooks()

    def send_shared(self, now: Progress, step: Step) -> None:
        grads = [p.grad for p in self._replica.arena.parameters]
        for other, mine in self._shared.items():
            for seat in self._place.placement.informed(self._place.seat, other):
                # a copy: the sum is written over these before a neighbour in this process has read them
                self._send("T", seat, step, [_copy(grads[p]) for p in mine])

    def sum_shared(self, now: Progress, step: Step) -> None:
        parameters = self._replica.arena.parameters
        parts: dict[int, dict[int, torch.Tensor | None]] = {}
        for p in {p for mine in self._shared.values() for p in mine}:
            parts[p] = {self._place.stage: parameters[p].grad}
        for key in step.needs:
            other = self._place.placement.seats[key.source].stage
            for p, grad in zip(self._shared[other], self._take(key)):
                parts[p][other] = grad
        for p, by_stage in parts.items():
            grads = [g for _, g in sorted(by_stage.items(), key=lambda item: item[0]) if g is not None]
            if grads:
                total = grads[0].clone()
                for g in grads[1:]:
                    total.add_(g)
                parameters[p].grad = total

    def norm(self, now: Progress, step: Step) -> None:
        parameters = enumerate(self._replica.arena.parameters)
        own = [p.grad for n, p in parameters if n not in self._foreign and p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._replica.stage.device)
        if own:
            norms = torch.stack([n.double() for n in torch._foreach_norm(own)])
            total = norms.square().sum()
        if not self._place.last:
            total = total + self._take(step.needs[0])
        if self._place.first:
            now.norm = total.sqrt()
        else:
            for seat in self._place.placement.informed(self._place.seat, self._place.stage - 1):
                self._send("N", seat, step, total)

    def update(self, now: Progress, step: Step, needed_from: int) -> None:
        """``needed_from``: the lowest version of the weights that other batches need."""
        skips = False
        if self._place.norm:
            if not self._place.first:
                now.norm = self._take(step.needs[0])
            assert now.norm is not None
            if not self._place.last:
                for seat in self._place.placement.informed(self._place.seat, self._place.stage + 1):
                    self._send("C", seat, step, now.norm)
        if self._notice.watches and self._on_cpu:  # a device would have to be waited for
            self._watch(now)
        if now.norm is not None:
            skips = self._skips and not bool(now.norm.isfinite())
            if self._limit is not None and not skips:
                factor = (self._limit / (now.norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ of torch
                self._replica.scale_grads(factor)
        self.skipped += skips
        self._replica.step(now.work.batch, needed_from, skips, self._forgets)

    def _watch(self, now: Progress) -> None:
        if self._skips or (now.norm is not None and bool(now.norm.isfinite())):
            return
        place, told = self._place, now.told if self._place.last else None
        grads = self._replica.arena.grads
        self._notice.gradients(grads, told, place.seat, now.work.batch, place.pipeline)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
