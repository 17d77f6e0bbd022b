"""What a stage does between a batch's last backward and the next forwards; see :class:`StepKind` for the steps.

Replicas of a stage add up gradients, loss and statistics. Between processes torch.distributed adds up the gradients,
bucket after bucket while the last backward still computes those of the layers before; the rest is small and travels by
message. Within a process all of it does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from avgpipe.device import current_stream, has_streams, used_on
from avgpipe.elastic.reference import Reference
from avgpipe.links.link import Mailbox
from avgpipe.links.message import Key, Message, on_wire
from avgpipe.runtime.compute import BatchState, Port, Step
from avgpipe.runtime.loss import NonfiniteNotice
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.others import IsolatedPeers
from avgpipe.runtime.outcome import Metrics
from avgpipe.runtime.route import Route, StepKind
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.group_sum import GroupSum
    from avgpipe.streams import LaneStream

_log = logging.getLogger("avgpipe")
_SHOWN = 3  # names in a warning
# Before these, gradients are multiplied with what was not known before all backwards.
SCALING = StepKind.SEND_TIED, StepKind.ADD_NORM, StepKind.UPDATE


class Update:
    """Runs one stage's steps of an update.

    Args:
        shared: for every other stage, which of this stage's parameters it holds too: indices into its flat buffers'
            parameters, in an order that both agree on.
        group_sum: sums gradients over ranks; None where the stage's replicas are all in this process.
        names: of the parameters, where it is said which have no gradient in the first batch.
        isolated: the pipelines of other processes, where they are isolated.

    Attributes:
        share_factor: returns what the gradient of a share of a batch is multiplied with; None: what its outcome says.
        divides_alone: whether nobody here knows what the other pipelines have of batches that they share.
        squared_norm: returns the square of the norm of a batch's gradient here, float64 [], but for parameters of these
            numbers.
    """

    def __init__(
        self,
        trained: TrainedStage,
        route: Route,
        shared: Mapping[int, list[int]],
        options: TrainingOptions,
        port: Port,
        group_sum: GroupSum | None,
        notice: NonfiniteNotice,
        names: Sequence[str] = (),
        isolated: IsolatedPeers | None = None,
    ) -> None:
        self.share_factor: Callable[[BatchState], torch.Tensor | None] = lambda state: None
        self.divides_alone = False
        self.squared_norm: Callable[[int, Collection[int]], torch.Tensor] = self._own_norm
        self._unseen = names
        self._isolated = isolated
        self._trained, self._route, self._shared, self._port = trained, route, shared, port
        self._group_sum, self._notice = group_sum, notice
        limit = options.clip_grad_norm
        self._limit = None if limit == math.inf else limit  # which asks for the norm alone
        self._on_cpu = not has_streams(trained.stage.device)
        # Gradients with infinities or NaN, on whichever stage, are dropped; and all traces of their batch.
        self._skips = options.skips
        self._forgets = options.skip_nonfinite
        self.skipped = 0  # updates
        # Parameters whose gradient norm another, earlier stage counts.
        self._foreign = {p for other, mine in shared.items() if other < route.stage for p in mine}
        self._narrow = on_wire(Message.TIED_GRADIENTS, options.wire_dtype)
        self._travels = self._on_several_ranks() if self._narrow else set()

    def perform(self, state: BatchState, step: Step, needed: Collection[Version]) -> None:
        """Perform a step. ``needed``: the versions of the weights that other batches need."""
        kind = step.kind
        if kind in SCALING:
            self.scale(state)
        if kind is StepKind.UPDATE:
            self._update(state, step, needed)
        elif kind is StepKind.SHARE_PART:
            self._share_part(state, step)
        elif kind is StepKind.SUM_REPLICAS:
            self._sum_replicas(state, step)
        elif kind is StepKind.SEND_TIED:
            self._send_tied(step)
        elif kind is StepKind.SUM_TIED:
            self._sum_tied(step)
        elif kind is StepKind.ADD_NORM:
            self._add_norm(state, step)
        else:
            state.learn(self._port.take(step.needs[0]))

    def scale(self, state: BatchState) -> None:
        """Multiply the gradients, once, with what was not known before all backwards, if there is such a thing.

        Then they are what one device has, and the caller's hooks may see them.
        """
        if state.grads_are_scaled:
            return
        state.grads_are_scaled = True
        weights = state.work.weights
        shares = 1 if weights is None else weights.shares
        if state.outcome is not None and state.outcome.dim():
            if self.divides_alone and state.counts:
                self.divides_alone = False
                _log.warning(
                    "loss_fn returns (sum, count), and pipelines with workers of their own do not tell each other what "
                    "they count: each divides by the count of its share of a batch, unlike one device where shares "
                    "count unequally. Let loss_fn return the mean, and give loss_weight, which says of targets what "
                    "they count"
                )
            factor = self.share_factor(state)
            self._trained.scale_grads(state.outcome[1] * shares if factor is None else factor)
        elif shares > 1:
            self._trained.scale_grads(shares)
        self._trained.run_hooks()

    # ---- replicas of the stage -----------------------------------------------------------------------------------

    def _share_part(self, state: BatchState, step: Step) -> None:
        part = self._part(state)
        part["moments"] = self._trained.stage.statistics.noted(step.batch)
        if self._group_sum is not None:
            part["grads"] = None
        for peer in self._route.peers:
            # copies: the sums are written over these before a neighbour in this process has read them
            copy = tree_map_only(torch.Tensor, torch.clone, part)
            self._port.send(Message.REPLICA_PART, peer, step.batch, step.micro_batch, copy)
        if self._group_sum is not None:
            self._group_sum.complete(step.batch)

    def _sum_replicas(self, state: BatchState, step: Step) -> None:
        """Take over the sums; what no replica has is zero."""
        parts = {self._route.replica: self._part(state)}
        for key in step.needs:
            message = self._port.take(key)
            if key.kind is Message.REPLICA_PART:
                parts[key.source] = message
                self._trained.stage.statistics.add(step.batch, message["moments"])
        ordered = [part for _, part in sorted(parts.items())]  # all replicas add up alike
        losses = [part["loss"] for part in ordered if part["loss"] is not None]
        if losses:
            told = [Metrics(*part["metrics"]) for part in ordered if "metrics" in part]
            state.metrics = reduce(Metrics.plus, told) if told else None
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
                # as the others get it, or sums would differ from stage to stage
                grad.copy_(grad.to(self._narrow))
        for other, mine in self._shared.items():
            for to in self._route.placement.receivers_of(self._route.replica, other):
                # a copy: the sum is written over these before a neighbour in this process has read them
                copies = [None if (grad := grads[p]) is None else grad.clone() for p in mine]
                self._port.send(Message.TIED_GRADIENTS, to, step.batch, step.micro_batch, copies)

    def _on_several_ranks(self) -> set[int]:
        """Return the parameters of this stage whose holders are not all at one rank; all of them find the same."""
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

    # ---- norm and step -------------------------------------------------------------------------------------------

    def _own_norm(self, batch: int, without: Collection[int]) -> torch.Tensor:
        arena = self._trained.arena
        own = [p.grad for n, p in enumerate(arena.parameters) if n not in without and p.grad is not None]
        if own:
            return arena.squared_norm(own)
        return torch.zeros((), dtype=torch.float64, device=self._trained.stage.device)

    def _add_norm(self, state: BatchState, step: Step) -> None:
        total = self.squared_norm(step.batch, self._foreign)
        if not self._on_cpu:
            used_on(current_stream(self._trained.stage.device), [total])
        if not self._route.last:
            total = total + self._port.take(step.needs[0])
        if self._route.first:
            state.norm = total.sqrt()
        else:
            self._send_to_stage(self._route.stage - 1, Message.NORM_PART, step, total)

    def _update(self, state: BatchState, step: Step, needed: Collection[Version]) -> None:
        if self._route.norm:
            if not self._route.first:
                state.norm = self._port.take(step.needs[0])
            if not self._route.last:
                self._send_to_stage(self._route.stage + 1, Message.TOTAL_NORM, step, state.norm)
        if self._isolated is not None and state.work.idles:
            if state.work.is_step:
                self._trained.idle()
            state.updated = True
            self._isolated.tell(state)
            return
        weights = state.work.weights
        if weights is not None and weights.scale == 0:  # others have all that counts, yet momentum goes on
            self._trained.zero_grads()
        elif self._unseen:
            self._name_those_without_gradients(step.batch)
        norm = state.norm
        if self._notice.watches and self._on_cpu:  # a device would have to be waited for
            self._watch(state, step)
        skips = norm is not None and self._skips and not bool(norm.isfinite())
        if norm is not None and self._limit is not None and not skips:
            # as clip_grad_norm_ of torch
            self._trained.scale_grads((self._limit / (norm + 1e-6)).clamp(max=1.0))
        self.skipped += skips
        self._port.sent_at = None  # the norm is passed on before the step, which is no sending
        state.lr = self._trained.lr
        self._trained.step(step.batch, needed, skips, self._forgets)
        state.updated = True
        for _, replica in self._route.remote:
            update = self._trained.reference_update
            self._port.send(Message.REFERENCE_UPDATE, replica, step.batch, step.micro_batch, update)
        if self._isolated is not None:
            self._isolated.tell(state)

    def _name_those_without_gradients(self, batch: int) -> None:
        names, self._unseen = self._unseen, ()
        parameters = self._trained.arena.parameters
        without = [name for name, p in zip(names, parameters) if p.grad is None and p.requires_grad]
        if without:
            shown = ", ".join(map(repr, without[:_SHOWN])) + (" and others" if len(without) > _SHOWN else "")
            _log.warning(
                "stage %d: %d of %d parameters have no gradient in batch %d (%s): the loss does not depend on them, or "
                "a detach(), no_grad() or integer lies between. Without one they are not trained",
                *(self._route.stage, len(without), len(parameters), batch, shown),
            )

    def _send_to_stage(self, stage: int, message: Message, step: Step, value: Any) -> None:
        for to in self._route.placement.receivers_of(self._route.replica, stage):
            self._port.send(message, to, step.batch, step.micro_batch, value)

    def _watch(self, state: BatchState, step: Step) -> None:
        if self._skips or (state.norm is not None and bool(state.norm.isfinite())):
            return
        route, outcome = self._route, state.outcome if self._route.last else None
        grads = self._trained.arena.grads
        self._notice.gradients(grads, outcome, route.replica, step.batch, route.pipeline)


def _sum(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    first, *others = [g for g in grads if g is not None]
    total = first.clone()
    for g in others:
        total.add_(g)
    return total


class RemoteUpdates:
    """Takes in what dedicated pipelines of other processes add to the reference: a message for each of their batches.

    So every worker has the whole of each round, and the rules of averaging are those of pipelines that share a worker:
    sums in the order of pipelines, rounds of any staleness, and a last round that is left unfinished.

    Args:
        route: of this process's replica.
        turns: after how many batches it is a pipeline's turn again; batch j is pipeline j % ``turns``'s, or all's.
        stream: of its lane; None on a CPU.
    """

    def __init__(
        self,
        reference: Reference,
        mailbox: Mailbox,
        route: Route,
        turns: int,
        stream: LaneStream | None = None,
    ) -> None:
        self._reference, self._mailbox, self._turns = reference, mailbox, turns
        self._next = {
            i: Key(Message.REFERENCE_UPDATE, i, replica, route.replica, i % turns, -1)
            for i, replica in route.remote
        }
        self._averaging: Callable[[], AbstractContextManager[None]] = (
            nullcontext if stream is None else stream.averaging
        )

    def resume(self, batches: int) -> None:
        """Go on after ``batches`` in all, whose updates are in the reference."""
        n = self._turns
        self._next = {i: key._replace(batch=batches + (i - batches) % n) for i, key in self._next.items()}

    def collect(self) -> None:
        """Take in what is there and whose turn it is."""
        for i, key in self._next.items():
            while key in self._mailbox and self._reference.ready(i):
                # The scheduler asks between steps, when the current stream is the caller's: that one comes neither
                # after the updates that a round is made of nor before the steps that read what it makes.
                with self._averaging():
                    update = self._mailbox.take(key)
                    if update is not None:  # else it was not the last batch of a period
                        self._reference.accept(i, update)
                key = self._next[i] = key._replace(batch=key.batch + self._turns)

    def may_step(self, batch: int) -> bool:
        """Whether the step of a batch may be made, as far as messages go: the reference says more."""
        return True

    def missing(self, batches: int | None = None) -> list[Key]:
        """Return what is awaited next of each pipeline, of the first ``batches`` alone if they are given."""
        keys = [key for key in self._next.values() if key not in self._mailbox]
        return [key for key in keys if batches is None or key.batch < batches]
