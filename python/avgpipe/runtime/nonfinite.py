"""Infinities and NaN are told where they are first seen: once in a run, by one rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement

_log = logging.getLogger("avgpipe")
_FEW = 16  # numbers that are read faster one by one than put together
_REMEDY = (
    "training goes on with what that makes of the weights. To leave such batches out, train with skip_nonfinite=True; "
    "else lower the learning rate, or limit gradients by clip_grad_norm. The option of avgpipe train is "
    "--skip-nonfinite. This is told once"
)


class NonfiniteNotice:
    """``watches``: whether nothing else sees to it, as ``skip_nonfinite`` does."""

    def __init__(self, world: World, placement: Placement, watches: bool) -> None:
        self._world, self._placement = world, placement
        self.watches = watches

    def loss(self, loss: float, batch: int, pipeline: int) -> None:
        """Of a whole batch; on every rank."""
        if self.watches and not math.isfinite(loss):
            seat = self._placement.speakers(pipeline)[-1]
            if self._placement.rank_of(seat) == self._world.rank:
                self._tell(f"the loss on {self._placement.name(seat)} is {loss}", batch, pipeline)

    def gradients(
        self, grads: Sequence[torch.Tensor], told: torch.Tensor | None, seat: int, batch: int, pipeline: int
    ) -> None:
        """Of a stage, on the CPU. ``told``: its batch's loss, if it knows that, which may be the cause."""
        if _are_finite(grads):
            return
        if told is not None:
            self.loss(float(told.reshape(-1)[0]), batch, pipeline)
        if self.watches:
            what = f"gradients on {self._placement.name(seat)} have infinities or NaN"
            self._tell(what, batch, pipeline)

    def _tell(self, what: str, batch: int, pipeline: int) -> None:
        self.watches = False
        rank = self._world.rank
        if self._world.is_first("nonfinite"):
            _log.warning("rank %d: %s, in batch %d of pipeline %d; %s", rank, what, batch, pipeline, _REMEDY)


def _are_finite(grads: Sequence[torch.Tensor]) -> bool:
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    if not grads:
        return True
    # A number that is finite if all are, and an exact look only if it is not.
    norms = torch._foreach_norm(grads)
    total = sum(map(float, norms)) if len(norms) <= _FEW else float(torch.stack(norms).sum())
    return math.isfinite(total) or all(bool(grad.isfinite().all()) for grad in grads)
