"""Updates left out without the host's knowledge: a device decides by itself whether a batch's gradients are finite.

    norm of all gradients ── found_inf, float32: 1 if it is not finite ──┬── optimizer: as torch.amp.GradScaler asks it
                                                                         ├── running statistics, kept as they were
                                                                         └── the scale of the next losses

The host reads the norm with the batch's loss, and counts then. What is decided, and when, is the same as on
the CPU, so no scale lags behind. Where something else must know, such as an optimizer without ``found_inf``,
the host waits for the norm instead; :func:`decides` lists these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from avgpipe.elastic.skipping import takes_found_inf

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
