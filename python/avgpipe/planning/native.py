"""Loads avgpipe_ext/libsimulate.so, which needs neither torch nor Python; its structs are those of
csrc/simulate/question.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TICKS_PER_S = 10**12
LONGEST_STEP = 2**58  # ticks

RECORD = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("stage", np.int32),
        ("batch", np.int32),
        ("micro_batch", np.int32),
        ("kind", np.int32),
    ]
)
KINDS = "FBIWU"  # by their numbers

_LAYOUT = 1  # of the structs below
_DONE, _STUCK, _TOO_LONG, _NO_MEMORY = range(4)
_int, _pointer = ctypes.c_int64, ctypes.c_void_p


class Question(ctypes.Structure):
    """What a simulation is asked. Pointers are to arrays that the caller keeps."""

    _fields_ = (
        *((name, _int) for name in ("stages", "workers", "micro_batches", "pipelines", "batches", "flush")),
        *((name, _pointer) for name in ("warm_ups", "column_begin", "kinds", "micro_batch", "ranks")),
        *((name, _pointer) for name in ("worker", "action_ticks", "action_begin", "action_widths")),
        *((name, _pointer) for name in ("sum_ticks", "transfer_ticks")),
        ("transfer_width", _int),
        *((name, _pointer) for name in ("latency_ticks", "channel")),
        *((name, _int) for name in ("channels", "shared_channels")),
        ("held_bytes", _pointer),
        ("slots", _int),
        ("rates", _pointer),
        ("seed", ctypes.c_uint64),
        ("jitter", _int),
        ("straggler_threshold", ctypes.c_uint64),
        ("straggler_factor", _int),
    )


class Answer(ctypes.Structure):
    """What a simulation answers, partly in the caller's arrays."""

    _fields_ = (
        ("makespan", _int),
        *((name, _pointer) for name in ("busy", "batch_end", "peak_in_flight", "peak_held_bytes", "records")),
        ("count", _int),
    )


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def path() -> Path:
    """Where the library belongs, whether it is there or not."""
    package = find_spec("avgpipe_ext")  # found, not imported: importing it takes torch
    if package is None or package.origin is None:
        raise ImportError(
            "avgpipe_ext, which holds the simulation engine, is not installed: "
            "run `pip install --no-build-isolation -e .` in the folder of setup.py"
        )
    return Path(package.origin).parent / "libsimulate.so"


@cache
def _library() -> ctypes.CDLL:
    place = path()
    build = "build it with `pip install --no-build-isolation -e .` in the folder of setup.py"
    if not place.exists():
        raise ImportError(f"{place} is missing: {build}")
    try:
        library = ctypes.CDLL(str(place))
    except OSError as error:
        raise ImportError(f"{place} cannot be loaded ({error}): {build}") from None
    if library.avgpipe_simulate_layout() != _LAYOUT:
        raise ImportError(f"{place} is of another version of avgpipe: {build}")
    library.avgpipe_simulate.argtypes = [ctypes.POINTER(Question), ctypes.POINTER(Answer)]
    library.avgpipe_simulate.restype = ctypes.c_int32
    return library


def simulate(question: Question, answer: Answer) -> None:
    """Fill the answer. Gives up the GIL meanwhile.

    Raises ImportError where the library is not built, ValueError for a schedule that gets stuck and for times that are
    too long to count, MemoryError.
    """
    status = _library().avgpipe_simulate(ctypes.byref(question), ctypes.byref(answer))
    if status == _STUCK:
        raise ValueError("the schedule gets stuck: call Schedule.validate() to see where")
    if status == _TOO_LONG:
        raise too_long()
    if status == _NO_MEMORY:
        raise MemoryError("the simulation does not fit into memory: use fewer stages or micro-batches")
    assert status == _DONE


def too_long() -> ValueError:
    return ValueError(
        f"the costs are too long to simulate: a single one must be below {LONGEST_STEP / TICKS_PER_S:.0f} s, a run "
        f"below {16 * LONGEST_STEP / TICKS_PER_S:.0f} s; costs are in seconds"
    )
