"""What the engine did, in the words of the tests."""

from avgpipe.planning.engine import KINDS, compile_schedule, run
from avgpipe.schedule import Action
from tests.planning.reference import Ran


def outcome_of(schedule, costs, pipelines, batches):
    return run(compile_schedule(schedule, costs), pipelines, batches, events=True)


def actions_of(outcome):
    """Its records as the reference has them, in the order of their starts."""
    return [
        Ran(w, k, j, Action(KINDS[kind], None if KINDS[kind] == "U" else m), start, end)
        for start, end, w, k, j, m, kind in outcome.records.tolist()
    ]
