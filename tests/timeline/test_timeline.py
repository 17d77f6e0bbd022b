import dataclasses
import itertools
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.timeline import COMPUTE_KINDS, Event, EventKind, Timeline
from avgpipe.timeline.timeline import occupations


def event(stage, start_s, end_s, kind="F", pipeline=0, batch=0, micro_batch=0):
    return Event(stage, pipeline, batch, micro_batch, kind, start_s, end_s)


def test_busy_bubble_and_makespan_of_two_stages():
    timeline = Timeline(
        2, (event(0, 10, 11), event(0, 13, 14, "B"), event(1, 11, 13, "B"), event(1, 10, 11, "recv"))
    )
    assert timeline.makespan_s == 4
    assert timeline.busy_s == [2, 2]
    assert timeline.worker_busy_fraction == [0.5, 0.5]
    assert timeline.bubble_fraction == 0.5


def test_only_computing_is_busy():
    kinds = [*sorted(COMPUTE_KINDS), "recv", "send", "host", "other"]
    timeline = Timeline(1, tuple(event(0, i, i + 1, kind) for i, kind in enumerate(kinds)))
    assert timeline.busy_s == [len(COMPUTE_KINDS)] == [7]
    assert timeline.makespan_s == 11


def test_overlapping_work_counts_once():
    timeline = Timeline(1, (event(0, 2, 3), event(0, 0, 4, pipeline=1), event(0, 3, 6), event(0, 8, 9)))
    assert timeline.busy_s == [7]
    assert timeline.bubble_fraction == pytest.approx(2 / 9)


def test_no_events_and_events_without_length_give_zeros():
    empty = Timeline(3, ())
    assert (empty.makespan_s, empty.busy_s, empty.bubble_fraction) == (0.0, [0.0] * 3, 0.0)
    assert empty.worker_busy_fraction == [0.0] * 3
    instant = Timeline(1, (event(0, 5, 5),))
    assert (instant.makespan_s, instant.bubble_fraction) == (0.0, 0.0)


spans = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 10)), max_size=15)


@given(spans, st.randoms(use_true_random=False))
def test_busy_time_is_the_number_of_moments_with_work_whatever_the_order(spans, rnd):
    events = [event(stage, start, start + length) for stage, start, length in spans]
    rnd.shuffle(events)
    moments = [
        {t for s, start, length in spans if s == stage for t in range(start, start + length)}
        for stage in (0, 1)
    ]
    timeline = Timeline(2, tuple(events))
    assert timeline.busy_s == [len(stage) for stage in moments]
    assert 0.0 <= timeline.bubble_fraction <= 1.0


def test_a_fully_busy_run_has_no_negative_bubble():
    rnd = random.Random(0)
    times = [0.0]
    for _ in range(1000):
        times.append(times[-1] + rnd.random())
    timeline = Timeline(1, tuple(event(0, a, b) for a, b in itertools.pairwise(times)))
    assert 0.0 <= timeline.bubble_fraction < 1e-12


def test_window_selects_batches_and_keeps_their_times():
    timeline = Timeline(1, tuple(event(0, j, j + 1, batch=j) for j in range(5)), [7])
    inner = timeline.window(1, 3)
    assert [e.batch for e in inner.events] == [1, 2, 3]
    assert inner.events[0] == timeline.events[1]
    assert inner.peak_memory_bytes == (7,)
    assert timeline.window(9, 10).events == ()


