"""What a benchmark reports: our rows beside baselines and the machine's limit; as JSON, a table, a picture."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Literal, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from avgpipe.cli.bench.machine import machine, versions
from avgpipe.cli.errors import CommandFailed, running
from avgpipe.cli.options import Options, words
from avgpipe.timeline.plot import write_figure
from avgpipe.units import format_bytes, format_seconds

_FILE_COLUMNS = 120  # of a table that is not for a terminal
_INTERRUPTED = 130

_STYLES = {"ours": "bold", "baseline": "", "limit": "dim"}
_COLORS = {"ours": "#2a6fb0", "baseline": "#b9b9b9", "limit": "#e8e3d9"}
_PANEL_IN, _BAR_IN, _FRAME_IN = 7.6, 0.27, 0.95


class Variant(NamedTuple):
    """One way to do the work of a section.

    Attributes:
        role: What it is in the table; fractions are of the first "limit".
        bytes_per_element: What the work must move for each of the section's elements, whatever this way of doing it
            moves besides. Alike for all variants that do the same work.
        run: Does it once; on CUDA it enqueues.
        against: Baselines that do the same work; None: all of the section. Of "ours" alone.
        compile_s: Seconds that its first call took to compile.
    """

    name: str
    role: Literal["ours", "baseline", "limit"]
    bytes_per_element: float
    run: Callable[[], object]
    against: tuple[str, ...] | None = None
    compile_s: float | None = None


class Skipped(NamedTuple):
    """A variant that cannot run here, and why."""

    name: str
    reason: str


def summarise(
    head: dict[str, Any],
    variants: Sequence[Variant],
    samples: Sequence[Sequence[float]],
    skipped: Sequence[Skipped] = (),
) -> dict[str, Any]:
    """A section as one JSON object.

    Args:
        head: ``question``, ``case``, ``asks`` (the question in words), ``elements`` and ``memory_bytes``.
        samples: Seconds per call of each variant.
    """
    medians = {v.name: statistics.median(seconds) for v, seconds in zip(variants, samples)}
    rates = {v.name: head["elements"] * v.bytes_per_element / medians[v.name] / 1e9 for v in variants}
    limit = next((v.name for v in variants if v.role == "limit"), None)
    rows = []
    for v, seconds in zip(variants, samples):
        quartile1_s, quartile3_s = quartiles(seconds)
        rows.append(
            {
                "name": v.name,
                "role": v.role,
                "median_ms": 1e3 * medians[v.name],
                "quartile1_ms": 1e3 * quartile1_s,
                "quartile3_ms": 1e3 * quartile3_s,
                "bytes_per_element": v.bytes_per_element,
                "gb_per_s": rates[v.name],
                "fraction_of_limit": None if limit is None else rates[v.name] / rates[limit],
                "ratios": {o.name: medians[o.name] / medians[v.name] for o in variants if _compares(v, o)},
                **({} if v.compile_s is None else {"compile_s": v.compile_s}),
            }
        )
    return {**head, "limit": limit, "rows": rows, "skipped": [s._asdict() for s in skipped]}


def _compares(ours: Variant, other: Variant) -> bool:
    does_the_same = ours.against is None or other.name in ours.against
    return ours.role == "ours" and other.role == "baseline" and does_the_same


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def table(section: dict[str, Any]) -> Group:
    """The section for a reader. "ours is": how many times longer a baseline took than our first row of the same."""
    rows = section["rows"]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("", no_wrap=True)
    for heading in ("median", "quartiles", "bytes/el.", "GB/s", "of limit", "ours is"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        fraction = row["fraction_of_limit"]
        ratio = next((ours["ratios"][row["name"]] for ours in rows if row["name"] in ours["ratios"]), None)
        made.add_row(
            row["name"],
            format_seconds(row["median_ms"] / 1e3),
            f"{format_seconds(row['quartile1_ms'] / 1e3)} - {format_seconds(row['quartile3_ms'] / 1e3)}",
            f"{row['bytes_per_element']:g}",
            f"{row['gb_per_s']:.3g}",
            "-" if fraction is None else f"{fraction:.2f}",
            "" if ratio is None else f"{ratio:.2f}x",
            style=_STYLES[row["role"]],
        )
    notes = [section["asks"]]
    if section["limit"] is not None:
        notes.append(f"limit: {section['limit']}")
    if section["memory_bytes"]:
        notes.append(f"memory: {format_bytes(section['memory_bytes'])}")
    notes += [f"{row['name']}: compiled in {row['compile_s']:.1f} s" for row in rows if "compile_s" in row]
    notes += [f"left out: {skipped['name']}: {skipped['reason']}" for skipped in section["skipped"]]
    return Group(Text(title(section), style="bold"), made, Text("\n".join([*notes, ""])))


def title(section: dict[str, Any]) -> str:
    size = (
        f", {section['elements'] / 1e6:g} M elements" if section["memory_bytes"] else ""
    )  # of a kernel's operands
    return f"{section['question']}, {section['case']}{size}"


def plot(sections: Sequence[dict[str, Any]], heading: str, path: str) -> None:
    """Draw a panel for each section, a bar of GB/s for each row, the limit as a line; the suffix is the format."""
    heights = [_FRAME_IN + _BAR_IN * len(section["rows"]) for section in sections]
    figure = Figure(figsize=(_PANEL_IN, sum(heights) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sections), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for section, axes in zip(sections, panels.flat):
        rows = section["rows"]
        rates = [row["gb_per_s"] for row in rows]
        bars = axes.barh([row["name"] for row in rows], rates, color=[_COLORS[row["role"]] for row in rows])
        times = [format_seconds(row["median_ms"] / 1e3) for row in rows]
        axes.bar_label(bars, [f" {t}, {rate:.3g} GB/s" for t, rate in zip(times, rates)], fontsize=7.5)
        for rate in (row["gb_per_s"] for row in rows if row["name"] == section["limit"]):
            axes.axvline(rate, color="#c0453c", linewidth=1.1)
        axes.set_xlim(0, 1.36 * max(rates))  # room for the labels behind the bars
        axes.invert_yaxis()
        axes.tick_params(labelsize=7.5)
        axes.set_xlabel("GB/s of what the work must move; line: limit", fontsize=7.5)
        axes.set_title(title(section), loc="left", fontsize=9.5)
    figure.suptitle(heading, fontsize=10)
    write_figure(figure, path, dpi=130)


# ---- commands ------------------------------------------------------------------------------------------------------


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, failures and Ctrl-C end the command in one line; whoever started processes has ended them."""
    try:
        with running():
            yield
    except KeyboardInterrupt as interrupt:
        raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from interrupt
    finally:
        say("")


def say(line: str) -> None:
    """Show one line that the next one replaces. No spinner: its thread would take a processor from what is measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def report(
    name: str, config: Options, found: dict[str, Any], tables: Sequence[RenderableType], device: str = "cpu"
) -> None:
    """Print what ``avgpipe bench NAME`` found: one JSON object, or tables."""
    asked = {
        f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("json", "given", "plot")
    }
    given = {option: value for option, value in asked.items() if value not in (None, False, ())}
    command = shlex.join(["avgpipe", "bench", name, *words(given)])
    here = {"versions": versions(), "machine": machine(asked.get("threads", 1), device)}
    if config.json:
        print(json.dumps({"command": command, **here, **found}))
        return
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    for made in tables:
        screen.print(made)
    where = here["machine"].get("gpu") or f"{here['machine']['cpu']}, {here['machine']['cores']} cores"
    screen.print(f"{where}, torch {here['versions']['torch']}")
