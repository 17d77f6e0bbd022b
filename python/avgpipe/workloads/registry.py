"""The workloads by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avgpipe.errors import nearest

if TYPE_CHECKING:
    from avgpipe.workloads.workload import Workload, WorkloadFacts

# Each module has PRESETS, check() and build(); it is imported when it is needed, and torch with it.
_MODULES = {"awd-lstm": "language"}


def workload_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def preset_names(name: str) -> tuple[str, ...]:
    """The presets of a workload, smallest first. Raises ValueError for an unknown workload."""
    return tuple(_module(name).PRESETS)


def check_workload(
    name: str,
    *,
    preset: str = "tiny",
    data: str | Path | None = None,
    pipelines: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    epochs: int | None = None,
    max_batches: int | None = None,
) -> WorkloadFacts:
    """Refuse arguments that :func:`build_workload` would refuse, without reading the data.

    Raises:
        ValueError: an unknown name or preset, or a number out of range.
        avgpipe.workloads.DataNotFound: a ValueError that names the folder and the missing files.
    """
    module = _module(name)
    if preset not in module.PRESETS:
        raise ValueError(f"unknown preset {preset!r} of {name}: {nearest(preset, tuple(module.PRESETS))}")
    counts = {"pipelines": pipelines, "batch_size": batch_size, "epochs": epochs, "max_batches": max_batches}
    for what, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{what} must be at least 1, got {value}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    facts: WorkloadFacts = module.check(preset, data, batch_size, epochs)
    return facts


def build_workload(
    name: str,
    *,
    preset: str = "tiny",
    data: str | Path | None = None,
    pipelines: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    epochs: int | None = None,
    max_batches: int | None = None,
) -> Workload:
    """Read the data and make the model with its initial weights, the same on every rank.

    Args:
        name, preset: see :func:`workload_names` and :func:`preset_names`.
        data: the data folder; None: the Python standard library's own source.
        pipelines: how many pipelines will train side by side; divides the data and sets the learning rate.
        batch_size: samples in one pipeline's batch; None: the preset's.
        seed: of the initial weights and everything else that is drawn. The caller's random state stays as it
            is.
        epochs: how many to train; None: the preset's.
        max_batches: how many batches will be trained at most, of all pipelines together, when the run ends
            before its epochs do; a learning rate that decays then reaches its end there.

    Raises:
        ValueError: as :func:`check_workload`, and for a text too short for the rows asked for.
    """
    check_workload(
        name,
        preset=preset,
        data=data,
        pipelines=pipelines,
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        max_batches=max_batches,
    )
    workload: Workload = _module(name).build(preset, data, pipelines, batch_size, seed, epochs, max_batches)
    return workload


def _module(name: str) -> Any:
    if name not in _MODULES:
        raise ValueError(f"unknown workload {name!r}: {nearest(name, workload_names())}")
    return importlib.import_module(f"avgpipe.workloads.{_MODULES[name]}")
