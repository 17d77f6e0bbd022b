"""avgpipe: pipeline-parallel training with elastic averaging.

Names are loaded on first use, so that the pure-data packages (schedule, planning, timeline) work without
torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "schedule": "Action Schedule build_schedule schedule_names",
    "planning": "Costs Partition Profile partition predict simulate",
    "measure.profiler": "profile",
    "measure.tune": "tune",
    "measure.check": "Checked check",
    "tasks.task": "Task",
    "report.course": "Course",
    "timeline": "Timeline",
    "plan": "Plan",
    "pipeline": "Pipeline",
    "saving": "Checkpoints",
    "elastic.reference": "Reference",
    "elastic.optimizer": "ElasticAveraging",
    "model.context": "Carry",
    "runtime.options": "Extension StepGradients",
    "options": "Audit BitChecks Compile Copies CudaGraphs FusedGradients InTurn MemoryLimit MovingAverage Precision "
    "Ranks Source WeightsFrom",
    "errors": "CheckpointError PeerLost PipelineError PipelineTimeout ScheduleError StageError",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
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
