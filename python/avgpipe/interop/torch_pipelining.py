"""The advance-forward schedule for the stages of torch.distributed.pipelining.

    schedule = ScheduleAdvanceForward(stage, n_microbatches, loss_fn=loss_fn)   # was: Schedule1F1B(stage, ...)

It executes on torch's own runtime for lists of actions, which has private names: only this file uses them.
Torch 2.11 to 2.13 have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.schedule import build_schedule

try:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import _PipelineStageBase

    _add_transfers = _PipelineScheduleRuntime._prepare_schedule_with_comms
    _F, _SEND_F, _RECV_F = _ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F
    _B, _SEND_B, _RECV_B = _ComputationType.FULL_BACKWARD, _ComputationType.SEND_B, _ComputationType.RECV_B
    _SCALE = _ComputationType.REDUCE_GRAD
except (ImportError, AttributeError) as error:
    raise ImportError(
        "ScheduleAdvanceForward works with torch 2.11 to 2.13; "
        f"torch.distributed.pipelining of torch {torch.__version__} differs ({error}): "
        "install one of those, or use avgpipe.Pipeline"
    ) from error


class ScheduleAdvanceForward(_PipelineScheduleRuntime):
    """Advance forward (Chen et al. 2023) on one stage per rank, with the interface of ``Schedule1F1B``.

    ``step`` and ``eval`` take the arguments of torch's single-stage schedules, and fill ``losses`` in the
    order of the micro-batches. Stage k runs min(M, K - k + a_k) forwards before its first backward, and has
    at most that many micro-batches in flight. Any number of micro-batches works, also fewer than stages.

    If the stages communicate over gloo, every receive is posted before its sender can be ready, since gloo
    transfers nothing earlier. Other backends, such as NCCL, run posted operations in order, and get torch's
    own order, which cannot deadlock there. Unlike torch's schedules, ``eval`` keeps existing gradients.

    Args:
        stage: Result of ``PipelineStage`` or ``build_stage``; stage k must be on rank k of its group.
        n_microbatches: M, the equal parts of a batch; the batch size must be a multiple.
        loss_fn: Maps (output, target) of a micro-batch to its loss; None for ``eval`` only.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: As in torch's schedules.
        scale_grads: Divide the gradients by M, as needed for a mean loss; False for a sum.
        advance: The a_k, as :func:`avgpipe.build_schedule` takes it; None means K-1-k, 0 everywhere is 1F1B.

    Raises:
        TypeError: Several stages, or a stage that is not torch's.
        ValueError: An advance or a number of micro-batches that :func:`avgpipe.build_schedule` refuses, or a
            stage that is not alone on the rank of its number. In ``step`` and ``eval`` of several stages: a
            batch that is not a multiple of M, or micro-batches with other shapes than before, which do not
            fit the buffers.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        advance: int | Sequence[int] | str | None = None,
    ) -> None:
        _check_stage(stage)
        order = compute_order(stage.num_stages, n_microbatches, advance)
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__([stage], n_microbatches, loss_fn, *specs, scale_grads=scale_grads)  # type: ignore[no-untyped-call]
        # whether the last step trained, and the shapes of its micro-batches
        self._shapes: tuple[bool, list[Any]] | None = None
        self.pipeline_order = {rank: list(actions) for rank, actions in order.items()}
        _add_transfers(self, self.pipeline_order)  # and the scaling by 1/M
        if _uses_gloo(stage):
            lowered = self.pipeline_order_with_comms
            self.pipeline_order_with_comms = {r: receives_early(actions) for r, actions in lowered.items()}

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self._check_shapes(arg_mbs or [], target_mbs or [])
        whole = self.pipeline_order_with_comms
        if not self._has_backward:
            self.pipeline_order_with_comms = {r: forwards_alone(actions) for r, actions in whole.items()}
        elif not self._stages_backward_initialized:
            # Buffers made for evaluation need no gradient; torch 2.11 would train with them, and fail.
            self._stages_forward_initialized = False
        try:
            super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, *args, **kwargs)
        finally:
            self.pipeline_order_with_comms = whole

    def _check_shapes(self, inputs: list[Any], targets: list[Any]) -> None:
        """Refuse inputs that do not fill the next stage's buffers: torch 2.13 would use the stale rest."""
        if self._num_stages == 1 or not inputs:
            return
        parts = [[tuple(x.shape) for x in part if isinstance(x, torch.Tensor)] for part in inputs]
        for part, target in zip(parts, targets):
            part.append((len(target),))
        other = next((part for part in parts if part != parts[0]), None)
        if other is not None:
            raise ValueError(
                f"micro-batches of {_sizes(parts[0])} and of {_sizes(other)}: make the batch size a multiple of "
                f"n_microbatches={self._n_microbatches}, or pass drop_last=True to its DataLoader"
            )
        before, self._shapes = self._shapes, (self._has_backward, parts[:1])
        if before is not None and before[0] == self._has_backward and before[1] != parts[:1]:
            raise ValueError(
                f"micro-batches of {_sizes(parts[0])} after those of {_sizes(before[1][0])}, for which the stages' "
                "buffers were made: pad the batch, or pass drop_last=True to its DataLoader"
            )


