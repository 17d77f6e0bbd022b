"""Compiled code that is no tensor operator (csrc/bindings.cpp); it needs no torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_Integers = NDArray[np.int64]

def simulate(
    *, events: bool, **fields: Any
) -> tuple[int, _Integers, _Integers, _Integers, NDArray[np.float64], int, NDArray[Any] | None]:
    """Run a schedule on paper. The fields are those of Question in csrc/simulate/question.h.

    Returns the makespan, busy ticks per worker, ticks at the end of each batch, micro-batches in flight at most per
    stage and bytes held at most per worker, how many actions ran, and with ``events`` their records.

    Raises:
        ValueError: the schedule gets stuck, or an array has another size than it should.
        OverflowError: the times are too long to count.
        MemoryError: it does not fit into memory.
        TypeError: a field is missing, unknown, or an array of another dtype.
    """