def test_a_timeline_is_a_frozen_value():
    timeline = Timeline(1, [event(0, 0, 1)], (5,))
    assert timeline == Timeline(1, (event(0, 0, 1),), [5])
    assert timeline.peak_memory_bytes == (5,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timeline.stages = 2


@pytest.mark.parametrize(
    ("stages", "events", "memory", "message"),
    [
        (0, (), None, "stages=0: must be an int of at least 1"),
        (2, (event(2, 0, 1),), None, r"events\[0\]=.*: stage must be 0..1"),
        (2, (event(0, 0, 1), event(-1, 0, 1)), None, r"events\[1\]=.*: stage must be 0..1"),
        (1, (event(0, 2, 1),), None, r"events\[0\]=.*not before it starts"),
        (1, (event(0, 0, float("nan")),), None, r"events\[0\]=.*finite"),
        (1, (event(0, 0, float("inf")),), None, r"events\[0\]=.*finite"),
        (2, (), [1], r"peak_memory_bytes=\(1,\): give one per stage, 2"),
    ],
)
def test_what_cannot_be_a_timeline_is_refused(stages, events, memory, message):
    with pytest.raises(ValueError, match=message):
        Timeline(stages, events, memory)


def test_an_event_prints_as_its_action():
    assert str(event(0, 0, 1, "B", micro_batch=3)) == "B3"
    assert str(event(0, 0, 1, "U", micro_batch=None)) == "U"
    assert event(0, 0, 1).detail == ""


def test_printed_form_is_a_short_table():
    events = (
        event(0, 0, 0.010),
        event(0, 0.010, 0.040, "B"),
        event(1, 0, 0.02, "recv"),
        event(1, 0.02, 0.03, batch=1),
    )
    assert str(Timeline(2, events, [2**20, 3 * 2**19])).splitlines() == [
        "timeline: 2 stages, 1 pipelines, 2 batches, 4 events, 0.040 s, bubbles 37.5 %",
        "stage     busy    busy s    recv s      F ms      B ms  peak MiB",
        "    0  100.0 %     0.040     0.000    10.000    30.000       1.0",
        "    1   25.0 %     0.010     0.020    10.000         -       1.5",
    ]
    assert str(Timeline(1, ())).splitlines()[-1].split() == ["0", "0.0", "%", "0.000", "0.000", "-", "-", "-"]


def test_rows_may_be_labelled(tmp_path):
    event = Event(3, 0, 0, 0, "F", 0.0, 1.0, worker=1)
    timeline = Timeline(2, (event,), labels=("worker 0", "worker 1"))
    timeline.to_chrome_trace(tmp_path / "t.json")
    again = Timeline.from_chrome_trace(tmp_path / "t.json")
    assert again == timeline
    assert again.window(0, 0).labels == timeline.labels
    assert again.label(1) == "worker 1"
    assert Timeline(2, ()).label(1) == "stage 1"
    figure = timeline.plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["worker 0", "worker 1"]
    with pytest.raises(ValueError, match="give one per stage, 2"):
        Timeline(2, (), labels=("one",))


def test_kinds_are_words_with_the_values_of_events():
    assert EventKind("recv") is EventKind.RECEIVE
    assert Event(0, 0, 0, 0, EventKind.FORWARD, 0.0, 1.0) == event(0, 0.0, 1.0, "F")
    assert str(Event(0, 0, 0, 2, EventKind.BACKWARD, 0.0, 1.0)) == "B2"
    assert {"F", "average"} <= COMPUTE_KINDS


def test_a_worker_has_what_its_events_name():
    timeline = Timeline(2, (Event(0, 0, 0, 0, "F", 0.0, 1.0), Event(2, 0, 0, 0, "F", 1.0, 3.0, worker=0)))
    assert timeline.busy_s == [3.0, 0.0]
    assert timeline.events[1]._replace(batch=7).worker == 0
    assert pickle.loads(pickle.dumps(timeline)) == timeline
    with pytest.raises(ValueError, match=r"events\[0\]=.*: worker must be 0..1"):
        Timeline(2, (Event(0, 0, 0, 0, "F", 0.0, 1.0, worker=2),))


def test_an_action_occupies_its_worker_until_what_follows_it_is_done():
    events = [
        Event(2, 0, 0, 0, "F", 0.0, 1.0, worker=0),
        Event(2, 0, 0, 0, "send", 1.0, 1.5, worker=0),
        Event(1, 0, 0, 0, "B", 0.0, 2.0),
        Event(0, 0, 0, 0, "recv", 2.0, 5.0, "B", worker=1),
    ]
    forward, _, backward, _ = events
    assert occupations(events, ("send",)) == [forward._replace(end_s=1.5), backward]
