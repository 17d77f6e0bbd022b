"""Models of the papers with their data: what ``avgpipe train`` trains.

The registry's functions import torch only when a workload is built; the other names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from avgpipe.workloads.options import LR_SCALINGS, BuildOptions
from avgpipe.workloads.registry import build_workload, check_workload, preset_names, workload_names

_HOME = {
    "AWDLSTMConfig": "awd_lstm",
    "AWDLSTMLoss": "awd_lstm",
    "Batches": "workload",
    "Corpus": "text",
    "DataNotFound": "text",
    "LanguageBatches": "batches",
    "LibraryNotFound": "libraries",
    "NTASGD": "ntasgd",
    "NonMonotonicTrigger": "ntasgd",
    "SampleBatches": "samples",
    "Training": "training",
    "Workload": "workload",
    "WorkloadFacts": "workload",
    "awd_lstm_costs": "awd_lstm",
    "awd_lstm_layers": "awd_lstm",
    "load_text": "text",
}

__all__ = [
    "LR_SCALINGS",
    "BuildOptions",
    "build_workload",
    "check_workload",
    "preset_names",
    "workload_names",
    *sorted(_HOME),
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'avgpipe.workloads' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"avgpipe.workloads.{_HOME[name]}"), name)
    globals()[name] = value
    return value
