"""advance="auto": a pipeline measures its first batches, and chooses how many forwards run ahead."""

from __future__ import annotations

import sys
from dataclasses import replace

from avgpipe.measure.running import measured_costs
from avgpipe.planning import AdvanceChoice, choose_advance
from avgpipe.runtime.session import Session

_MEASURED_BATCHES = 4  # per pipeline, the first of which is left out


class AutoAdvance:
    """Chooses the advance once, after the first batches; all ranks make the same choice.

    Args:
        memory_limit_bytes: Memory of a worker; None: no limit.

    Attributes:
        choice: The choice; None before it.
    """

    def __init__(self, memory_limit_bytes: int | None) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self.choice: AdvanceChoice | None = None

    def look(self, session: Session) -> None:
        """Make the choice, once enough batches are measured."""
        plan = session.spec.running
        if self.choice is not None or session.feed.begun < _MEASURED_BATCHES * plan.batches_per_round:
            return
        with session.idle():
            costs = measured_costs(session.worker)
        self.choice = choose_advance(
            plan.stages,
            plan.micro_batches_each,
            costs,
            pipelines=plan.pipelines,
            memory_limit_bytes=self._memory_limit_bytes,
        )
        session.worker.follow(replace(plan, advance=self.choice.advance).build_schedule())
        if session.world.rank == 0:
            print(f"avgpipe: {self.choice}", file=sys.stderr)
