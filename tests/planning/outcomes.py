"""What the engine did, in the words of the tests."""

from avgpipe.planning.engine import run
from avgpipe.planning.native import KINDS
from avgpipe.planning.program import compile_schedule
from avgpipe.schedule import Action
from tests.planning.reference import Ran


def outcome_of(schedule, costs, pipelines, batches):
    return run(compile_schedule(schedule, costs), pipelines, batches, events=True)


def actions_of(outcome):
    """Its records as the reference has them, in the order of their starts."""
    return [
        Ran(int(k), int(j), Action(KINDS[kind], None if KINDS[kind] == "U" else int(m)), int(start), int(end))
        for start, end, k, j, m, kind in outcome.records.tolist()
    ]
