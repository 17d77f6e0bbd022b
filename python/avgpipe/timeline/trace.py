"""Timelines as Chrome traces (JSON that Perfetto draws): writing and reading them.

A worker is a process of the trace; of its threads, one per pipeline shows what that pipeline computed and
sent, one the waits and one the host. Slices of one thread must nest, so an event that overlaps another of its
thread, as a transfer in the background does, moves to a further thread; its pipeline stays in its arguments.
Arrows lead from each computation to the one on the neighbouring stage that needs its result.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from avgpipe.files import MOST_BYTES_OF_A_TRACE, parse_json, reading, write_atomically
from avgpipe.schedule.row import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.explain import messages_of
from avgpipe.timeline.timeline import Timeline

_Row = dict[str, Any]


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace; an existing file is replaced atomically."""
    groups = 3 + max((event.pipeline for event in timeline.events), default=0)  # pipelines, waits, host
    threads = _threads(timeline, groups)
    rows: list[_Row] = []
    for k in range(timeline.stages):
        rows += _named("process", {"pid": _pid(k)}, timeline.label(k), k)
    for worker, tid in sorted({(event.worker, tid) for event, tid in zip(timeline.events, threads)}):
        further, group = divmod(tid - 1, groups)
        name = {groups - 2: "waiting", groups - 1: "host"}.get(group, f"pipeline {group}")
        name += f" (meanwhile {further})" if further else ""
        rows += _named("thread", {"pid": _pid(worker), "tid": tid}, name, 1000 * group + further)
    rows += map(_slice, timeline.events, threads)
    rows += _arrows(timeline, {id(event): tid for event, tid in zip(timeline.events, threads)})
    about: _Row = {"stages": timeline.stages, "peak_memory_bytes": timeline.peak_memory_bytes}
    if timeline.labels:
        about["labels"] = timeline.labels
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    write_atomically(path, f"{head}{body}\n]}}\n")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _pid(worker: int) -> int:
    return 1 + worker  # Perfetto treats process 0 as Linux's idle process


def _threads(timeline: Timeline, groups: int) -> list[int]:
    """Return the thread of each event: the first free one of its group, sends last to keep others in place."""
    events = timeline.events
    threads = [0] * len(events)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # disjoint, sorted
    beside = {EventKind.RECEIVE.value: groups - 2, EventKind.HOST.value: groups - 1}
    for n in sorted(range(len(events)), key=lambda n: (events[n].kind == "send", events[n].start_s)):
        event = events[n]
        span = _ns(event.start_s), _ns(event.end_s)
        tid = 1 + beside.get(event.kind, event.pipeline)
        while not _take(taken[event.worker, tid], span):
            tid += groups
        threads[n] = tid
    return threads


