"""What may be asked of a workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LR_SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True)
class BuildOptions:
    """None means: as the preset has it.

    Attributes:
        preset: which size.
        data: the data folder; None: what the workload has without one.
        pretrained: a folder of weights to begin with, for workloads that can.
        pipelines: how many will train side by side.
        batch_size: samples of one pipeline's batch.
        seed: of the initial weights and everything else that is drawn.
        epochs: how many to train.
        max_batches: how many batches will be trained at most, of all pipelines together, when the run ends before its
            epochs do; a learning rate that decays then reaches its end there.
        lr_scaling: how the learning rate grows with the pipelines, one of ``LR_SCALINGS``.
        loader_workers: processes that make batches ahead.
    """

    preset: str = "tiny"
    data: Path | None = None
    pretrained: Path | None = None
    pipelines: int = 1
    batch_size: int | None = None
    seed: int = 0
    epochs: int | None = None
    max_batches: int | None = None
    lr_scaling: str | None = None
    loader_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("pipelines", "batch_size", "epochs", "max_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("seed", "loader_workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.lr_scaling is not None and self.lr_scaling not in LR_SCALINGS:
            raise ValueError(f"lr_scaling must be one of {', '.join(LR_SCALINGS)}, got {self.lr_scaling!r}")
