"""The steps of a stage between a batch's last backward and the next forwards; see :class:`StepKind` for them.

Replicas of a stage sum gradients, loss and statistics. Between processes torch.distributed sums the
gradients, bucket after bucket while the last backward still computes those of earlier layers; the rest is
small and is sent as messages. Within a process everything is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from avgpipe.device import current_stream, has_streams, used_on
from avgpipe.errors import PipelineError, StageError, reason
from avgpipe.links.link import Message
from avgpipe.ranks.environment import named
from avgpipe.runtime.compute import BatchState
from avgpipe.runtime.loss import NonfiniteNotice
from avgpipe.runtime.options import Extension, StepGradients, TrainingOptions
from avgpipe.runtime.route import Port, Route, Step, StepKind
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.group_sum import GroupSum
    from avgpipe.runtime.policy import IsolatedPeers
    from avgpipe.runtime.sums import Sums

_log = logging.getLogger("avgpipe")
_SHOWN = 3  # names in a warning
# Before these steps, gradients are multiplied by factors that are known only after all backwards.
SCALING = StepKind.SEND_TIED, StepKind.ADD_NORM, StepKind.PUBLISH, StepKind.UPDATE


class Update:
    """Runs one stage's steps of an update.

    Args:
        shared: for every other stage, the parameters of this stage that it holds too: indices into its flat
            buffers' parameters, in an order that both use.
        group_sum: sums gradients over ranks; None if the stage's replicas are all in this process.
        names: of the parameters.
        isolated: the pipelines of other processes, if they are isolated.

    Attributes:
        reports_unseen: whether parameters without a gradient in the next batch are reported.
        share_factor: returns the factor on the gradient of a share of a batch; None: the one in its outcome.
        divides_alone: whether this process does not know the other pipelines' counts in batches that they
            share.
        squared_norm: returns the square of the norm of a batch's gradient here, float64 [], without the
            parameters of these numbers.
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
        self.reports_unseen, self._names = False, names
        self._seen_by = [e for e in options.extensions if type(e).before_step is not Extension.before_step]
        self._isolated = isolated
        self._trained, self._route, self._port = trained, route, port
        self._group_sum, self._notice = group_sum, notice
        limit = options.clip_grad_norm
        self._limit = None if limit == math.inf else limit  # infinity asks for the norm without clipping
        self._on_cpu = not has_streams(trained.stage.device)
        # Gradients with infinities or NaN, on any stage, are dropped, with all effects of their batch.
        self._skips = options.skips
        self._forgets = options.skip_nonfinite
        self.skipped = 0  # updates, as far as the host knows
        self._undecided: set[int] = set()  # batches whose update only the device knows to be left out, or not
        # Parameters whose gradient norm another, earlier stage counts.
        self._foreign = {p for other, mine in shared.items() if other < route.stage for p in mine}
        self._sums: Sums | None = None
        if route.peers or shared:
            from avgpipe.runtime.sums import Sums

            self._sums = Sums(trained, route, shared, port, group_sum, options.wire_dtype)

    def perform(self, state: BatchState, step: Step, needed: Collection[Version]) -> None:
        """Perform a step. ``needed``: the versions of the weights that other batches need."""
        kind = step.kind
        if kind in SCALING:
            self.scale(state)
        if kind is StepKind.UPDATE:
            self._update(state, step, needed)
        elif kind is StepKind.PUBLISH:
            self._prepare(state, step)
            assert self._isolated is not None
            self._isolated.publish(state)
        elif kind is StepKind.ADD_NORM:
            self._add_norm(state, step)
        elif kind is StepKind.RECEIVE_LOSS:
            state.learn(self._port.take(step.needs[0]))
        else:
            assert self._sums is not None
            self._sums.perform(state, step)

    def scale(self, state: BatchState) -> None:
        """Multiply the gradients, once, by the factors that are known only after all backwards, if any.

        After that they equal those of one device, so the caller's hooks may run on them.
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
                    "loss_fn returns (sum, count), and pipelines with workers of their own do not exchange their "
                    "counts: each divides by the count of its share of a batch, unlike one device if shares "
                    "count unequally. Let loss_fn return the mean, and give Source(loss_weight), which returns the "
                    "count of targets"
                )
            factor = self.share_factor(state)
            self._trained.scale_grads(state.outcome[1] * shares if factor is None else factor)
        elif shares > 1:
            self._trained.scale_grads(shares)
        self._trained.run_hooks()

    def _show(self, batch: int) -> None:
        """Show the gradients to extensions, before a step."""
        parameters = zip(self._names, self._trained.arena.parameters)
        gradients = {name: p.grad for name, p in parameters if p.grad is not None}
        pipeline, stage = self._trained.pipeline, self._route.stage
        for extension in self._seen_by:
            try:
                extension.before_step(StepGradients(batch, pipeline, stage, gradients))
            except PipelineError:
                raise
            except Exception as error:
                raise StageError(
                    f"stage {stage}, batch {batch} of pipeline {pipeline}: {type(extension).__name__} failed before "
                    f"the step: {reason(error)}"
                ) from error

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

    def _prepare(self, state: BatchState, step: Step) -> None:
        """Finish the gradients, and decide whether the update is left out."""
        if self._route.norm:
            if not self._route.first:
                state.norm = self._port.take(step.needs[0])
            if not self._route.last:
                self._send_to_stage(self._route.stage + 1, Message.TOTAL_NORM, step, state.norm)
        if state.work.idles:
            return
        weights = state.work.weights
        if weights is not None and weights.scale == 0:  # others have all that counts, yet momentum acts
            self._trained.zero_grads()
        elif self.reports_unseen:
            self._name_those_without_gradients(step.batch)
        norm = state.norm
        if self._notice.watches and self._on_cpu:  # on a device, the host would have to wait
            self._watch(state, step)
        found_inf = state.found_inf = None if norm is None else self._found_inf(norm)
        skips = norm is not None and self._skips and found_inf is None and not bool(norm.isfinite())
        if norm is not None and self._limit is not None and not skips:
            # like clip_grad_norm_ of torch
            self._trained.scale_grads((self._limit / (norm + 1e-6)).clamp(max=1.0))
        if self._seen_by and not skips:
            self._show(step.batch)
        self.skipped += skips
        state.skips, state.lr = skips, self._trained.lr

    def _update(self, state: BatchState, step: Step, needed: Collection[Version]) -> None:
        if not self._route.publishes:
            self._prepare(state, step)
        self._port.sent_at = None  # passing on the norm before the step is not counted as sending
        if state.work.idles:
            if state.work.is_step:
                self._trained.idle()
        elif state.found_inf is None:
            self._trained.step(step.batch, needed, state.skips, self._forgets)
        else:
            step_unless = named("avgpipe.runtime.device_skips:step_unless")
            step_unless(state.found_inf, self._trained, step.batch, needed, self._forgets)
            self._undecided.add(step.batch)
        state.updated = True
        for _, replica in self._route.remote:
            update = self._trained.reference_update
            self._port.send(Message.REFERENCE_UPDATE, replica, step.batch, step.micro_batch, update)
        if self._isolated is not None:
            if not self._route.publishes:
                self._isolated.publish(state)
            self._isolated.note_step()

    def _found_inf(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return 1, on the device, if a norm is not finite; None if the host must know, or nothing is left out."""
        if self._on_cpu or not self._skips or self._seen_by or self._isolated is not None:
            return None
        from avgpipe.runtime.device_skips import decides, found_inf

        return found_inf(norm) if decides(self._trained, self._forgets) else None

    def learn(self, batch: int, norm: float | None) -> None:
        """Count an update that only the device knew to be left out, once the host has read the batch's norm."""
        if batch in self._undecided:
            self._undecided.discard(batch)
            self.skipped += norm is None or not math.isfinite(norm)

    def _name_those_without_gradients(self, batch: int) -> None:
        self.reports_unseen = False
        parameters = self._trained.arena.parameters
        without = [name for name, p in zip(self._names, parameters) if p.grad is None and p.requires_grad]
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
