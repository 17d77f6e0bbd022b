"""Costs of a layer at the end of a batch: adding up gradients, the optimizer's step, elastic averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from avgpipe.elastic.flat import Arena
from avgpipe.elastic.reference import Reference
from avgpipe.measure.sweep import ProfilingClock, repeat, typical
from avgpipe.runtime.optimizers import Maker, maker_of, with_modes
from avgpipe.runtime.options import OptimizerFn
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.trained_stage import TrainedStage

_SCRATCH_BYTES = 2**25  # written between samples, as weights and state are in no cache at the end of a batch
_PIPELINES = 2


class UpdateCosts(NamedTuple):
    """Update costs of one layer; the fields are explained in ``LayerProfile``."""

    optimizer_bytes: float = 0.0
    update_s: float = 0.0
    elastic_s: float = 0.0
    accumulate_s: float = 0.0


class Updates:
    """Measures layers one after another, so that weights, gradients and state exist for only one at a time.

    ``optimizer`` None: no steps, only the sums of gradients. ``clip_grad_norm``: None, or the limit of the
    gradient norm, which is computed and applied before each step.
    """

    def __init__(
        self, optimizer: OptimizerFn | None, device: torch.device, clip_grad_norm: float | None
    ) -> None:
        self._optimizer, self._device, self._clock = optimizer, device, ProfilingClock(device)
        self._limit = clip_grad_norm
        self._scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        # A stage makes one step for all its layers: the fixed time of a step must not count for each of them.
        tiny = nn.Linear(1, 1, bias=False) if optimizer is not None else nn.Identity()
        self._any = self._measured(tiny, ["weight"], 0.2)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step with almost no weights."""
        return self._any.update_s

    def measure(self, layer: nn.Module, names: Sequence[str], budget_s: float) -> UpdateCosts:
        """Measure a layer. ``names``: names of its trainable parameters, for an optimizer that needs them."""
        found = self._measured(layer, names, budget_s)
        update_s, elastic_s = found.update_s - self._any.update_s, found.elastic_s - self._any.elastic_s
        return found._replace(update_s=max(0.0, update_s), elastic_s=max(0.0, elastic_s))

    def _measured(self, layer: nn.Module, names: Sequence[str], budget_s: float) -> UpdateCosts:
        trained = [p for p in layer.parameters() if p.requires_grad]
        if not trained:
            return UpdateCosts()
        grads = [torch.full_like(p, 1e-6).detach() for p in trained]
        accumulate_s = self._timed([lambda: _add(grads, grads)], lambda: None, budget_s / 4)
        if self._optimizer is None:
            return UpdateCosts(accumulate_s=accumulate_s)
        optimizer = maker_of(self._optimizer, names)
        alone = self._replicas(optimizer, layer, 1)
        update_s = self._step_s(alone, grads, budget_s / 4)
        state = alone[0].bytes - 2 * sum(w.nbytes for w in alone[0].arena.weights)
        made = alone[0].optimizer
        if made is not None and with_modes(made):  # for a single pipeline only
            return UpdateCosts(state, update_s, accumulate_s=accumulate_s)
        del alone, made
        several = self._replicas(optimizer, layer, _PIPELINES)
        elastic_s = self._step_s(several, grads, budget_s / 2) - update_s
        return UpdateCosts(state, update_s, max(0.0, elastic_s), accumulate_s)

    def _replicas(self, optimizer: Maker, layer: nn.Module, pipelines: int) -> list[TrainedStage]:
        stages = [Stage([layer], 0, 0, 0, self._device) for _ in range(pipelines)]
        arenas = [Arena(p for p in stage.parameters() if p.requires_grad) for stage in stages]
        reference = Reference(arenas[0].weights, pipelines, staleness=1) if pipelines > 1 else None
        pairs = enumerate(zip(stages, arenas))
        return [TrainedStage(stage, i, optimizer, None, reference, arena) for i, (stage, arena) in pairs]

    def _step_s(self, replicas: list[TrainedStage], grads: list[torch.Tensor], budget_s: float) -> float:
        """Return the seconds of a step, with its work for the other pipelines."""

        def prepare() -> None:
            for replica in replicas:
                replica.put_grads(list(grads))

        def step(replica: TrainedStage) -> None:
            if self._limit is not None:
                self._clip(replica, self._limit)
            replica.step(0, ())

        return self._timed([partial(step, replica) for replica in replicas], prepare, budget_s)

    def _clip(self, replica: TrainedStage, limit: float) -> None:
        """Clip by this stage's norm only."""
        norms = torch.stack([n.double() for n in torch._foreach_norm(replica.arena.grads)])
        replica.scale_grads((limit / (norms.square().sum().sqrt() + 1e-6)).clamp(max=1.0))

    def _timed(
        self, acts: Sequence[Callable[[], object]], prepare: Callable[[], None], budget_s: float
    ) -> float:
        samples: list[float] = []

        def once(number: int) -> None:
            prepare()
            self._scratch.add_(1)
            samples.append(self._clock.timed(lambda: [act() for act in acts]) / len(acts))

        once(0)  # makes the state
        samples.clear()
        repeat(once, budget_s)
        return float(typical(samples))


def _add(sums: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Add gradients as autograd does."""
    for total, grad in zip(sums, grads):
        total.add_(grad)
