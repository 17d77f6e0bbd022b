"""Timelines as interactive pages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from avgpipe.timeline.explain import explain, with_waits
from avgpipe.timeline.page import Bars, Block, Page, Section, Text, Timelines
from avgpipe.timeline.plot import lanes_of, look_of, readable_view, word_of
from avgpipe.timeline.timeline import StageTime, Timeline, computing

EVENTS = 24_000  # of all timelines of a page, about 25 bytes each
_BINS = 400  # bins of the strip over the whole record
_US = 1e6


def write_html(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the page; see :meth:`Timeline.to_html`."""
    one = {"timeline": timeline}
    sections = timeline_sections(one, one, {"timeline": 0})
    Page("Timeline", str(timeline).partition("\n")[0], ("timeline",), tuple(sections)).write(path)


def timeline_sections(
    records: Mapping[str, Timeline], recent: Mapping[str, Timeline], places: Mapping[str, int]
) -> list[Section]:
    """Make the sections of runs' timelines, down to each action, and of the time of each worker.

    Args:
        records: Whole record of each run.
        recent: Part of the record without pauses, which the workers' shares are computed from.
        places: Index of each run on the page.
    """
    most = EVENTS // max(1, len(records))
    shown = tuple(
        {"run": places[name], "name": name, **timeline_data(timeline, most)}
        for name, timeline in records.items()
        if timeline.events
    )
    found = []
    if shown:
        drawn = Timelines(
            "timeline", "", shown, "Drag over a stretch, in the strip or below it, to enlarge it."
        )
        found.append(
            Section(
                "Timeline",
                (drawn,),
                "The activities of each worker over time. The strip shows the whole record, with stronger color for "
                "busier times; below it is a part, down to each action. Actions that are too narrow are drawn together "
                "with their neighbours. Each worker keeps its last events, so some records begin earlier than others.",
            )
        )
    with_events = {name: timeline for name, timeline in recent.items() if timeline.events}
    if with_events:
        blocks: list[Block] = [time_bars(with_events, places)]
        blocks += [_explained(name, places[name], t, len(with_events) > 1) for name, t in with_events.items()]
        found.append(Section("Where time went", tuple(blocks), "Of the longest stretch without a pause."))
    return found


def _explained(name: str, run: int, timeline: Timeline, several: bool) -> Text:
    text, _, advice = explain(timeline).rpartition("\nadvice: ")
    return Text(text or advice, name if several else "", f"Advice: {advice}" if text else "", run)


def time_bars(timelines: Mapping[str, Timeline], places: Mapping[str, int]) -> Bars:
    """Make bars with the share of each kind of work and waiting in each worker's time."""
    rows, runs, shares = [], [], []
    for name, timeline in timelines.items():
        for of_row in with_waits(timeline).breakdown():
            label = timeline.label(of_row.stage)
            rows.append(f"{name}: {label}" if len(timelines) > 1 else label)
            runs.append(places[name])
            shares.append(_shares(of_row, timeline.makespan_s))
    parts = {
        word: [of.get(word, 0.0) for of in shares] for word in dict.fromkeys(w for of in shares for w in of)
    }
    kept = {word: values for word, values in parts.items() if any(round(v, 4) for v in values)}
    return Bars("time", "", tuple(rows), tuple(runs), kept)


def _shares(row: StageTime, makespan_s: float) -> dict[str, float]:
    """Return the shares of a worker's time by words, in the order in which they are drawn."""
    spent = {word_of((kind, "")): s for kind, s in row.compute_s.items()}
    spent["sending"] = row.send_s
    spent["waiting for an activation"] = row.recv_s.get("F", 0.0)
    spent["waiting for a gradient"] = row.recv_s.get("B", 0.0)
    spent["other waits"] = sum(s for word, s in row.recv_s.items() if word not in ("F", "B"))
    spent["data loader"] = row.host_s.get("loader", 0.0)
    spent["between results"] = row.host_s.get("caller", 0.0)
    spent["other work of the host"] = sum(
        s for word, s in row.host_s.items() if word not in ("loader", "caller")
    )
    spent["runtime"], spent["before and after"] = row.other_s, row.outside_s
    return {word: s / makespan_s if makespan_s else 0.0 for word, s in spent.items()}


# ---- data for the page's script --------------------------------------------------------------------------------------


def timeline_data(timeline: Timeline, most: int) -> dict[str, Any]:
    """Return the data of the script: the last ``most`` events in full, and busy shares over the whole record.

    Times are in microseconds from the first event; starts are differences from the event before.
    """
    ordered = sorted(timeline.events, key=lambda event: event.start_s)
    begin = ordered[0].start_s
    kept = ordered[-most:]
    looks = list(dict.fromkeys(look_of(event) for event in kept))
    numbers = {look: n for n, look in enumerate(looks)}
    starts = [round((event.start_s - begin) * _US) for event in kept]
    takes = [max(0, round((e.end_s - begin) * _US) - start) for e, start in zip(kept, starts)]
    view = readable_view(timeline)
    return {
        "rows": [timeline.label(row) for row in range(timeline.stages)],
        "lanes": lanes_of(timeline),
        "end": round(timeline.makespan_s * _US),
        "full_from": starts[0] if len(kept) < len(ordered) else 0,
        "view": [round((moment - begin) * _US) for moment in view],
        "looks": [
            {"kind": kind, "detail": detail, "word": word_of((kind, detail))} for kind, detail in looks
        ],
        "busy": _busy_bins(timeline, begin),
        "events": {
            "start": [after - before for before, after in zip([0, *starts], starts)],
            "took": takes,
            "row": [event.worker for event in kept],
            "stage": [event.stage for event in kept] if any(e.stage != e.worker for e in kept) else None,
            "pipeline": [event.pipeline for event in kept],
            "batch": [event.batch for event in kept],
            "micro_batch": [event.micro_batch for event in kept],
            "look": [numbers[look_of(event)] for event in kept],
        },
    }


def _busy_bins(timeline: Timeline, begin_s: float) -> list[list[int]]:
    """Return the computing share of each of ``_BINS`` equal parts of the record, in percent, by row."""
    width_s = max(timeline.makespan_s, 1e-9) / _BINS
    bins = [[0.0] * _BINS for _ in range(timeline.stages)]
    for row, start_s, end_s in computing(timeline):
        _add(bins[row], (start_s - begin_s) / width_s, (end_s - begin_s) / width_s)
    return [[min(100, round(100 * share)) for share in row] for row in bins]


def _add(row: list[float], start: float, end: float) -> None:
    """Add a span, in widths of bins, to the bins that it touches."""
    for n in range(int(start), min(len(row), int(end) + 1)):
        row[n] += max(0.0, min(end, n + 1) - max(start, n))
