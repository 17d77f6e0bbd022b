import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.timeline import Event, Timeline


def event(stage, start_s, end_s, kind="F", detail=""):
    return Event(stage, 0, 0, 0, kind, start_s, end_s, detail)


def total_s(row):
    parts = (*row.compute_s.values(), *row.recv_s.values(), *row.host_s.values())
    return math.fsum((*parts, row.send_s, row.other_s, row.outside_s))


def test_every_second_of_a_worker_has_its_kind():
    timeline = Timeline(
        2,
        (
            event(0, 10, 11, "host", "loader"),
            event(0, 11, 13),
            event(0, 13, 13.5, "send"),
            event(0, 14, 18, "recv", "B"),
            event(0, 18, 19, "B"),
            event(0, 19, 20, "U"),
            event(1, 10.5, 13.5, "recv", "F"),
            event(1, 13.5, 15, "F"),
            event(1, 15, 16, "average"),
            event(1, 16, 17, "recv"),
            event(1, 17, 18, "mending"),
            event(1, 18, 19, "host", "caller"),
        ),
    )
    first, second = timeline.breakdown()
    assert (first.stage, first.compute_s) == (0, {"F": 2, "B": 1, "U": 1})
    assert (first.send_s, first.recv_s, first.host_s) == (0.5, {"B": 4}, {"loader": 1})
    assert (first.other_s, first.outside_s, first.busy_s, total_s(first)) == (0.5, 0, 4, 10)
    assert (second.compute_s, second.send_s) == ({"F": 1.5, "average": 1}, 0)
    assert (second.recv_s, second.host_s) == ({"": 1, "F": 3}, {"caller": 1})
    assert (second.other_s, second.outside_s, total_s(second)) == (1, 1.5, 10)


def test_of_what_overlaps_the_first_in_the_stated_order_has_the_moment():
    order = ["F", "B", "I", "W", "U", "average", "host", "recv", "send", "mending"]
    # The n-th kind lasts until n + 1, all begin at once: each has one second for itself.
    timeline = Timeline(1, tuple(event(0, 0, n + 1, kind) for n, kind in reversed(list(enumerate(order)))))
    (row,) = timeline.breakdown()
    assert row.compute_s == {"F": 1, "B": 1, "I": 1, "W": 1, "U": 1, "average": 1}
    assert (row.host_s, row.recv_s, row.send_s, row.other_s) == ({"": 1}, {"": 1}, 1, 1)


def test_a_stage_without_events_is_outside_all_the_time():
    rows = Timeline(2, (event(1, 3, 5),)).breakdown()
    assert (rows[0].outside_s, rows[0].busy_s, total_s(rows[0])) == (2, 0, 2)
    assert [total_s(row) for row in Timeline(2, ()).breakdown()] == [0, 0]


kinds = st.sampled_from(["F", "B", "U", "average", "send", "recv", "host", "mending"])
spans = st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 10), kinds)


@given(st.lists(spans, max_size=15))
def test_every_moment_counts_once(spans):
    timeline = Timeline(2, tuple(event(k, a, a + n, kind) for k, a, n, kind in spans))
    order = ["F", "B", "U", "average", "host", "recv", "send", "mending"]
    for row in timeline.breakdown():
        own = [span for span in spans if span[0] == row.stage]
        winners = []
        for t in range(41):
            here = [order.index(kind) for _, a, n, kind in own if a <= t < a + n]
            winners += [order[min(here)]] if here else []
        found = {kind: row.compute_s.get(kind, 0) for kind in order[:4]}
        found |= {"host": row.host_s.get("", 0), "recv": row.recv_s.get("", 0), "send": row.send_s}
        assert found == {kind: winners.count(kind) for kind in found}
        assert total_s(row) == timeline.makespan_s
        assert row.busy_s == timeline.busy_s[row.stage]


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), kinds), min_size=1, max_size=15))
def test_the_parts_add_up_to_the_makespan(spans):
    timeline = Timeline(1, tuple(event(0, a, a + n, kind) for a, n, kind in spans))
    (row,) = timeline.breakdown()
    assert total_s(row) == pytest.approx(timeline.makespan_s, abs=1e-9)
    assert min(row.other_s, row.outside_s) >= 0
    assert math.isclose(row.busy_s, timeline.busy_s[0], abs_tol=1e-9)
