"""A replicated stage: its replicas' parts of a batch, gradients, loss and statistics, added up on each of them.

Between processes torch.distributed adds up the gradients, bucket after bucket while the last backward still computes
those of the layers before; the rest is small and travels by message. Within a process all of it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from avgpipe.links.message import Key
from avgpipe.runtime.group_sum import GroupSum
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.steps import Place, Step
from avgpipe.runtime.work import Progress

Send = Callable[[str, int, Step, Any], None]  # kind, seat, step and value
Take = Callable[[Key], Any]


class StageSum:
    """``summing``: adds up gradients between processes; None: the peers are in this one."""

    def __init__(
        self, replica: Replica, place: Place, summing: GroupSum | None, send: Send, take: Take
    ) -> None:
        self._replica, self._place, self._summing = replica, place, summing
        self._send, self._take = send, take

    def last_backward(self) -> None:
        """The backward that comes is this replica's last of the batch."""
        if self._summing is not None:
            self._summing.arm()

    def begin(self, now: Progress, step: Step) -> None:
        """Tell the peers this replica's part."""
        part = self._part(now)
        part["moments"] = self._replica.stage.statistics.noted(step.batch)
        if self._summing is not None:
            part["grads"] = None
        for seat in self._place.peers:
            # copies: the sums are written over these before a neighbour in this process has read them
            self._send("A", seat, step, tree_map_only(torch.Tensor, torch.clone, part))
        if self._summing is not None:
            self._summing.complete(step.batch)

    def finish(self, now: Progress, step: Step) -> None:
        """Take over the sums; what no replica has told is zero."""
        parts = {self._place.seat: self._part(now)}
        for key in step.needs:
            message = self._take(key)
            if key.kind == "A":
                parts[key.source] = message
                self._replica.stage.statistics.add(step.batch, message["moments"])
        told = [part for _, part in sorted(parts.items())]  # in the order of replicas: all add up alike
        losses = [part["loss"] for part in told if part["loss"] is not None]
        if losses:
            now.tell(torch.stack(losses).sum(0))
        for n, p in enumerate(self._replica.arena.parameters):
            if not any(part["has_grad"][n] for part in told):
                p.grad = None
            elif self._summing is not None:
                p.grad = self._summing.total(n)
            else:
                p.grad = _sum([part["grads"][n] for part in told])

    def _part(self, now: Progress) -> dict[str, Any]:
        grads = [p.grad for p in self._replica.arena.parameters]
        return {"loss": now.part, "has_grad": [g is not None for g in grads], "grads": grads}


def _sum(grads: list[torch.Tensor | None]) -> torch.Tensor:
    first, *others = [g for g in grads if g is not None]
    total = first.clone()
    for g in others:
        total.add_(g)
    return total
