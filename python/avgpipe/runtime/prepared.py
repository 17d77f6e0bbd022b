"""Stages that the caller has made parallel inside, over ranks outside of the pipeline.

    hook returns               what it is                                   gradients
    DistributedDataParallel    each rank of its group has the stage         averaged in the last backward
    nothing, or the stage      FSDP2: ``fully_shard``, or ``replicate``     averaged in the last backward
    likewise                   tensor parallelism: layers hold DTensors     complete after each backward

Gradients are accumulated over the micro-batches of a batch, and go over the network in its last backward
only. So all ranks of a group must run the same forwards and backwards, in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from avgpipe.elastic.flat import Arena
from avgpipe.elastic.sharded import ShardedArena
from avgpipe.errors import PeerLost, StageError
from avgpipe.model.model import trainable_parameters
from avgpipe.plan import Plan
from avgpipe.ranks.met import is_of_transport, transport_reason
from avgpipe.ranks.world import World
from avgpipe.runtime.options import WHOLE
from avgpipe.runtime.stage import Stage
from avgpipe.schedule.row import Kind

if TYPE_CHECKING:
    from avgpipe.runtime.worker import Worker

PrepareStage: TypeAlias = Callable[[nn.Module, int, DeviceMesh], Any]


class Prepared:
    """A stage whose layers are parallel, or unchanged by the hook.

    Attributes:
        averages: Whether gradients are averaged over ranks that train on other batches.
    """

    averages = False

    def __init__(self, stage: Stage) -> None:
        self._parameters = trainable_parameters(stage)

    def arena(self) -> Arena:
        """Return what holds the stage's trainable parameters."""
        is_sharded = any(isinstance(p, DTensor) for p in self._parameters)
        return (ShardedArena if is_sharded else Arena)(self._parameters)

    def forms(self) -> list[str]:
        """Return how each parameter is placed on its mesh, in words."""
        return [_form(p) for p in self._parameters]

    def begin_backward(self, is_last: bool) -> None:
        """Prepare for the backward of a micro-batch. ``is_last``: of its batch."""

    def end_evaluation(self) -> None:
        """Prepare for weights that may change without a forward and backward of training."""

    def refuse_late_factors(self) -> None:
        """Refuse a loss function whose gradients can only be scaled after the last backward."""
        if self.averages:
            raise StageError(
                "loss_fn returns (sum, count), and each rank's gradients would be divided by its own count after they "
                "were averaged over ranks: return the mean over the micro-batch, and its count by Source(loss_weight)"
            )


class _FullySharded(Prepared):
    """FSDP2, also of parts of the stage."""

    averages = True

    def __init__(self, stage: Stage, roots: list[FSDPModule]) -> None:
        super().__init__(stage)
        for name, p in stage.named_parameters():
            if not isinstance(p, DTensor):
                raise ValueError(
                    f"prepare_stage has sharded a part of stage {stage.index} and left out {name!r}, whose gradients "
                    "would not be averaged: end with fully_shard(module, mesh=...) of the stage itself, which includes "
                    "what is left"
                )
        self._roots, self._syncs = roots, True

    def begin_backward(self, is_last: bool) -> None:
        if is_last == self._syncs:
            return
        self._syncs = is_last
        for root in self._roots:
            root.set_requires_gradient_sync(is_last)
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)  # the next micro-batch needs it at once

    def end_evaluation(self) -> None:
        # A module in evaluation may keep its whole weights for the next forward, and miss that they are
        # replaced.
        for root in self._roots:
            for module in root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    module.reshard()


class _Replicated(Prepared):
    """DistributedDataParallel of the whole stage.

    Its forward is left out. It prepares its reducer (private) for a backward that follows at once, but here
    another micro-batch's follows; torch.distributed.pipelining does likewise.
    """

    averages = True

    def __init__(self, stage: Stage, wrapper: DistributedDataParallel) -> None:
        super().__init__(stage)
        self._reducer: Any = wrapper.reducer

    def begin_backward(self, is_last: bool) -> None:
        if is_last:
            self._reducer._rebuild_buckets()  # once, in the order of gradients in the first backward
            self._reducer.prepare_for_backward([])


