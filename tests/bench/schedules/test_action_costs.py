"""What actions took, from a timeline."""

import pytest

from avgpipe.bench.schedules.action_costs import action_costs
from avgpipe.timeline.timeline import Event, Timeline


def made(*rows, workers=1):
    """Rows of worker, batch, kind, start, end, and perhaps detail and stage."""
    return Timeline(workers, tuple(event(*row) for row in rows))


def event(worker, batch, kind, start_s, end_s, detail="", stage=None):
    return Event(worker if stage is None else stage, 0, batch, 0, kind, start_s, end_s, detail, worker)


def test_what_a_worker_does_after_an_action_belongs_to_it():
    timeline = made(
        (0, 0, "F", 0.0, 9.0),
        (0, 1, "F", 10.0, 11.0),
        (0, 1, "send", 11.0, 11.5),
        (0, 1, "recv", 11.5, 20.0, "B"),
        (0, 1, "B", 20.0, 22.0),
        (0, 1, "host", 22.0, 22.25),
        (0, 2, "F", 23.0, 25.0),
        (0, 2, "host", 25.0, 25.5, "loader"),
    )
    assert action_costs(timeline, 1, first_batch=1) == {"F": [2.0], "B": [2.25]}


def test_a_worker_may_have_several_stages():
    timeline = made(
        (0, 0, "F", 0.0, 1.0, "", 0),
        (0, 0, "F", 1.0, 3.0, "", 2),
        (1, 0, "F", 0.0, 4.0, "", 1),
        (1, 0, "U", 4.0, 4.5, "", 1),
        workers=2,
    )
    assert action_costs(timeline, 3) == {"F": [1.0, 4.0, 2.0], "U": [0.0, 0.5, 0.0]}


def test_of_replicas_it_is_the_mean():
    timeline = made((0, 0, "F", 0.0, 1.0, "", 0), (1, 0, "F", 0.0, 2.0, "", 0), workers=2)
    assert action_costs(timeline, 1)["F"] == pytest.approx([1.5])
