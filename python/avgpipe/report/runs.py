"""Read the files of a run's folder, whose contents are not trusted: what is damaged is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from avgpipe.errors import reason
from avgpipe.timeline.timeline import Timeline

_LARGEST = 1e300


def number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # excludes NaN, and ints of a thousand digits


def numbers(value: Any) -> list[float]:
    """Return a list of finite numbers as it is, anything else as an empty one."""
    found = [number(item) for item in value] if isinstance(value, list) else []
    return [item for item in found if item is not None] if None not in found else []


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, without damaged ones such as a last line that was cut off."""
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [row for line in lines if (row := parse_row(line)) is not None]


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None if it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "kind" in row and "batch" in row else None


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; if it is missing or damaged, {}, and ``problems`` names the damage."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        problems.append(f"{path.name}: {reason(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: holds a {type(value).__name__} instead of an object")
        return {}
    return value


# ---- stretches without a pause ---------------------------------------------------------------------------------------


def stretches(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the first and last batches between validations or ends of epochs, where pipelines run empty."""
    breaks = {row["batch"] for row in rows if row["kind"] == "valid"}
    trained = [row for row in rows if row["kind"] == "train"]
    breaks |= {after["batch"] for row, after in pairwise(trained) if row.get("epoch") != after.get("epoch")}
    if trained:
        breaks |= {trained[0]["batch"], max(row["batch"] for row in trained) + 1}
    return [(first, after - 1) for first, after in pairwise(sorted(breaks))]


def unbroken(timeline: Timeline, stretches: Sequence[tuple[int, int]]) -> Timeline:
    """Return the longest stretch of batches in the timeline that all stages still have: pauses are no bubbles."""
    begins: dict[int, int] = {}
    for event in timeline.events:
        begins[event.stage] = min(begins.get(event.stage, event.batch), event.batch)
    oldest = max(begins.values(), default=0)
    kept = [(max(first, oldest), last) for first, last in stretches if last >= oldest]
    if not kept:
        return timeline
    return timeline.window(*max(kept, key=lambda s: s[1] - s[0]))
