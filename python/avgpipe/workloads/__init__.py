"""Models of the papers with their data: what ``avgpipe train`` trains. torch is imported when one is built."""

from avgpipe.workloads.workload import (
    LR_SCALINGS,
    BuildOptions,
    DataNotFound,
    LibraryNotFound,
    Workload,
    build_workload,
    check_workload,
    workload_names,
)

__all__ = [
    "LR_SCALINGS",
    "BuildOptions",
    "DataNotFound",
    "LibraryNotFound",
    "Workload",
    "build_workload",
    "check_workload",
    "workload_names",
]
