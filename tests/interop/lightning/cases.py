"""A small model, its data, and Lightning's Trainer on it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from avgpipe import Plan
from avgpipe.interop.lightning import PipelineModule, PipelineStrategy

lightning: Any = importlib.import_module("lightning")

LOSS = nn.CrossEntropyLoss()


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


def loader(samples: int, size: int, seed: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=draw, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), size)


TRAINING, VALIDATION = loader(40, 8), loader(30, 10, seed=2)


class Classifier(PipelineModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module(plan: Plan | None = None, kind: Any = Classifier, **options: Any) -> Any:
    return kind(model(), plan or Plan(stages=2, micro_batches=2), LOSS, **options)


def trainer(folder: Path | str, epochs: int, *callbacks: Any, **settings: Any) -> Any:
    fixed = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": PipelineStrategy(),
        "logger": False,
        "enable_checkpointing": any(isinstance(c, lightning.pytorch.callbacks.Checkpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(
        max_epochs=epochs, default_root_dir=folder, callbacks=list(callbacks), **(fixed | settings)
    )


def checkpoints(folder: Path, **settings: Any) -> Any:
    return lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", **settings)
