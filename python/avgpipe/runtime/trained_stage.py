"""One pipeline's copy of one stage: its layers, their weights in flat buffers, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from avgpipe.elastic.flat import Arena
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.plan import Plan
from avgpipe.ranks.environment import named
from avgpipe.runtime.optimizers import Maker, members_of, schedule_of, with_modes
from avgpipe.runtime.options import SchedulerFn
from avgpipe.runtime.requirements import check_dense, check_modes
from avgpipe.runtime.stage import Stage
from avgpipe.schedule.row import Version

if TYPE_CHECKING:  # slow imports that few need
    from avgpipe.elastic.correction import CorrectedSteps
    from avgpipe.elastic.versions import Versions, WeightAverage
    from avgpipe.runtime.loss_scale import LossScale
    from avgpipe.runtime.prepared import Prepared

Hook = Callable[[torch.Tensor], torch.Tensor | None]


_ALONE = Plan(stages=1)


class TrainedStage:
    """A stage that one pipeline trains.

    Args:
        reference: None with one pipeline: then its own weights are evaluated and saved.
        plan: says on which versions of the weights batches run, and what corrects their late gradients.
        loss_scale: of a last stage, if losses are scaled.
        hooks: by parameter, see :meth:`run_hooks`.
        ema: an average of the weights over updates; None without one, or if the reference keeps it.
        prepared: the stage as ``prepare_stage`` has changed it; None without that option.
    """

    def __init__(
        self,
        stage: Stage,
        pipeline: int,
        optimizer: Maker,
        lr_scheduler: SchedulerFn | None,
        reference: Reference | None,
        arena: Arena,
        plan: Plan = _ALONE,
        loss_scale: LossScale | None = None,
        hooks: Sequence[Sequence[Hook]] = (),
        ema: WeightAverage | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        self.stage, self.pipeline, self._arena, self.loss_scale = stage, pipeline, arena, loss_scale
        self._hooks = [(p, of) for p, of in zip(arena.parameters, hooks) if of]
        self.prepared = prepared
        self.versions: Versions | None = None
        self._corrected: CorrectedSteps | None = None
        self._warmup_rounds, self._ema = plan.warmup_rounds or 0, ema
        self.optimizer: torch.optim.Optimizer | None = None
        self.elastic: ElasticAveraging | None = None
        self.lr_scheduler = None
        self._modes: list[Any] = []  # optimizers with other weights for evaluation than for training
        if arena.parameters:
            inner = self.optimizer = optimizer(arena.parameters)
            self._modes = with_modes(inner)
            check_dense(members_of(inner), alone=reference is None)
            check_modes(
                self._modes,
                alone=reference is None,
                corrected=plan.correction is not None,
                has_ema=ema is not None,
            )
            for one in self._modes:
                one.train()
            if plan.weights != "flush":
                keep = named("avgpipe.elastic.correction:kept_versions")
                self.versions, self._corrected = keep(inner, arena, plan, stage.index)
            if reference is not None:
                self.elastic = ElasticAveraging(self.optimizer, reference, pipeline, parameters=arena.weights)
                self.optimizer = self.elastic
            if lr_scheduler is not None:
                self.lr_scheduler = schedule_of(lr_scheduler, self.optimizer, inner)

    @property
    def arena(self) -> Arena:
        """Weights and gradients after all steps; performs a step that waits for others of the round."""
        if self.elastic is not None:
            self.elastic.complete()
        return self._arena

    @property
    def lr(self) -> Any:
        """The learning rate of the first parameter group; None without an optimizer."""
        if self.optimizer is None:
            return None
        lr = self.optimizer.param_groups[0].get("lr")
        return lr.clone() if isinstance(lr, torch.Tensor) else lr  # a schedule would keep changing it

    @property
    def bytes(self) -> int:
        """Bytes of weights, gradients (equally many) and optimizer state."""
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        tensors = [t for of in state for t in of.values() if isinstance(t, torch.Tensor)]
        older = self.versions.bytes if self.versions is not None else 0
        return older + sum(t.nbytes for t in (*self._arena.weights, *self._arena.weights, *tensors))

    @property
    def ready(self) -> bool:
        """Whether :meth:`step` may run now: every earlier round of averaging is complete."""
        return self.elastic is None or self.elastic.ready

    @property
    def settled(self) -> bool:
        """Whether the weights are final for the next batch: no pull of an unfinished round is due."""
        return self.elastic is None or self.elastic.settled

    def take_grads(self) -> list[torch.Tensor | None]:
        """Remove the parameters' gradients and return them."""
        grads = [p.grad for p in self._arena.parameters]
        self._arena.drop_grads()
        return grads

    def put_grads(self, grads: list[torch.Tensor | None]) -> None:
        for p, grad in zip(self._arena.parameters, grads):
            p.grad = grad

    def scale_grads(self, factor: torch.Tensor | int) -> None:
        if isinstance(factor, int):
            if grads := self.arena.grads:
                torch._foreach_mul_(grads, factor)
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for grad in self.arena.grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for dtype, grads in by_dtype.items():
            # a gradient of 16 bits is not multiplied by a factor of 16 bits
            torch._foreach_mul_(grads, factor.to(grads[0].device, torch.promote_types(dtype, torch.float32)))

    def zero_grads(self) -> None:
        """Give parameters that have been stepped before, and have no gradient now, one of zeros."""
        state = self.optimizer.state if self.optimizer is not None else {}
        for p in self.arena.parameters:
            if p.grad is None and p in state:
                p.grad = torch.zeros_like(p)

    def run_hooks(self) -> None:
        """Run the hooks of the caller's parameters on a batch's gradients, which they may replace."""
        for p, hooks in self._hooks:
            for hook in hooks:
                if p.grad is not None and (replaced := hook(p.grad)) is not None:
                    p.grad = replaced

    @property
    def updates(self) -> int:
        """How many updates the weights include, as far as versions are counted."""
        return self.versions.newest if self.versions is not None else 0

    @property
    def reference_update(self) -> list[torch.Tensor] | None:
        """The last step's update of the reference; None if it was not the last of a period."""
        return self.elastic.update if self.elastic is not None else None

    @property
    def compares_steps(self) -> bool:
        """Whether the host must know if a step is left out: weights before and after it are used."""
        return self._corrected is not None or self._ema is not None

    def step(
        self, batch: int, needed: Collection[Version], skips: bool = False, forgets: bool = True
    ) -> None:
        """Step the optimizer, with its averaging, and drop the gradients. BatchNorms count the batch.

        ``needed``: the versions of the weights that other batches need. ``skips``: a step without gradients, which
        counts as one; if it ``forgets``, without statistics too. With staleness 0 the last pipeline of a round does the
        work of all, in one pass over memory if possible; until then the replica is not ``settled``.
        """
        if self.loss_scale is not None:
            self.loss_scale.update(skips)
        if skips:
            self._arena.drop_grads()
        forgets = skips and forgets
        if (statistics := self.stage.statistics) is not None:
            (statistics.drop if forgets else statistics.commit)(batch)
        for carry in self.stage.carries:
            carry.forget(batch)
            if forgets:
                carry.drop_nonfinite()
        self.step_optimizer(batch, needed, skips)

    def step_optimizer(self, batch: int, needed: Collection[Version], skips: bool) -> None:
        """Do what :meth:`step` does with weights and gradients."""
        arena = self._arena
        if self.elastic is not None:
            self.elastic.step_in_round(arena.drop_grads)
        elif self.optimizer is not None:
            with self.versions.updating(needed) if self.versions is not None else nullcontext() as before:
                corrected = None if skips or batch < self._warmup_rounds else self._corrected
                with corrected.correcting(before) if corrected is not None else nullcontext():
                    self.optimizer.step()
        if self._ema is not None and not skips:
            self._ema.update(arena.weights)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.elastic is None:
            arena.drop_grads()

    def idle(self) -> None:
        """Count a step in which only other pipelines have a batch, so that all have equally many steps."""
        if self.elastic is not None:
            self.elastic.idle()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are saved, by their names in the stage."""
        state = self.stage.layers.state_dict(keep_vars=True)
        return {
            name: t
            for name, t in state.items()
            if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)
        }

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Use the optimizer's weights for evaluation inside, if it has such."""
        if not self._modes:
            yield
            return
        # Swapping there and back changes some bits, and an evaluation must leave training unchanged.
        kept = [flat.clone() for flat in self._arena.weights]
        for one in self._modes:
            one.eval()
        try:
            yield
        finally:
            for one in self._modes:
                one.train()
            for flat, value in zip(self._arena.weights, kept):
                flat.copy_(value)

    @property
    def keeps_weights(self) -> bool:
        """Whether the optimizer's state has weights in it by now, like that of a schedule-free one."""
        return self.has_modes and self.optimizer is not None and any(self.optimizer.state.values())

    def replaced(self) -> None:
        """Continue with weights that were replaced; no batch is in flight."""
        if self.versions is not None:
            self.versions.restore({})
        if self.elastic is not None:
            self.elastic.replaced()
        if self.prepared is not None:
            self.prepared.end_evaluation()

    @property
    def has_modes(self) -> bool:
        """Whether evaluation has other weights than training."""
        return bool(self._modes)

    @contextmanager
    def inference(
        self, weights: Sequence[torch.Tensor] | None, buffers: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Use evaluation mode inside, on the flat ``weights`` (None: its own), with carried state set aside.

        The caller decides whether forwards run without gradients. ``buffers`` replace its own of these names.
        """
        carries = self.stage.carries
        kept = [c.values for c in carries]
        training = self.stage.training
        arena = self.arena
        shown = self.evaluated() if weights is None else arena.reading(weights)
        try:
            for c in carries:
                c.values = {}
            self.stage.eval()
            with shown, self._reading(buffers or {}):
                yield
        finally:
            if self.prepared is not None:
                self.prepared.end_evaluation()
            self.stage.train(training)
            for c, values in zip(carries, kept):
                c.values = values

    @contextmanager
    def _reading(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Give buffers other values inside the block, without copying."""
        mine = self.buffers()
        own = [(mine[name], mine[name].data) for name in buffers]  # all names of a shared one have the same
        for name, value in buffers.items():
            mine[name].data = value
        try:
            yield
        finally:
            for buffer, data in own:
                buffer.data = data
