import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.timeline import Event, Timeline
from avgpipe.timeline.explain import Cause, critical_path, with_waits


def event(stage, m, kind, start_s, end_s, detail=""):
    return Event(stage, 0, 0, m, kind, start_s, end_s, detail)


def test_the_chain_follows_messages_to_their_senders():
    """Stage 1 waits 1 s for stage 0 and 2 s for the wire; stage 0 waits for the gradient and its wire."""
    timeline = Timeline(
        2,
        (
            event(0, 0, "host", 0, 1, "loader"),
            event(0, 0, "F", 1, 3),
            event(0, 0, "send", 3, 3.5),
            event(0, 0, "recv", 4, 11, "B"),
            event(0, 0, "B", 11, 14),
            event(1, 0, "recv", 2, 5, "F"),
            event(1, 0, "F", 5, 6),
            event(1, 0, "B", 6.5, 9),
        ),
    )
    assert critical_path(timeline) == {
        Cause("B", 0): 3,
        Cause("transfer", 0, "B"): 2,  # 9 to 11
        Cause("B", 1): 2.5,
        Cause("runtime", 1): 0.5,
        Cause("F", 1): 1,
        Cause("transfer", 1, "F"): 2,  # 3 to 5
        Cause("F", 0): 2,
        Cause("host", 0, "loader"): 1,
    }


def test_what_was_on_its_way_before_the_wait_leaves_the_chain_with_the_receiver():
    timeline = Timeline(
        2,
        (
            event(0, 0, "F", 0, 1),
            event(0, 1, "F", 1, 2),
            event(1, 0, "recv", 0, 2, "F"),
            event(1, 0, "F", 2, 5),
            event(1, 1, "recv", 5, 6, "F"),
            event(1, 1, "F", 6, 7),
        ),
    )
    path = critical_path(timeline)
    assert path[Cause("transfer", 1, "F")] == 1 + 1
    assert path[Cause("F", 1)] == 4
    assert path[Cause("F", 0)] == 1


def test_waits_without_a_known_sender_stay_with_the_worker():
    timeline = Timeline(
        1, (event(0, 0, "F", 0, 1), event(0, None, "recv", 1, 4, "U"), event(0, 0, "U", 4, 5))
    )
    assert critical_path(timeline)[Cause("recv", 0, "U")] == 3


def test_clocks_that_differ_a_little_do_not_break_the_chain():
    skewed = Timeline(2, (event(0, 0, "F", 1, 9), event(1, 0, "recv", 0, 8, "F"), event(1, 0, "F", 8, 10)))
    path = critical_path(skewed)
    assert (path[Cause("F", 0)], path[Cause("F", 1)]) == (7, 2)
    wrong = Timeline(2, (event(0, 0, "F", 8, 9), event(1, 0, "recv", 0, 8, "F"), event(1, 0, "F", 8, 10)))
    assert critical_path(wrong) == {Cause("F", 1): 2, Cause("recv", 1, "F"): 8}


def test_no_events_have_no_chain():
    assert critical_path(Timeline(2, ())) == {}


rows = st.builds(
    lambda k, i, m, kind, a, n, detail: Event(k, i, 0, m, kind, a, a + n, detail),
    st.integers(0, 2), st.integers(0, 1), st.integers(0, 2),
    st.sampled_from(["F", "B", "U", "send", "recv", "recv", "host", "mending"]),
    st.floats(0, 10), st.floats(0, 3), st.sampled_from(["", "F", "B", "U"]),
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=25))
def test_whatever_happened_the_chain_is_as_long_as_the_run(events):
    timeline = Timeline(3, tuple(events))
    path = critical_path(timeline)
    assert math.fsum(path.values()) == pytest.approx(timeline.makespan_s, abs=1e-9)
    assert all(seconds >= 0 for seconds in path.values())


def test_a_simulated_timeline_waits_where_it_does_not_compute():
    timeline = Timeline(2, (event(0, 0, "F", 1, 2), event(0, 0, "B", 6, 8), event(1, 0, "F", 3, 4),
                            event(1, 0, "B", 4, 5), event(0, 0, "send", 2, 3)))  # fmt: skip
    filled = with_waits(timeline)
    assert filled.events[:5] == timeline.events
    assert filled.events[5:] == (event(0, 0, "recv", 2, 6, "B"), event(1, 0, "recv", 1, 3, "F"))


def test_a_measured_timeline_is_left_alone():
    for kind in ("recv", "host"):
        timeline = Timeline(2, (event(0, 0, "F", 0, 1), event(1, 0, "F", 2, 3), event(1, 0, kind, 1, 2)))
        assert with_waits(timeline) is timeline
    alone = Timeline(1, (event(0, 0, "F", 0, 1), event(0, 0, "F", 2, 3)))
    assert with_waits(alone) is alone
