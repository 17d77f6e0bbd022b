"""Files that something else wrote or damaged: each reader accepts them, or raises one ValueError that names them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe import Plan
from avgpipe.cli.config import SimulateConfig, TrainConfig
from avgpipe.cli.simulate import _read as read_schedule
from avgpipe.errors import ScheduleError
from avgpipe.fault.joining import ADDRESS, join
from avgpipe.files import read_json, strict_json
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import Profile
from avgpipe.report.course import read_metrics, read_object
from avgpipe.schedule import Schedule, build_schedule
from avgpipe.timeline import Event, Timeline
from avgpipe.timeline.trace import read_trace, write_trace
from tests.planning import chains
from tests.planning.test_cluster import FILE as CLUSTER

MOST = 2**62  # of something: nothing with so many parts may be begun
HOSTILE = st.sampled_from(
    [
        MOST, -1, 0, 2**20, 10**400, 1e300, float("inf"), float("nan"), True, None, "", "x", "\ud800", [], {}, [[]],
        [MOST], [MOST, MOST], [1] * 1000, {"": MOST}, json.loads("[" * 500 + "]" * 500), "nan", "9" * 5000,
    ]
)  # fmt: skip


def plan_text() -> str:
    options: dict[str, Any] = {"replication": [1, 2], "placement": [[0], [1, 2]], "advance": [1, 0]}
    return Plan(stages=2, micro_batches=4, pipelines=2, partition=[1], **options).to_json()


def trace_text(folder: Path) -> str:
    events = (Event(0, 0, 0, 0, "F", 0.0, 1.0), Event(1, 0, 0, 0, "B", 1.0, 2.0, "x", 1))
    write_trace(Timeline(2, events, [1, 2], ("a", "b")), folder / "trace")
    return (folder / "trace").read_text()


def validated(path: Path) -> Schedule:
    schedule = read_schedule(SimulateConfig.of(schedule=str(path), forward_ms=(1.0,), backward_ms=(1.0,)))
    with suppress(ScheduleError):  # the order may be wrong: the file is read
        schedule.validate()
    return schedule


def drawn(path: Path) -> str:
    return str(read_trace(path))


def options_of(path: Path) -> TrainConfig:
    return TrainConfig.from_json(path.read_text(errors="replace"))


READERS: dict[str, tuple[Callable[[Path], str], Callable[[Path], object]]] = {
    "plan": (lambda _: plan_text(), Plan.load),
    "profile": (lambda _: chains.random_profile(3).to_json(), Profile.load),
    "cluster": (lambda _: CLUSTER, Cluster.load),
    "schedule": (lambda _: build_schedule("zero-bubble-h1", 3, 4).to_csv(), validated),
    "endless schedule": (lambda _: build_schedule("pipedream", 3, 4).to_csv(), validated),
    "timeline": (trace_text, drawn),
    "options": (lambda _: TrainConfig(workload="x", stages=2).to_json(), options_of),
    "record": (lambda _: strict_json({"rows": [{"a": 1}]}), read_json),
}


@pytest.fixture(scope="module", params=READERS)
def case(request: Any, tmp_path_factory: Any) -> tuple[str, Path, Callable[[Path], object]]:
    write, read = READERS[request.param]
    folder = tmp_path_factory.mktemp("files")
    return write(folder), folder / "file", read


def read_or_refuse(read: Callable[[Path], object], path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    with suppress(ValueError):
        read(path)


def test_the_files_are_read_undamaged(case: Any) -> None:
    text, path, read = case
    path.write_text(text)
    read(path)


@given(st.data())
def test_damaged_bytes(case: Any, data: st.DataObject) -> None:
    text, path, read = case
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        piece = data.draw(
            st.sampled_from([b"", b"\xff", b"\0", b"9" * 20, b"[" * 9999, b'"', b"+99", b"1e999", b"-"])
        )
        content[at : at + data.draw(st.integers(0, 4))] = piece
    read_or_refuse(read, path, bytes(content))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with a key or index of it."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, dict | list):
            yield from places(part)


@given(st.data())
def test_hostile_values(case: Any, data: st.DataObject) -> None:
    text, path, read = case
    try:
        value = json.loads(text)
    except ValueError:
        return  # other forms have only bytes
    for _ in range(data.draw(st.integers(1, 3))):
        whole, key = data.draw(st.sampled_from(list(places(value))))
        if data.draw(st.booleans()):
            whole[key] = copy.deepcopy(data.draw(HOSTILE))
        elif isinstance(whole, dict):
            del whole[key]
        if not value:
            break
    read_or_refuse(read, path, json.dumps(value))


COUNTS = ["stages", "pipelines", "micro_batches", "replication", "advance", "placement", "stages_per_worker"]


@pytest.mark.parametrize(
    "schedule", ["advance-forward", "pipedream", "interleaved-1f1b", "zero-bubble-v", "gpipe"]
)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("most", [MOST, 2**40, 2**21])
def test_a_plan_of_too_many_parts_is_refused_at_once(
    tmp_path: Path, schedule: str, name: str, most: int
) -> None:
    path = tmp_path / "plan.json"
    value: Any = {"replication": [most], "placement": [[most]]}.get(name, most)
    weights = "stash" if schedule == "pipedream" else "flush"
    path.write_text(json.dumps({"schedule": schedule, "weights": weights, name: value}))
    with pytest.raises(ValueError, match=f"^{path}: ") as raised:
        Plan.load(path)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("counts", [(4096, 4096), (10, 2**20)])
def test_a_schedule_says_how_many_parts_it_may_have(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"the product must be at most 8388608$"):
        build_schedule("1f1b", *counts)
    with pytest.raises(ValueError, match="the product must be at most 8388608"):
        build_schedule("1f1b", 1, counts[1], replication=[counts[0]])


def test_a_schedule_far_ahead_is_not_run_for_a_check() -> None:
    schedule = Schedule.from_csv("F0+999999999,B0,U\n")
    with pytest.raises(
        ScheduleError, match="at most 4194304 are run: use fewer actions, or run less far ahead"
    ):
        schedule.validate()


def test_a_cluster_of_too_many_devices_is_refused() -> None:
    text = CLUSTER.replace("count = 3", f"count = {MOST}")
    with pytest.raises(ValueError, match=rf"devices\[0\]: count={MOST}: must be at most 65536"):
        Cluster.from_toml(text)


@pytest.mark.parametrize("change", [{"stages": MOST}, {"stages": -1}])
def test_a_timeline_of_too_many_stages_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    trace = json.loads(trace_text(tmp_path))
    trace["otherData"] |= change
    (tmp_path / "trace").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=r"otherData.stages must be (0 to 65536|at most 1e\+18)"):
        read_trace(tmp_path / "trace")


@given(
    st.binary(max_size=200) | st.sampled_from([b"[" * 99999, b'{"kind":1e999,"batch":' + b"9" * 400 + b"}"])
)
def test_reports_read_what_is_left_of_a_run(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run")
    row = {"kind": "train", "batch": 1}
    (folder / "metrics.jsonl").write_bytes(json.dumps(row).encode() + b"\n" + content)
    assert read_metrics(folder)[0] == row
    (folder / "run.json").write_bytes(content)
    problems: list[str] = []
    assert read_object(folder / "run.json", problems) == {} or not problems


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 99999,
        "[]",
        "{}",
        '{"address": 1, "token": []}',
        '{"address": "\\u0000", "token": "x"}',
        '{"address":"',
    ],
)
def test_a_damaged_address_of_a_run_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / ADDRESS).write_text(content)
    with pytest.raises(
        ValueError, match=f"^{tmp_path}: (its launcher cannot be asked|no run with --isolate)"
    ):
        join(tmp_path, print)
