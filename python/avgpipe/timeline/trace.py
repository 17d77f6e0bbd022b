"""Timelines as Chrome traces: JSON that Perfetto draws, and back.

A worker is a process; of its threads, one per pipeline shows what that pipeline computed and sent, one the
waits and one the host. Slices of one thread must nest, so an event that overlaps another of its thread, as
a transfer in the background does, moves to a further one; its pipeline stays in its arguments. Arrows lead from
each computation to the one on the neighbouring stage that needs its result.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from avgpipe.files import write_atomically
from avgpipe.timeline.explain import messages_of
from avgpipe.timeline.timeline import COMPUTE_KINDS, Event, EventKind, Timeline


class _Thread(NamedTuple):
    """A row of a group: a pipeline, or past the pipelines the waits and the host; further ones take what overlaps."""

    worker: int
    group: int
    further: int


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace; an existing file is replaced whole."""
    pipelines = 1 + max((event.pipeline for event in timeline.events), default=0)
    threads = _threads(timeline, pipelines)
    rows = [row for k in range(timeline.stages) for row in _process(k, timeline.label(k))]
    rows += [row for thread in sorted(set(threads)) for row in _thread(thread, pipelines)]
    rows += [_slice(event, _tid(thread, pipelines)) for event, thread in zip(timeline.events, threads)]
    rows += _arrows(timeline, {id(e): _tid(thread, pipelines) for e, thread in zip(timeline.events, threads)})
    about: dict[str, Any] = {"stages": timeline.stages, "peak_memory_bytes": timeline.peak_memory_bytes}
    if timeline.labels:
        about["labels"] = list(timeline.labels)
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    write_atomically(
        path, f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{body}\n]}}\n'
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _threads(timeline: Timeline, pipelines: int) -> list[_Thread]:
    """The thread of each event: the first of its group that is free. Sends come last: others keep their place."""
    events = timeline.events
    threads = [_Thread(0, 0, 0)] * len(events)
    # Starts and ends, sorted.
    taken: dict[_Thread, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    groups = {EventKind.RECEIVE.value: pipelines, EventKind.HOST.value: pipelines + 1}
    for index in sorted(
        range(len(events)), key=lambda n: (events[n].kind == EventKind.SEND, events[n].start_s)
    ):
        event = events[index]
        thread = _Thread(event.worker, groups.get(event.kind, event.pipeline), 0)
        start, end = _ns(event.start_s), _ns(event.end_s)
        while not _take(*taken[thread], start, end):
            thread = thread._replace(further=thread.further + 1)
        threads[index] = thread
    return threads


def _take(starts: list[int], ends: list[int], start: int, end: int) -> bool:
    """Enter the span among disjoint ones, unless it overlaps one."""
    at = bisect_right(starts, start)
    if (at and ends[at - 1] > start) or (at < len(starts) and starts[at] < end):
        return False
    starts.insert(at, start)
    ends.insert(at, end)
    return True


def _tid(thread: _Thread, pipelines: int) -> int:
    return 1 + thread.group + thread.further * (pipelines + 2)


def _pid(worker: int) -> int:
    return 1 + worker  # Perfetto takes process 0 for the idle one of Linux, and advises against it


def _process(worker: int, label: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _pid(worker), "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": _pid(worker), "args": {"sort_index": worker}}


def _thread(thread: _Thread, pipelines: int) -> Iterator[dict[str, Any]]:
    """Its name, and its place below the first of its group."""
    beside = thread.group - pipelines
    name = f"pipeline {thread.group}" if beside < 0 else ("waiting", "host")[beside]
    if thread.further:
        name += f" (meanwhile {thread.further})"
    place = {"ph": "M", "pid": _pid(thread.worker), "tid": _tid(thread, pipelines)}
    yield {**place, "name": "thread_name", "args": {"name": name}}
    yield {**place, "name": "thread_sort_index", "args": {"sort_index": 1000 * thread.group + thread.further}}


def _slice(event: Event, tid: int) -> dict[str, Any]:
    # Start and end are rounded to the nanosecond each, so that neighbours still touch and never overlap.
    start_ns, end_ns = _ns(event.start_s), _ns(event.end_s)
    args: dict[str, Any] = dict(zip(("stage", "pipeline", "batch", "micro_batch"), event[:4]))
    name = str(event)
    if event.detail:
        args["detail"] = event.detail
        if event.kind not in COMPUTE_KINDS:
            name = f"{event.kind} {event.detail}{'' if event.micro_batch is None else event.micro_batch}"
    if event.worker != event.stage:
        args["worker"] = event.worker
    return {
        "ph": "X",
        "name": name,
        "cat": event.kind,
        "pid": _pid(event.worker),
        "tid": tid,
        "ts": start_ns / 1000,  # the format counts in microseconds
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def _arrows(timeline: Timeline, tids: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """From the last nanosecond of what computed a message to the start of what needs it, as both must lie in slices.

    ``tids``: by the event's id.
    """
    steps = {k: e for k, e in messages_of(timeline).items() if _ns(e.start_s) < _ns(e.end_s)}
    for number, ((stage, pipeline, batch, m, kind), event) in enumerate(steps.items()):
        name, step = ("activation", 1) if kind == EventKind.FORWARD else ("gradient", -1)
        target = steps.get((stage + step, pipeline, batch, m, kind))
        if target is None or _ns(target.start_s) < _ns(event.end_s) - 1:
            continue
        row = {"name": name, "cat": "message", "id": number}
        for end, ends, ns in (
            (event, {"ph": "s"}, _ns(event.end_s) - 1),
            (target, {"ph": "f", "bp": "e"}, _ns(target.start_s)),
        ):
            yield {**ends, **row, "pid": _pid(end.worker), "tid": tids[id(end)], "ts": ns / 1000}


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in the file; ValueError names the file and the entry that is not of a timeline."""
    try:
        trace = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: not a JSON trace, {error}") from None
    try:
        return _timeline(trace)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: not a timeline of avgpipe, {error}") from None


def _timeline(trace: Any) -> Timeline:
    if not isinstance(trace, dict):
        raise ValueError(f"expected an object with traceEvents, found {type(trace).__name__}")
    rows = trace.get("traceEvents")
    if not isinstance(rows, list):
        raise ValueError(f"traceEvents must be a list, found {rows!r:.40}")
    about = trace.get("otherData")
    if not isinstance(about, dict) or type(about.get("stages")) is not int:
        raise ValueError(f"otherData.stages must be the number of stages, found {about!r:.80}")
    memory = about.get("peak_memory_bytes")
    if memory is not None and not (isinstance(memory, list) and all(type(size) is int for size in memory)):
        raise ValueError(
            f"otherData.peak_memory_bytes must be a list of integers or null, found {memory!r:.80}"
        )
    # Metadata, and whatever other tools added (counters, flows, instants), carry nothing of a timeline.
    slices = [(n, row) for n, row in enumerate(rows) if not isinstance(row, dict) or row.get("ph") == "X"]
    events = [_event(index, row) for index, row in slices]
    labels = about.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"otherData.labels must be a list of texts, found {labels!r:.80}")
    return Timeline(about["stages"], tuple(events), memory, tuple(labels))


def _event(index: int, row: Any) -> Event:
    args = row.get("args") if isinstance(row, dict) else None
    if not isinstance(args, dict):
        raise ValueError(f"traceEvents[{index}] must be an object with args, found {row!r:.120}")
    found = {**row, **args}

    def get(key: str, *types: type) -> Any:
        value = found.get(key)
        if type(value) not in types or (isinstance(value, float) and not math.isfinite(value)):
            kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise ValueError(f"traceEvents[{index}].{key} must be {kinds}, found {value!r:.40}")
        return value

    place = (get("stage", int), get("pipeline", int), get("batch", int), get("micro_batch", int, type(None)))
    start_us, length_us = get("ts", int, float), get("dur", int, float)
    start_ns, end_ns = round(start_us * 1000), round(start_us * 1000) + round(length_us * 1000)
    detail = get("detail", str) if "detail" in args else ""
    worker = get("worker", int) if "worker" in args else None
    return Event(*place, get("cat", str), start_ns / 1e9, end_ns / 1e9, detail, worker)
