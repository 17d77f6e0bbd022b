"""Runs a script on one of several ranks with the same random numbers on all of them.

``python -m avgpipe.ranks.seeded SEED SCRIPT ARGS...`` seeds torch, random and NumPy, unless SEED is -1, then runs
SCRIPT as ``python SCRIPT ARGS...`` does. SIGUSR1 prints what all threads are doing, and ends nothing.
"""

from __future__ import annotations

import faulthandler
import os
import random
import runpy
import signal
import sys
from types import TracebackType
from typing import Any

from avgpipe.ranks.process import report_lost_peers


def seed_generators(seed: int) -> None:
    """Seed the generators that a script may use. ``seed``: from 0 to below 2**32."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    seed, script, *args = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, file=2)
    report_lost_peers()  # before torch is imported, and the hook that shortens what the script shows
    if int(seed) >= 0:
        seed_generators(int(seed))
    sys.argv, sys.path[0] = [script, *args], os.path.dirname(os.path.abspath(script))
    _show_from(script)
    runpy.run_path(script, run_name="__main__")


def _show_from(script: str) -> None:
    """Make the traceback of an uncaught error begin with the script, as in a plain run."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        found = trace
        while found is not None and found.tb_frame.f_code.co_filename != script:
            found = found.tb_next
        before(kind, error.with_traceback(found or trace), found or trace)

    sys.excepthook = show


if __name__ == "__main__":
    main()
