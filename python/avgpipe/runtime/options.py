"""How all lanes of a pipeline train."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from avgpipe.runtime.batch import LossFn
from avgpipe.runtime.compiled import Compiler
from avgpipe.runtime.loss import is_mean_by_kind


@dataclass(frozen=True)
class TrainingOptions:
    """``weighs``: whether the caller says what micro-batches weigh. ``loss_scale``: a number,
    "dynamic" or None.
    """

    loss_fn: LossFn
    clip_grad_norm: float | None
    autocast: torch.dtype | None
    recompute: str
    cuda_graphs: bool = False
    skip_nonfinite: bool = False
    weighs: bool = False
    loss_scale: float | str | None = None
    compiler: Compiler = field(default_factory=Compiler)

    @property
    def needs_norm(self) -> bool:
        """Of the gradients of all stages."""
        return self.clip_grad_norm is not None or self.skip_nonfinite or self.loss_scale is not None

    @property
    def may_be_no_mean(self) -> bool:
        """Whether the loss function may return something else than what micro-batches are weighed for."""
        return not self.weighs and not is_mean_by_kind(self.loss_fn)

    @property
    def scales_late(self) -> bool:
        """Whether what gradients must be multiplied with may be known after the backwards only."""
        return self.loss_scale is not None or self.may_be_no_mean
