import itertools
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.timeline import Event, Timeline
from tests.patience import limit


def slices(path):
    return [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"]


def names(path, what):
    rows = json.loads(path.read_text())["traceEvents"]
    return {(row["pid"], row.get("tid")): row["args"]["name"] for row in rows if row["name"] == what}


def arrows(path):
    """Each arrow's ends, as the rows of its begin and its end."""
    found = {}
    for row in json.loads(path.read_text())["traceEvents"]:
        if row["ph"] in "sf":
            assert found.setdefault(row["id"], {}).setdefault(row["ph"], row) is row
    return [(arrow["s"], arrow["f"]) for arrow in found.values()]


SMALL = Timeline(
    2,
    (
        Event(0, 0, 4, 3, "F", 1.0, 1.5),
        Event(0, 1, 5, 0, "B", 1.5, 1.75),
        Event(1, 0, 4, None, "U", 1.5, 1.5),
        Event(1, 0, 4, 3, "recv", 1.0, 1.5, "F"),
        Event(1, 0, 5, None, "host", 1.5, 2.5, "loader"),
    ),
    [100, 200],
)


def test_a_stage_is_a_process_and_a_pipeline_a_thread(tmp_path):
    path = tmp_path / "trace.json"
    SMALL.to_chrome_trace(path)
    assert names(path, "process_name") == {(1, None): "stage 0", (2, None): "stage 1"}
    assert names(path, "thread_name") == {
        (1, 1): "pipeline 0", (1, 2): "pipeline 1", (2, 1): "pipeline 0", (2, 3): "waiting", (2, 4): "host",
    }  # fmt: skip
    assert slices(path)[0] == {
        "ph": "X", "name": "F3", "cat": "F", "pid": 1, "tid": 1, "ts": 1e6, "dur": 5e5,
        "args": {"stage": 0, "pipeline": 0, "batch": 4, "micro_batch": 3},
    }  # fmt: skip
    assert slices(path)[3] == {
        "ph": "X", "name": "recv F3", "cat": "recv", "pid": 2, "tid": 3, "ts": 1e6, "dur": 5e5,
        "args": {"stage": 1, "pipeline": 0, "batch": 4, "micro_batch": 3, "detail": "F"},
    }  # fmt: skip
    assert [row["name"] for row in slices(path)] == ["F3", "B0", "U", "recv F3", "host loader"]
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("timeline", [SMALL, Timeline(3, ()), Timeline(1, (), [5])])
def test_round_trip(tmp_path, timeline):
    timeline.to_chrome_trace(tmp_path / "trace.json")
    assert Timeline.from_chrome_trace(tmp_path / "trace.json") == timeline


events = st.builds(
    lambda start, length, **rest: Event(start_s=start, end_s=start + length, **rest),
    stage=st.integers(0, 2),
    pipeline=st.integers(0, 3),
    batch=st.integers(-1, 10**6),
    micro_batch=st.none() | st.integers(0, 99),
    kind=st.sampled_from(["F", "B", "I", "W", "U", "recv", "send", "average", "host", "anything else"]),
    start=st.floats(0, 1e5),
    length=st.floats(0, 5),
    detail=st.sampled_from(["", "F", "B", "loader", "anything else"]),
)


@given(events=st.lists(events, max_size=12))
def test_whatever_happened_comes_back_to_the_nanosecond_and_slices_of_a_thread_never_overlap(
    tmp_path_factory, events
):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    timeline = Timeline(3, tuple(events))
    timeline.to_chrome_trace(path)
    again = Timeline.from_chrome_trace(path)
    assert [(*e[:5], e.detail) for e in again.events] == [(*e[:5], e.detail) for e in timeline.events]
    for read, written in zip(again.events, timeline.events):
        assert read.start_s == pytest.approx(written.start_s, abs=1e-9, rel=0)
        assert read.end_s == pytest.approx(written.end_s, abs=1e-9, rel=0)
    threads = {}
    for row in slices(path):
        start = round(row["ts"] * 1000)
        threads.setdefault((row["pid"], row["tid"]), []).append((start, start + round(row["dur"] * 1000)))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_send_follows_its_work_and_a_background_transfer_leaves_it_alone(tmp_path):
    work = [Event(0, 1, 0, m, "F", m, m + 0.75) for m in range(3)]
    path = tmp_path / "trace.json"
    sends = [Event(0, 1, 0, m, "send", m + 0.75, m + 1) for m in range(3)]
    Timeline(1, (*sends, *work)).to_chrome_trace(path)
    assert names(path, "thread_name") == {(1, 2): "pipeline 1"}
    transfers = [Event(0, 1, 0, m, "send", m + 0.5, m + 1.25) for m in range(3)]
    Timeline(1, (*transfers, *work)).to_chrome_trace(path)
    assert {row["tid"] for row in slices(path) if row["cat"] == "F"} == {2}
    assert names(path, "thread_name") == {(1, 2): "pipeline 1", (1, 6): "pipeline 1 (meanwhile 1)"}


def test_arrows_lead_from_each_result_to_what_needs_it(tmp_path):
    timeline = Timeline(
        3,
        (
            Event(0, 1, 7, 2, "F", 1.0, 2.0),
            Event(1, 1, 7, 2, "F", 2.5, 3.0),
            Event(2, 1, 7, 2, "F", 3.0, 4.0),
            Event(2, 1, 7, 2, "I", 4.0, 5.0),
            Event(2, 1, 7, 2, "W", 5.0, 6.0),
            Event(1, 1, 7, 2, "B", 5.0, 6.0),
            Event(0, 0, 7, 2, "F", 2.0, 3.0),  # its successor is not in the timeline
            Event(0, 1, 7, None, "U", 8.0, 9.0),
        ),
    )
    path = tmp_path / "trace.json"
    timeline.to_chrome_trace(path)
    found = [(s["name"], s["pid"], s["ts"], f["pid"], f["ts"]) for s, f in arrows(path)]
    assert found == [
        ("activation", 1, 2e6 - 1e-3, 2, 2.5e6),
        ("activation", 2, 3e6 - 1e-3, 3, 3e6),
        ("gradient", 3, 5e6 - 1e-3, 2, 5e6),
    ]
    assert Timeline.from_chrome_trace(path) == timeline


@given(events=st.lists(events, max_size=12))
def test_what_the_format_requires(tmp_path_factory, events):
    """Every row has its phase's fields; every arrow's ends are bound to slices, and it points forward in time."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    Timeline(3, tuple(events)).to_chrome_trace(path)
    message = {"ph", "name", "cat", "id", "pid", "tid", "ts"}
    required = {"X": {*message, "dur", "args"} - {"id"}, "s": message, "f": {*message, "bp"}}
    for row in json.loads(path.read_text())["traceEvents"]:
        if row["ph"] == "M":
            assert row.keys() - {"tid"} == {"ph", "name", "pid", "args"}
        else:
            assert row.keys() == required[row["ph"]]
    named = names(path, "thread_name")
    assert named.keys() == {(row["pid"], row["tid"]) for row in slices(path)}
    for s, f in arrows(path):
        assert (s["name"], s["cat"], f["bp"]) == (f["name"], f["cat"], "e")
        assert s["ts"] <= f["ts"]
        for end in (s, f):
            assert any(
                (row["pid"], row["tid"]) == (end["pid"], end["tid"])
                and row["cat"] in "FBI"
                and round(row["ts"] * 1e3)
                <= round(end["ts"] * 1e3)
                < round(row["ts"] * 1e3) + round(row["dur"] * 1e3)
                for row in slices(path)
            )


@pytest.mark.slow
def test_a_long_run_is_written_quickly_and_comes_back_to_the_nanosecond(tmp_path):
    events = tuple(
        Event(k, m % 2, m // 8, m % 8, kind, 1e5 + m * 1e-3 + n * 1.000001e-4, 1e5 + m * 1e-3 + n * 1.000001e-4 + 9e-5)
        for m in range(2000) for k in range(4) for n, kind in enumerate(("F", "send", "B"))
    )  # fmt: skip
    begin = time.perf_counter()
    Timeline(4, events).to_chrome_trace(tmp_path / "trace.json")
    again = Timeline.from_chrome_trace(tmp_path / "trace.json")
    assert time.perf_counter() - begin < limit(10)
    for read, written in zip(again.events, events):
        assert read[:5] == written[:5]
        assert round(read.start_s * 1e9) == round(written.start_s * 1e9)


def damaged(change):
    trace = {
        "otherData": {"stages": 2, "peak_memory_bytes": None},
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "stage 0"}},
            {"ph": "X", "name": "F3", "cat": "F", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2, "args":
             {"stage": 0, "pipeline": 0, "batch": 4, "micro_batch": 3}},
        ],
    }  # fmt: skip
    change(trace, trace["traceEvents"][1])
    return json.dumps(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        (b"\xff\xfe\xfa", "no UTF-8 text"),
        ("[]", "expected an object with traceEvents, found list"),
        ("{}", "traceEvents must be a list, found None"),
        ('{"traceEvents": []}', "otherData must be an object, found None"),
        (
            '{"traceEvents": [3], "otherData": {"stages": 1}}',
            r"traceEvents\[0\] must be an object with args, found 3",
        ),
        (damaged(lambda t, e: t["otherData"].update(stages="2")), "otherData.stages must be"),
        (damaged(lambda t, e: t["otherData"].update(stages=0)), "stages=0: must be"),
        (damaged(lambda t, e: t["otherData"].update(peak_memory_bytes=[1])), "give one per stage, 2"),
        (
            damaged(lambda t, e: t["otherData"].update(peak_memory_bytes=["1", 2])),
            "peak_memory_bytes must be a list",
        ),
        (damaged(lambda t, e: e["args"].update(stage=2)), "stage must be 0..1"),
        (damaged(lambda t, e: e["args"].update(stage="0")), r"traceEvents\[1\].stage must be int, found '0'"),
        (damaged(lambda t, e: e["args"].update(detail=1)), r"traceEvents\[1\].detail must be str, found 1"),
        (damaged(lambda t, e: e.pop("args")), r"traceEvents\[1\] must be an object with args"),
        (damaged(lambda t, e: e["args"].pop("batch")), r"traceEvents\[1\].batch must be int, found None"),
        (
            damaged(lambda t, e: e["args"].update(micro_batch=True)),
            "micro_batch must be int or null, found True",
        ),
        (
            damaged(lambda t, e: e.update(ts=float("nan"))),
            r"traceEvents\[1\].ts must be int or float, found nan",
        ),
        (damaged(lambda t, e: e.update(dur=-1)), "not before it starts"),
        (damaged(lambda t, e: e.update(cat=None)), r"traceEvents\[1\].cat must be str, found None"),
    ],
)
def test_a_damaged_trace_is_refused_with_file_and_entry(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as raised:
        Timeline.from_chrome_trace(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_rows_that_other_tools_added_are_passed_over(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(
        damaged(lambda t, e: t["traceEvents"].append({"ph": "C", "name": "memory", "pid": 0, "ts": 3}))
    )
    assert len(Timeline.from_chrome_trace(path).events) == 1


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timeline.from_chrome_trace(tmp_path / "none.json")


def test_a_trace_of_an_earlier_version_loads(tmp_path):
    """It named the stage of a worker with several in the detail."""
    path = tmp_path / "old.json"
    row = {"ph": "X", "name": "F0", "cat": "F", "pid": 2, "tid": 1, "ts": 0.0, "dur": 5e5}
    args = {"stage": 1, "pipeline": 0, "batch": 4, "micro_batch": 0, "detail": "stage 2"}
    path.write_text(json.dumps({"otherData": {"stages": 2}, "traceEvents": [{**row, "args": args}]}))
    timeline = Timeline.from_chrome_trace(path)
    assert timeline.events == (Event(1, 0, 4, 0, "F", 0.0, 0.5, "stage 2", worker=1),)
    timeline.explain()


def test_a_worker_with_several_stages_is_one_process(tmp_path):
    path = tmp_path / "trace.json"
    timeline = Timeline(
        1, (Event(0, 0, 0, 0, "F", 0.0, 0.5, worker=0), Event(1, 0, 0, 0, "F", 0.5, 1.0, worker=0))
    )
    timeline.to_chrome_trace(path)
    assert [(row["pid"], row["args"]["stage"]) for row in slices(path)] == [(1, 0), (1, 1)]
    assert arrows(path) == []
    assert Timeline.from_chrome_trace(path) == timeline