def _take(spans: list[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Add the span to disjoint ones, unless it overlaps one."""
    at = bisect_right(spans, span[0], key=lambda taken: taken[0])
    if (at and spans[at - 1][1] > span[0]) or (at < len(spans) and spans[at][0] < span[1]):
        return False
    spans.insert(at, span)
    return True


def _named(what: str, place: _Row, name: str, sort_index: int) -> Iterator[_Row]:
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": sort_index}}


def _slice(event: Event, tid: int) -> _Row:
    # Start and end are rounded to the nanosecond each, so that neighbours still touch and never overlap.
    start_ns, end_ns = _ns(event.start_s), _ns(event.end_s)
    args: _Row = dict(zip(("stage", "pipeline", "batch", "micro_batch"), event[:4]))
    name = str(event)
    if event.detail:
        args["detail"] = event.detail
        if event.kind not in COMPUTE_KINDS:
            name = f"{event.kind} {event.detail}{'' if event.micro_batch is None else event.micro_batch}"
    if event.worker != event.stage:
        args["worker"] = event.worker
    place = {"pid": _pid(event.worker), "tid": tid}
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}  # the format counts in microseconds
    return {"ph": "X", "name": name, "cat": event.kind, **place, **times, "args": args}


def _arrows(timeline: Timeline, tids: Mapping[int, int]) -> Iterator[_Row]:
    """Yield arrows from the last nanosecond of a message's computation to the start of its use: both lie in slices.

    ``tids``: Thread by the event's id.
    """
    steps = {k: e for k, e in messages_of(timeline).items() if _ns(e.start_s) < _ns(e.end_s)}
    for number, ((stage, *batch, kind), event) in enumerate(steps.items()):
        name, step = ("activation", 1) if kind == EventKind.FORWARD else ("gradient", -1)
        target = steps.get((stage + step, *batch, kind))
        if target is None or _ns(target.start_s) < _ns(event.end_s) - 1:
            continue
        row = {"name": name, "cat": "message", "id": number}
        begin, end = ({**row, "pid": _pid(e.worker), "tid": tids[id(e)]} for e in (event, target))
        yield {"ph": "s", **begin, "ts": (_ns(event.end_s) - 1) / 1000}
        yield {"ph": "f", "bp": "e", **end, "ts": _ns(target.start_s) / 1000}


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read the timeline in the file; ValueError names the file and an entry that is not of a timeline."""
    with reading(path, MOST_BYTES_OF_A_TRACE) as text:
        trace = parse_json("a timeline", text, finite=False)
        try:
            return _timeline(trace)
        except ValueError as error:
            raise ValueError(f"not a timeline of avgpipe, {error}") from None


_ABOUT = {"stages": "int", "peak_memory_bytes": "a list or null", "labels": "a list or null"}
_SLICE = dict.fromkeys(("stage", "pipeline", "batch"), "int")
_SLICE |= {"micro_batch": "int or null", "cat": "str", "ts": "int or float", "dur": "int or float"}
_SLICE |= {"detail": "str", "worker": "int or null"}
_MOST = 2**16  # stages, workers, pipelines
_MOST_BYTES = 2**60
_LARGEST = 1e18  # microseconds, batches
_WORDS = {dict: "an object", list: "a list", type(None): "null"}


def _timeline(trace: Any) -> Timeline:
    if not isinstance(trace, dict):
        raise ValueError(f"expected an object with traceEvents, found {type(trace).__name__}")
    rows, about = _checked(trace, "", {"traceEvents": "a list", "otherData": "an object"})
    stages, *lists = _checked(about, "otherData.", _ABOUT)
    if not 0 <= stages <= _MOST:
        raise ValueError(f"otherData.stages must be 0 to {_MOST}, found {stages}")
    for name, kind, items in zip(("peak_memory_bytes", "labels"), (int, str), lists):
        if any(type(item) is not kind for item in items or ()):
            raise ValueError(f"otherData.{name} must be a list of {kind.__name__}, found {items!r:.80}")
    if not all(0 <= size <= _MOST_BYTES for size in lists[0] or ()):
        raise ValueError(f"otherData.peak_memory_bytes must be 0 to {_MOST_BYTES}, found {lists[0]!r:.80}")
    # Metadata, and records of other tools (counters, flows, instants), are ignored.
    slices = [(n, row) for n, row in enumerate(rows) if not isinstance(row, dict) or row.get("ph") == "X"]
    events = tuple(_event(f"traceEvents[{n}]", row) for n, row in slices)
    return Timeline(stages, events, lists[0], lists[1] or ())


def _event(name: str, row: Any) -> Event:
    args = row.get("args") if isinstance(row, dict) else None
    if not isinstance(args, dict):
        raise ValueError(f"{name} must be an object with args, found {row!r:.120}")
    fields = _checked({"detail": "", **args, **row}, f"{name}.", _SLICE)
    stage, pipeline, batch, micro_batch, kind, start_us, length_us, detail, worker = fields
    if not all(0 <= n <= _MOST for n in (stage, pipeline, worker or 0)):
        raise ValueError(f"{name}: stage, pipeline and worker must be 0 to {_MOST}")
    start_ns = round(start_us * 1000)
    end_ns = start_ns + round(length_us * 1000)
    return Event(stage, pipeline, batch, micro_batch, kind, start_ns / 1e9, end_ns / 1e9, detail, worker)


def _checked(found: Mapping[str, Any], where: str, kinds: Mapping[str, str]) -> list[Any]:
    """Return the values of ``found`` by the names in ``kinds``; ValueError unless each has one of its types."""
    for name, words in kinds.items():
        value: Any = found.get(name)
        kind = _WORDS.get(type(value), type(value).__name__)
        if kind not in words.split(" or ") or (kind == "float" and not math.isfinite(value)):
            raise ValueError(f"{where}{name} must be {words}, found {value!r:.40}")
        if kind in ("int", "float") and abs(value) > _LARGEST:
            raise ValueError(f"{where}{name} must be at most {_LARGEST:g}, found {value!s:.40}")
    return [found.get(name) for name in kinds]
