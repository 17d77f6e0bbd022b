"""What is refused before a worker starts and before anything is written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from avgpipe.checkpoint.manifest import Manifest, verify_checkpoint
from avgpipe.cli.settings import RUN_FILE, TrainSettings
from avgpipe.errors import CheckpointError
from avgpipe.plan import Plan
from avgpipe.planning import balance

if TYPE_CHECKING:
    from avgpipe.workloads import Workload

_PARTS_OF_A_RUN = (RUN_FILE, "plan.json", "metrics.jsonl", "summary.json", "timeline.json", "checkpoints")


def check_run(settings: TrainSettings) -> None:
    """Refuse what would fail later: folder, device, data, model, checkpoint. ValueError, CheckpointError or OSError."""
    check_folder(settings)
    check_device(settings.device)
    from avgpipe.runtime.model import Model

    workload, plan = prepare(settings)
    model = Model.split(workload.layers, plan.stages, plan.partition)
    if settings.resume:
        verify_checkpoint(settings.last_checkpoint, model.signature())


def prepare(settings: TrainSettings) -> tuple[Workload, Plan]:
    """The workload, and the plan with the stages' layers: as in the settings, else balanced by the workload's costs."""
    from avgpipe.workloads import build_workload

    workload = build_workload(settings.workload, settings.build_options())
    plan = Plan(**settings.plan)
    if plan.partition is None and workload.layer_costs is not None:
        plan = replace(plan, partition=balance(workload.layer_costs, plan.stages))
    return workload, plan


def check_folder(settings: TrainSettings) -> None:
    out = Path(settings.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if settings.resume:
        _check_resumable(settings)
        return
    if settings.restarts:
        return
    found = next((name for name in _PARTS_OF_A_RUN if (out / name).exists()), None)
    if found is not None:
        raise ValueError(
            f"--out {out} holds another run ({found}): add --resume to go on with it, or name another folder"
        )
    nearest_folder = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest_folder.is_dir() or not os.access(nearest_folder, os.W_OK):
        raise ValueError(f"--out {out} cannot be made: {nearest_folder} is no folder that you may write to")


def _check_resumable(settings: TrainSettings) -> None:
    if not (settings.last_checkpoint / "manifest.json").is_file():
        raise CheckpointError(
            f"--resume: no checkpoint in {settings.last_checkpoint}; "
            "leave --resume out and name a new --out to start anew"
        )
    Manifest.read(settings.last_checkpoint)


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda: torch {torch.__version__} sees no CUDA device; use --device cpu, or see avgpipe doctor"
        )
