"""What can be added to a Pipeline by ``extensions=[...]``: options with their own code, and code of the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from avgpipe.runtime.options import TrainingOptions
    from avgpipe.runtime.session import Session
    from avgpipe.runtime.spec import Spec


class StepGradients(NamedTuple):
    """The gradients of one stage before its optimizer step: summed over replicas, scaled back and clipped.

    Attributes:
        batch, pipeline, stage: numbers of the step.
        gradients: by the parameter's name in the unsplit model; without those that have none.
    """

    batch: int
    pipeline: int
    stage: int
    gradients: Mapping[str, torch.Tensor]


class Extension:
    """Base class of what ``Pipeline(..., extensions=[...])`` takes. A method that is not overridden does nothing.

    Every rank gives the same extensions. An error in a method ends the run as an error in a layer does.
    """

    def configure(self, options: TrainingOptions) -> TrainingOptions:
        """Return the options of the Pipeline with this extension's; ValueError or TypeError for wrong values."""
        return options

    def check(self, spec: Spec) -> None:
        """Raise ValueError if the model, the plan or other options do not go with this, once the model is cut."""

    def opened(self, session: Session) -> None:
        """Called on each rank once all ranks have met, and again after a rank was replaced."""

    def before_step(self, step: StepGradients) -> None:
        """Called on each rank for each stage and pipeline it trains, before the optimizer step of a batch.

        Gradients may be read, or changed in place. On an accelerator they are computed on the current stream.
        """

    def closed(self) -> None:
        """Called when the Pipeline is closed."""
