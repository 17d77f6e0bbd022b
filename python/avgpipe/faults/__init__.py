"""Faults that tests have armed in this process, and how the library asks for them; ``avgpipe.testing`` arms them.

A place where something may fail is a line of code, as ``at("save", rank=0)``. While nothing is armed it does nothing;
loops that have no time look whether something is ``armed`` before they begin.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe.faults.fault import Armed, Fault

VARIABLE = "AVGPIPE_FAULTS"  # names the variable with the faults of processes that are yet to start, as JSON
RESTART = "AVGPIPE_RESTART"  # names that which says how often a process has been started again
armed: list[Armed] = []


def at(phase: str, **place: Any) -> list[Fault]:
    """Let happen what is armed for this place; return the faults of which the place itself must do something.

    Args:
        phase: One of ``avgpipe.faults.fault.PHASES``.
        place: What that table names, as far as it is known here; a collection where the process is several things, as
            the stages that it holds. The rank is that of the environment unless it is given.
    """
    if not armed:
        return []
    from avgpipe.faults.kinds import happen

    environment = os.environ.get
    ranks = {
        "rank": int(environment("RANK", "0")),
        "restart": int(environment(RESTART, environment("TORCHELASTIC_RESTART_COUNT", "0"))),
    }
    here = {**ranks, **place}
    return [one.fault for one in tuple(armed) if one.is_due(phase, here) and happen(one.fault, phase, here)]


if VARIABLE in os.environ:
    from avgpipe.faults.fault import armed_by

    armed += armed_by(os.environ[VARIABLE])
