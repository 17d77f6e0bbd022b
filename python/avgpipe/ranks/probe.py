"""Places where something may be made to fail in this process; ``avgpipe.testing`` arms what is to fail.

A place is a line of code, as ``at("save", rank=0)``. While nothing is armed it does nothing; loops that have no time
look whether something is ``armed`` before they begin.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

VARIABLE = "AVGPIPE_FAULTS"  # names the variable with the faults of processes that are yet to start, as JSON
RESTART = "AVGPIPE_RESTART"  # names that which says how often a process has been started again


class Probe(Protocol):
    """Something that is armed."""

    def reach(self, phase: str, place: Mapping[str, Any]) -> Any:
        """Let happen what is due at a place; return what the place itself must do something about, else None."""


armed: list[Probe] = []


def at(phase: str, **place: Any) -> list[Any]:
    """Let happen what is armed for this place; return the faults of which the place itself must do something.

    Args:
        phase: One of ``avgpipe.faults.fault.PHASES``.
        place: What that table names, as far as it is known here; a collection where the process is several things, as
            the stages that it holds. The rank is that of the environment unless it is given.
    """
    return [found for one in tuple(armed) if (found := one.reach(phase, place)) is not None]


if VARIABLE in os.environ:
    importlib.import_module("avgpipe.faults").arm(os.environ[VARIABLE])
