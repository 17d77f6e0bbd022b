"""``avgpipe bench``: our ways, what one writes instead, and the machine's own limit, in one run; what all report."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy
import torch
from rich.console import Group, RenderableType
from rich.text import Text

from avgpipe.cli.doctor import examine
from avgpipe.cli.errors import CommandFailed, running
from avgpipe.cli.options import Options, words
from avgpipe.cli.output import grid, show, tell
from avgpipe.timeline.plot import dress, picture
from avgpipe.units import format_bytes, format_seconds

_INTERRUPTED = 130
_STYLES = {"ours": "bold", "baseline": "", "limit": "dim"}
_COLORS = {"ours": "#2a6fb0", "baseline": "#b9b9b9", "limit": "#e8e3d9"}


Role = Literal["ours", "baseline", "limit"]


class Way(NamedTuple):
    """One way to do the work of a section.

    Attributes:
        role: What it is in the table; fractions are of the first "limit".
        bytes_per_element: What the work must move for each of the section's elements, whatever this way moves besides.
        run: Does it: once, or as often as it is told.
    """

    name: str
    role: Role
    bytes_per_element: float
    run: Callable[..., Any]


def summarise(
    head: Mapping[str, Any],
    ways: Sequence[Way],
    samples: Sequence[Sequence[float]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Make a section, one JSON object.

    Args:
        head: ``question``, ``case``, ``asks`` (the question in words) and ``elements``.
        ways: In the order of the table.
        samples: Seconds of each way.
        skipped: Names of ways that cannot run here, and why.
    """
    quartiles = {way.name: numpy.quantile(s, (0.25, 0.5, 0.75)).tolist() for way, s in zip(ways, samples)}
    medians = {name: seconds[1] for name, seconds in quartiles.items()}
    rates = {way.name: head["elements"] * way.bytes_per_element / medians[way.name] / 1e9 for way in ways}
    limit = next((way.name for way in ways if way.role == "limit"), None)
    rows = []
    for name, role, bytes_per_element, _ in ways:
        first, median, third = (1e3 * s for s in quartiles[name])
        others = [way.name for way in ways if role == "ours" and way.role == "baseline"]
        rows.append(
            {
                "name": name,
                "role": role,
                "median_ms": median,
                "quartile1_ms": first,
                "quartile3_ms": third,
                "bytes_per_element": bytes_per_element,
                "gb_per_s": rates[name],
                "fraction_of_limit": None if limit is None else rates[name] / rates[limit],
                "ratios": {other: medians[other] / medians[name] for other in others},
            }
        )
    return {
        **head,
        "limit": limit,
        "rows": rows,
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def table(section: Mapping[str, Any]) -> Group:
    """A section for a reader. "ours is": how many times longer a baseline took than our first row."""
    made = grid([""], ["median", "quartiles", "bytes/el.", "GB/s", "of limit", "ours is"])
    ratios: dict[str, float] = next((row["ratios"] for row in section["rows"] if row["role"] == "ours"), {})
    for row in section["rows"]:
        first, median, third = (
            format_seconds(row[f"{what}_ms"] / 1e3) for what in ("quartile1", "median", "quartile3")
        )
        fraction, name = row["fraction_of_limit"], row["name"]
        made.add_row(
            name,
            median,
            f"{first} - {third}",
            f"{row['bytes_per_element']:g}",
            f"{row['gb_per_s']:.3g}",
            "-" if fraction is None else f"{fraction:.2f}",
            f"{ratios[name]:.2f}x" if name in ratios else "",
            style=_STYLES[row["role"]],
        )
    notes = [section["asks"], f"limit: {section['limit']}" if section["limit"] else ""]
    notes += [f"left out: {skipped['name']}: {skipped['reason']}" for skipped in section["skipped"]]
    return Group(Text(_title(section), style="bold"), made, Text("\n".join(filter(None, notes))), "")


def _title(section: Mapping[str, Any]) -> str:
    case, size = section["case"], section["elements"]
    elements = "" if case == format_bytes(size) else f", {size / 1e6:g} M elements"
    return f"{section['question']}, {case}{elements}"


def plot(sections: Sequence[Mapping[str, Any]], heading: str, path: str) -> None:
    """Draw a panel for each section, with a bar for each row."""
    heights = [0.95 + 0.27 * len(section["rows"]) for section in sections]
    with picture(path, 7.6, sum(heights) + 0.4) as figure:
        panels = figure.subplots(len(sections), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for section, axes in zip(sections, panels.flat):
            rows = section["rows"]
            rates = [row["gb_per_s"] for row in rows]
            colors = [_COLORS[row["role"]] for row in rows]
            bars = axes.barh([row["name"] for row in rows], rates, color=colors)
            times = [format_seconds(row["median_ms"] / 1e3) for row in rows]
            axes.bar_label(bars, [f" {t}, {rate:.3g} GB/s" for t, rate in zip(times, rates)], fontsize=7.5)
            dress(axes, grid="x")
            axes.set_xlim(0, 1.36 * max(rates))  # room for the labels behind the bars
            axes.invert_yaxis()
            axes.set_title(_title(section), loc="left", fontsize=9.5)
        figure.suptitle(f"{heading}; GB/s of what the work must move", fontsize=10)


def memory_available_bytes(device: str) -> float:
    """Bytes that can be had without swapping; infinite where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    facts = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: *(\d+)", facts.read_text() if facts.exists() else "", re.MULTILINE)
    return 1024.0 * int(found[1]) if found else math.inf


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, failures and Ctrl-C end the command in one line; whoever started processes has ended them."""
    try:
        with running():
            yield
    except KeyboardInterrupt as interrupt:
        raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from interrupt
    finally:
        tell("")


def report(name: str, config: Options, found: Mapping[str, Any], *tables: RenderableType) -> None:
    """Print what ``avgpipe bench NAME`` found: one JSON object, or tables."""
    facts = examine().facts
    facts["machine"]["threads"] = getattr(config, "threads", 1)
    if config.json:
        command = shlex.join(["avgpipe", "bench", name, *words(config.complete)])
        print(json.dumps({"command": command, **facts, **found}))
        return
    machine = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    show(*tables, f"{machine}, torch {facts['versions']['torch']}", columns=120)
