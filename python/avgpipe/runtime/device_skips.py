"""Updates left out without the host's knowledge: a device decides by itself whether a batch's gradients are finite.

    norm of all gradients ── found_inf, float32: 1 if it is not finite ──┬── optimizer: as torch.amp.GradScaler asks it
                                                                         ├── running statistics, kept as they were
                                                                         └── the scale of the next losses

The host reads the norm with the batch's loss, and counts then. What is decided, and when, is the same as on
the CPU, so no scale lags behind. Where something else must know, such as an optimizer without ``found_inf``,
the host waits for the norm instead; :func:`decides` lists these.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from avgpipe.elastic.fused import skipping, takes_found_inf
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.trained_stage import TrainedStage


def found_inf(norm: torch.Tensor) -> torch.Tensor:
    """Return 1 if a norm is not finite, else 0; float32 []."""
    return norm.lt(torch.inf).logical_not_().float()  # no norm is less than 0, and NaN is not less


def decides(trained: TrainedStage, forgets: bool) -> bool:
    """Whether the device can leave out the next step of a stage. ``forgets``: whether a batch's statistics count.

    Not with an average of a lone pipeline's weights, corrections of late gradients, or carried state that a
    batch may have spoiled; nor with an optimizer that does not take ``found_inf``, or one of a prepared stage.
    """
    if trained.compares_steps or trained.prepared is not None or (forgets and trained.stage.carries):
        return False
    if trained.elastic is not None:
        return trained.elastic.skips_on_device
    return trained.optimizer is None or takes_found_inf(trained.optimizer)


def step_unless(
    found_inf: torch.Tensor, trained: TrainedStage, batch: int, needed: Collection[Version], forgets: bool
) -> None:
    """Step a stage; if ``found_inf`` is 1, which only the device knows, as :meth:`TrainedStage.step` with ``skips``."""
    if trained.loss_scale is not None:
        trained.loss_scale.update(found_inf)
    if trained.stage.statistics is not None:
        trained.stage.statistics.commit(batch, found_inf if forgets else None)
    for carry in trained.stage.carries:
        carry.forget(batch)
    with skipping(trained.optimizer, found_inf) if trained.optimizer is not None else nullcontext():
        trained.step_optimizer(batch, needed, False)
