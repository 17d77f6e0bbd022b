"""A stage's sums with others: gradients with its replicas, and those of parameters that stages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from avgpipe.links.link import Message
from avgpipe.links.transport import on_wire
from avgpipe.runtime.compute import BatchState
from avgpipe.runtime.loss import Metrics
from avgpipe.runtime.route import Port, Route, Step, StepKind
from avgpipe.runtime.trained_stage import TrainedStage

if TYPE_CHECKING:
    from avgpipe.runtime.group_sum import GroupSum


class Sums:
    """Runs one stage's steps of these sums; the arguments are those of :class:`avgpipe.runtime.update.Update`.

    Args:
        wire_dtype: the dtype in which gradients of shared parameters are sent; None keeps theirs.
    """

    def __init__(
        self,
        trained: TrainedStage,
        route: Route,
        shared: Mapping[int, list[int]],
        port: Port,
        group_sum: GroupSum | None,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._trained, self._route, self._shared, self._port = trained, route, shared, port
        self._group_sum = group_sum
        self._narrow = on_wire(Message.TIED_GRADIENTS, wire_dtype)
        self._travels = self._on_several_ranks() if self._narrow else set()

    def perform(self, state: BatchState, step: Step) -> None:
        """Perform a step."""
        if step.kind is StepKind.SHARE_PART:
            self._share_part(state, step)
        elif step.kind is StepKind.SUM_REPLICAS:
            self._sum_replicas(state, step)
        elif step.kind is StepKind.SEND_TIED:
            self._send_tied(step)
        else:
            self._sum_tied(step)

    # ---- replicas of the stage -----------------------------------------------------------------------------------

    def _share_part(self, state: BatchState, step: Step) -> None:
        part = self._part(state)
        statistics = self._trained.stage.statistics
        part["moments"] = [] if statistics is None else statistics.noted(step.batch)
        if self._group_sum is not None:
            part["grads"] = None
        for peer in self._route.peers:
            # copies: the sums overwrite these before a neighbour in this process has read them
            copy = tree_map_only(torch.Tensor, torch.clone, part)
            self._port.send(Message.REPLICA_PART, peer, step.batch, step.micro_batch, copy)
        if self._group_sum is not None:
            self._group_sum.complete(step.batch)

    def _sum_replicas(self, state: BatchState, step: Step) -> None:
        """Take the sums of all replicas; a parameter without a gradient in any has none."""
        parts = {self._route.replica: self._part(state)}
        for key in step.needs:
            message = self._port.take(key)
            if key.kind is Message.REPLICA_PART:
                parts[key.source] = message
                if (statistics := self._trained.stage.statistics) is not None:
                    statistics.add(step.batch, message["moments"])
        ordered = [part for _, part in sorted(parts.items())]  # all replicas sum in the same order
        losses = [part["loss"] for part in ordered if part["loss"] is not None]
        if losses:
            metrics = [Metrics(*part["metrics"]) for part in ordered if "metrics" in part]
            state.metrics = reduce(Metrics.plus, metrics) if metrics else None
            state.set_outcome(torch.stack(losses).sum(0))
        for n, p in enumerate(self._trained.arena.parameters):
            if not any(part["has_grad"][n] for part in ordered):
                p.grad = None
            elif self._group_sum is not None:
                p.grad = self._group_sum.total(n)
            else:
                p.grad = _sum([part["grads"][n] for part in ordered])

    def _part(self, state: BatchState) -> dict[str, Any]:
        grads = [p.grad for p in self._trained.arena.parameters]
        part = {"loss": state.part, "has_grad": [g is not None for g in grads], "grads": grads}
        return part if state.metrics is None else {**part, "metrics": tuple(state.metrics)}

    # ---- parameters that stages share ----------------------------------------------------------------------------

    def _send_tied(self, step: Step) -> None:
        grads = self._trained.arena.local_grads()
        for p in self._travels:
            if (grad := grads[p]) is not None:
                # rounded as the others receive it, or sums would differ from stage to stage
                grad.copy_(grad.to(self._narrow))
        for other, mine in self._shared.items():
            for to in self._route.placement.receivers_of(self._route.replica, other):
                # a copy: the sum overwrites these before a neighbour in this process has read them
                copies = [None if (grad := grads[p]) is None else grad.clone() for p in mine]
                self._port.send(Message.TIED_GRADIENTS, to, step.batch, step.micro_batch, copies)

    def _on_several_ranks(self) -> set[int]:
        """Return this stage's parameters whose holders are on several ranks; all holders find the same."""
        placement, stage = self._route.placement, self._route.stage
        ranks = {
            k: {placement.rank_of(n) for n in placement.replicas_of(k, self._route.pipeline)}
            for k in (stage, *self._shared)
        }
        holders: dict[int, set[int]] = {}
        for other, mine in self._shared.items():
            for p in mine:
                holders.setdefault(p, set(ranks[stage])).update(ranks[other])
        return {p for p, held in holders.items() if len(held) > 1}

    def _sum_tied(self, step: Step) -> None:
        arena = self._trained.arena
        own = arena.local_grads()
        parts: dict[int, dict[int, torch.Tensor | None]] = {}
        for p in {p for mine in self._shared.values() for p in mine}:
            parts[p] = {self._route.stage: own[p]}
        for key in step.needs:
            other = self._route.placement.stage_of(key.source)
            for p, grad in zip(self._shared[other], self._port.take(key)):
                parts[p][other] = grad
        for p, by_stage in parts.items():
            grads = [by_stage[stage] for stage in sorted(by_stage)]
            if any(g is not None for g in grads):
                arena.put_local_grad(p, _sum(grads))


def _sum(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    first, *others = [g for g in grads if g is not None]
    total = first.clone()
    for g in others:
        total.add_(g)
    return total