def prepare(stage: Stage, hook: PrepareStage, mesh: DeviceMesh) -> Prepared:
    """Let the caller's hook change a stage in place, or wrap it.

    Raises:
        TypeError, ValueError: If the hook has done what a stage does not support.
    """
    layers, before = list(stage.layers), _outlines(stage)
    made = hook(stage, stage.index, mesh)
    _check_layers(stage, layers, before)
    if isinstance(made, DistributedDataParallel):
        return _replicated(stage, made)
    if made is not None and made is not stage:
        raise TypeError(
            f"prepare_stage returned {type(made).__name__} for stage {stage.index}: change the stage in place and "
            "return nothing, or return DistributedDataParallel(module, process_group=...)"
        )
    roots = _roots(stage)
    return _FullySharded(stage, roots) if roots else Prepared(stage)


def _replicated(stage: Stage, wrapper: DistributedDataParallel) -> Prepared:
    if wrapper.module is not stage:
        raise ValueError(
            f"prepare_stage returned a DistributedDataParallel of another module than stage {stage.index}: wrap the "
            "module that it was given"
        )
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(wrapper, option):
            raise ValueError(
                f"DistributedDataParallel({option}=True) looks at a forward right before its backward, and stages run "
                "other micro-batches between: leave it out"
            )
    return _Replicated(stage, wrapper)


def _roots(stage: Stage) -> list[FSDPModule]:
    """Return the FSDP modules of a stage that lie in no other one."""
    found = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    inside = {id(part) for root in found for part in root.modules() if part is not root}
    return [module for module in found if id(module) not in inside]


def _form(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return WHOLE
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    placed = zip(parameter.placements, names, mesh.shape)
    return ", ".join(f"{placement!r} over the {size} ranks of {name!r}" for placement, name, size in placed)


class _StageOutline(NamedTuple):
    """What a hook must not change of a parameter. ``first``: its first name, as tied ones have several."""

    shape: torch.Size
    trains: bool
    first: str


def _outlines(stage: Stage) -> dict[str, _StageOutline]:
    named = dict(stage.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in reversed(named.items())}
    return {name: _StageOutline(p.shape, p.requires_grad, first[id(p)]) for name, p in named.items()}


def _check_layers(stage: Stage, layers: list[nn.Module], before: dict[str, _StageOutline]) -> None:
    after = _outlines(stage)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in changed:
        if name in before and name in after and before[name].first != after[name].first:
            raise ValueError(
                f"prepare_stage has separated {name!r} of stage {stage.index} from {before[name].first!r}, which "
                "is the same parameter: shard together what shares it, as by fully_shard(module, ...) of the stage"
            )
    if changed or any(now is not then for now, then in zip(stage.layers, layers, strict=True)):
        what = f"the name, shape or requires_grad of {', '.join(changed[:3])}" if changed else "layers"
        raise ValueError(
            f"prepare_stage has changed {what} of stage {stage.index}, but weights are already assigned to stages by "
            "name: change the model before the Pipeline is made"
        )


def check_prepared(plan: Plan, ranks: int) -> None:
    """Refuse schedules that ``prepare_stage`` does not support. ``ranks``: of the pipeline."""
    rows = plan.build_schedule().rows
    if any(a.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) for row in rows for a in row):
        raise ValueError(
            f"Ranks(prepare_stage) cannot have schedule={plan.schedule!r}: use one whose backwards are whole"
        )
    stages = max(len({a.stage for a in row}) for row in rows) if ranks > 1 else plan.stages
    if stages > 1:
        raise ValueError(
            f"Ranks(prepare_stage) cannot have {stages} stages in one process: use a rank for each, and a "
            "schedule with one a worker"
        )


def agree_on_forms(worker: Worker) -> bool:
    """Refuse shared parameters in different forms; return whether any is sharded, on any rank."""
    forms: dict[str, str] = {}
    for (replica, _), trained in worker.trained.items():
        names = worker.model.trainable[worker.placement.stage_of(replica)]
        if trained.prepared is not None:
            forms.update(zip(names, trained.prepared.forms()))
    found = worker.world.gather(forms)
    for name in set().union(*found):
        different = sorted({of_rank[name] for of_rank in found if name in of_rank})
        if len(different) > 1:
            raise ValueError(
                f"{name!r} is held by several stages, and prepare_stage has made it {' and '.join(different)}: "
                "let it do the same in each of them"
            )
    return any(form != WHOLE for of_rank in found for form in of_rank.values())


def explained(error: Exception, world: World) -> Exception:
    """Return an error in plain words for failures of torch's own communication inside of a stage."""
    cause = error.__cause__ if isinstance(error, StageError) else error
    if cause is None or not is_of_transport(cause):
        return error
    me, why = world.name(world.rank), transport_reason(cause)
    return PeerLost(f"{me} has lost a rank with which prepare_stage shares work: {why}")
