"""Places in this process where a fault may be injected; ``avgpipe.testing`` arms the faults.

A place is a line of code, such as ``at("save", rank=0)``. While nothing is armed it does nothing; fast loops
check whether something is ``armed`` before they begin.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

VARIABLE = "AVGPIPE_FAULTS"  # name of the variable with the faults of processes to start, as JSON
RESTART = "AVGPIPE_RESTART"  # name of the variable that counts how often a process was restarted


class Probe(Protocol):
    """An armed fault."""

    def reach(self, phase: str, place: Mapping[str, Any]) -> Any:
        """Let a due fault happen at a place; return it if the place itself must act on it, else None."""


armed: list[Probe] = []


def at(phase: str, **place: Any) -> list[Any]:
    """Let the faults happen that are armed for this place; return those on which the place itself must act.

    Args:
        phase: One of ``avgpipe.faults.fault.PHASES``.
        place: The names of that table, as far as they are known here; a collection where the process has
            several, such as the stages that it holds. The rank is that of the environment unless it is given.
    """
    return [found for one in tuple(armed) if (found := one.reach(phase, place)) is not None]


if VARIABLE in os.environ:
    importlib.import_module("avgpipe.faults").arm(os.environ[VARIABLE])
