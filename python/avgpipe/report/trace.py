"""Timelines as Chrome traces: JSON that Perfetto draws, and back.

A stage is a process, a pipeline a thread of it. Slices of one thread must nest, so an event that overlaps
another of its pipeline, as a transfer in the background does, moves to a further thread; its pipeline stays
in its arguments.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from avgpipe.files import write_atomically
from avgpipe.report.timeline import Event, Timeline


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace; an existing file is replaced whole."""
    pipelines = 1 + max((event.pipeline for event in timeline.events), default=0)
    threads = _threads(timeline, pipelines)
    rows = [_process(k) for k in range(timeline.stages)]
    rows += [
        _thread(k, tid, pipelines) for k, tid in sorted(set(zip((e.stage for e in timeline.events), threads)))
    ]
    rows += [_slice(event, tid) for event, tid in zip(timeline.events, threads)]
    about = {"stages": timeline.stages, "peak_memory_bytes": timeline.peak_memory_bytes}
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    write_atomically(
        path, f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{body}\n]}}\n'
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _threads(timeline: Timeline, pipelines: int) -> list[int]:
    """The thread of each event: its pipeline's first one that is free, never the very first for a "send"."""
    threads = [0] * len(timeline.events)
    free_ns: dict[tuple[int, int], int] = {}  # (stage, thread) -> end of its last slice
    for index in sorted(range(len(threads)), key=lambda index: timeline.events[index].start_s):
        event = timeline.events[index]
        tid = event.pipeline + (pipelines if event.kind == "send" else 0)
        while free_ns.get((event.stage, tid), _ns(event.start_s)) > _ns(event.start_s):
            tid += pipelines
        free_ns[event.stage, tid] = _ns(event.end_s)
        threads[index] = tid
    return threads


def _process(stage: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}


def _thread(stage: int, tid: int, pipelines: int) -> dict[str, Any]:
    further, pipeline = divmod(tid, pipelines)
    name = f"pipeline {pipeline}" + (f" (in the background {further})" if further else "")
    return {"ph": "M", "name": "thread_name", "pid": stage, "tid": tid, "args": {"name": name}}


def _slice(event: Event, tid: int) -> dict[str, Any]:
    # Start and end are rounded to the nanosecond each, so that neighbours still touch and never overlap.
    start_ns, end_ns = _ns(event.start_s), _ns(event.end_s)
    args = {"pipeline": event.pipeline, "batch": event.batch, "micro_batch": event.micro_batch}
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}  # the format counts in microseconds
    return {
        "ph": "X",
        "name": str(event),
        "cat": event.kind,
        "pid": event.stage,
        "tid": tid,
        **times,
        "args": {**args, "detail": event.detail} if event.detail else args,
    }


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
    events = [
        _event(index, row)
        for index, row in enumerate(rows)
        if not isinstance(row, dict) or row.get("ph") == "X"
    ]
    return Timeline(about["stages"], tuple(events), memory)


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

    place = (get("pid", int), get("pipeline", int), get("batch", int), get("micro_batch", int, type(None)))
    start_us, length_us = get("ts", int, float), get("dur", int, float)
    start_ns, end_ns = round(start_us * 1000), round(start_us * 1000) + round(length_us * 1000)
    detail = get("detail", str) if "detail" in args else ""
    return Event(*place, get("cat", str), start_ns / 1e9, end_ns / 1e9, detail)
