"""What the engine did, in the words of the tests."""

from avgpipe.schedule import Action
from avgpipe.simulation.engine import run
from avgpipe.simulation.native import KINDS
from avgpipe.simulation.program import compile_schedule
from tests.simulation.reference import Ran


def outcome_of(schedule, costs, pipelines, batches):
    return run(compile_schedule(schedule, costs), pipelines, batches, events=True)


def actions_of(outcome):
    """Its records as the reference has them, in the order of their starts."""
    return [
        Ran(int(k), int(j), Action(KINDS[kind], None if KINDS[kind] == "U" else int(m)), int(start), int(end))
        for start, end, k, j, m, kind in outcome.records.tolist()
    ]
