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
    "Task": "tasks.task",
    "Course": "report.course",
    "check": "measure.check",
    "Checked": "measure.check",
    "Timeline": "timeline",
    "Plan": "plan",
    "Pipeline": "pipeline",
    "Checkpoints": "saving",
    "Reference": "elastic.reference",
    "ElasticAveraging": "elastic.optimizer",
    "Carry": "model.context",
    "Extension": "runtime.options",
    "StepGradients": "runtime.options",
    "Audit": "options",
    "BitChecks": "options",
    "Compile": "options",
    "Copies": "options",
    "CudaGraphs": "options",
    "MemoryLimit": "options",
    "MovingAverage": "options",
    "Precision": "options",
    "Ranks": "options",
    "Source": "options",
    "WeightsFrom": "options",
    "PipelineError": "errors",
    "ScheduleError": "errors",
    "StageError": "errors",
    "PeerLost": "errors",
    "PipelineTimeout": "errors",
    "CheckpointError": "errors",
}

_ADDED = ("Comparison", "compare")  # by avgpipe_lab, see avgpipe.plugins

__all__ = ["__version__", *sorted((*_HOME, *_ADDED))]


def __getattr__(name: str) -> Any:
    if name in _ADDED:
        value = importlib.import_module("avgpipe.plugins").load("avgpipe.names", name)
    elif name in _HOME:
        value = getattr(importlib.import_module(f"avgpipe.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'avgpipe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
