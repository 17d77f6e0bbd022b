"""Timelines as pages, and in notebooks."""

from __future__ import annotations

import re
from itertools import accumulate

import pytest

from avgpipe.planning import Costs, simulate
from avgpipe.schedule import build_schedule
from avgpipe.timeline import Event, Timeline
from avgpipe.timeline.html import time_bars, timeline_data
from tests.lab.pages.folders import timeline

EMPTY = Timeline(2, ())


def starts(data):
    return list(accumulate(data["events"]["start"]))


def test_events_are_columns_of_microseconds():
    t = Timeline(2, (Event(1, 0, 3, 1, "F", 10.5, 10.75), Event(0, 1, 3, None, "U", 10.0, 10.25)))
    data = timeline_data(t, 10)
    assert starts(data) == [0, 500_000]
    assert data["events"]["took"] == [250_000, 250_000]
    assert [data["events"][name] for name in ("row", "pipeline", "batch", "micro_batch")] == [
        [0, 1],
        [1, 0],
        [3, 3],
        [None, 1],
    ]
    assert [look["word"] for look in data["looks"]] == ["update", "forward"]
    assert (data["end"], data["full_from"], data["events"]["stage"]) == (750_000, 0, None)


def test_of_many_events_the_last_are_kept_and_the_strip_has_all():
    t = timeline(50)
    data = timeline_data(t, 100)
    assert len(data["events"]["took"]) == 100
    assert data["full_from"] == starts(data)[0] > 0.9 * data["end"]
    assert len(data["busy"]) == 2
    whole = [sum(row) / len(row) / 100 for row in data["busy"]]
    assert whole == pytest.approx(t.worker_busy_fraction, abs=0.01)


def test_work_that_overlaps_is_busy_once():
    t = Timeline(1, (Event(0, 0, 0, 0, "F", 0.0, 4.0), Event(0, 1, 0, 0, "F", 1.0, 2.0)))
    assert set(timeline_data(t, 10)["busy"][0]) == {100}


def test_workers_with_several_stages_say_which():
    t = Timeline(1, (Event(3, 0, 0, 0, "F", 0.0, 1.0, worker=0),), labels=("worker 0: stages 0, 3",))
    data = timeline_data(t, 10)
    assert data["events"]["stage"] == [3]
    assert data["rows"] == ["worker 0: stages 0, 3"]


def test_a_view_of_the_last_batches_lies_within_the_record():
    data = timeline_data(timeline(50), 10_000)
    begin, end = data["view"]
    assert 0 < begin < end <= data["end"]


def test_shares_of_a_workers_time_add_up_to_the_whole():
    bars = time_bars({"a": timeline(4), "b": timeline(2)}, {"a": 0, "b": 2})
    assert bars.rows == ("a: stage 0", "a: stage 1", "b: stage 0", "b: stage 1")
    assert bars.runs == (0, 0, 2, 2)
    assert [sum(values[n] for values in bars.parts.values()) for n in range(4)] == pytest.approx([1.0] * 4)
    assert bars.parts["waiting for an activation"][1] > 0


def test_a_simulated_timeline_waits_where_it_does_not_compute():
    t = simulate(build_schedule("1f1b", stages=2, micro_batches=4), Costs([1.0, 1.0], [2.0, 2.0]))
    parts = time_bars({"t": t}, {"t": 0}).parts
    assert parts["waiting for an activation"][1] > 0


@pytest.mark.parametrize("t", [timeline(3), EMPTY], ids=["some", "none"])
def test_a_page_needs_no_network(t, tmp_path):
    pytest.importorskip("plotly", reason="pip install 'avgpipe[report]'")
    t.to_html(tmp_path / "t.html")
    page = (tmp_path / "t.html").read_text()
    assert "default-src &#39;none&#39;" in page
    body = page.partition("<body>")[2].partition('<script type="application/json"')[0]
    assert not re.search(r"""(src|href|action)\s*=|url\(""", page.partition("<body>")[0] + body)


# ---- notebooks -------------------------------------------------------------------------------------------------------


def test_a_repr_is_one_line():
    assert repr(timeline(1)) == "Timeline(stages=2, events=40, makespan_s=0.04)"
    assert repr(Timeline(1, (), labels=("replica 0",))) == "Timeline(workers=1, events=0, makespan_s=0)"


@pytest.mark.parametrize("t", [timeline(3), EMPTY], ids=["some", "none"])
def test_notebooks_show_a_picture(t):
    assert t._repr_png_().startswith(b"\x89PNG")
