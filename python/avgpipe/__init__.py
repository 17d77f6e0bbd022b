"""avgpipe: pipeline-parallel training with elastic averaging.

Names are loaded on first use, so that the pure-data packages (schedule, planning, timeline) work without
torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Action": "schedule",
    "Schedule": "schedule",
    "build_schedule": "schedule",
    "schedule_names": "schedule",
    "Costs": "planning",
    "simulate": "planning",
    "predict": "planning",
    "Profile": "planning",
    "profile": "measure.profiler",
    "Partition": "planning",
    "partition": "planning",
    "tune": "measure.tune",
    "Task": "workloads.task",
    "compare": "report.own_model",
    "check": "measure.check",
    "Checked": "measure.check",
    "Comparison": "report.compare",
    "Timeline": "timeline",
    "Plan": "plan",
    "Pipeline": "pipeline",
    "Checkpoints": "saving",
    "Reference": "elastic.reference",
    "ElasticAveraging": "elastic.optimizer",
    "Carry": "model.context",
    "PipelineError": "errors",
    "ScheduleError": "errors",
    "StageError": "errors",
    "PeerLost": "errors",
    "PipelineTimeout": "errors",
    "CheckpointError": "errors",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'avgpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"avgpipe.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