def compute_order(
    stages: int, micro_batches: int, advance: int | Sequence[int] | str | None
) -> dict[int, list[_Action]]:
    """Return for each stage the actions of :func:`avgpipe.build_schedule`, as torch writes them."""
    kinds = {"F": _F, "B": _B}
    columns = enumerate(build_schedule("advance-forward", stages, micro_batches, advance).columns)
    return {k: [_Action(k, kinds[a.kind], a.micro_batch) for a in c if a.kind in kinds] for k, c in columns}


def receives_early(actions: Sequence[_Action]) -> list[_Action]:
    """Return the actions of one rank, with each receive moved to where posting it does not block and is in time.

    gloo sends a tensor once it has the notice that its receive is posted, and the notice uses the same
    connection as this rank's sends: posted behind a tensor, it is late by that tensor's time. So activations
    come first of all, while the stage waits for the first of them anyway; the receive for the gradient of
    micro-batch m follows right after the send of its activation, which the next stage needs first. Both kinds
    stay in the order of their sends, by which gloo matches them.
    """
    gradients = {a.microbatch_index: a for a in actions if a.computation_type is _RECV_B}
    moved = [a for a in actions if a.computation_type is _RECV_F]
    for action in actions:
        if action.computation_type in (_RECV_F, _RECV_B):
            continue
        moved.append(action)
        if action.computation_type is _SEND_F:
            moved.append(gradients[action.microbatch_index])
    return moved


def forwards_alone(actions: Sequence[_Action]) -> list[_Action]:
    """Return the actions without backwards, without their sends and receives, and without the gradient scaling."""
    return [a for a in actions if a.computation_type not in (_B, _SEND_B, _RECV_B, _SCALE)]


def _sizes(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join("x".join(map(str, shape)) for shape in shapes) or "nothing"


def _check_stage(stage: Any) -> None:
    if not isinstance(stage, _PipelineStageBase):
        raise TypeError(
            f"stage is a {type(stage).__name__}: pass the one PipelineStage of this rank, as to Schedule1F1B"
        )
    if stage.group_size != stage.num_stages:
        raise ValueError(
            f"{stage.num_stages} stages on a group of {stage.group_size} ranks: ScheduleAdvanceForward runs one stage "
            "per rank; make as many stages as ranks, or pass the stage a group of that size"
        )
    if stage.group_rank != stage.stage_index:
        raise ValueError(
            f"stage {stage.stage_index} is on rank {stage.group_rank} of its group: "
            f"build stage {stage.group_rank} there, so that neighbours find each other"
        )


def _uses_gloo(stage: _PipelineStageBase) -> bool:
    config = dist.get_backend_config(stage.group)  # such as "cpu:gloo,cuda:nccl"
    backends: Mapping[str, str] = dict(part.split(":") for part in config.split(","))
    return backends.get(torch.device(stage.device).type) == "gloo"
