"""``avgpipe bench``: avgpipe, its alternatives, and the limit of the machine, in one run; the shared report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy
import torch
from rich.console import Group
from rich.text import Text

from avgpipe.cli.doctor import examine
from avgpipe.cli.options import Options, words
from avgpipe.cli.output import CommandFailed, answer, grid, running, show_status
from avgpipe.device import free_bytes
from avgpipe.errors import nearest
from avgpipe.units import format_bytes, format_seconds

_INTERRUPTED = 130
_USABLE = 0.9  # share of the free memory; the rest is for allocators, compilers and other processes
_STYLES = {"ours": "bold", "baseline": "", "limit": "dim"}


Role = Literal["ours", "baseline", "limit"]


class Way(NamedTuple):
    """One way to do the work of a section.

    Attributes:
        role: Its role in the table; fractions are of the first "limit".
        bytes_per_element: Bytes that the work must move for each of the section's elements, whatever else
            this way moves; None if the work is not moving bytes.
        run: Does the work, once, or the number of times that it is called with.
        simulated_s: Simulated seconds, where they are known.
    """

    name: str
    role: Role
    bytes_per_element: float | None = None
    run: Callable[..., Any] = lambda: None
    simulated_s: float | None = None


def summarise(
    head: Mapping[str, Any],
    ways: Sequence[Way],
    samples: Sequence[Sequence[float]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Make a section, one JSON object.

    Args:
        head: ``question``, ``case``, ``asks`` (the question in words) and, where bytes are moved, ``elements``.
        ways: In the order of the table.
        samples: Seconds of each way, by sample.
        skipped: Names of ways that cannot run here, and why.
    """
    quartiles = [1e3 * numpy.quantile(seconds, (0.25, 0.5, 0.75)) for seconds in samples]
    medians = {way.name: float(q[1]) for way, q in zip(ways, quartiles)}
    speeds = {way.name: (way.bytes_per_element or 1) / medians[way.name] for way in ways}
    limit = next((way.name for way in ways if way.role == "limit"), None)
    rows = []
    for way, (first, median, third) in zip(ways, (q.tolist() for q in quartiles)):
        others = [other.name for other in ways if way.role == "ours" and other.role == "baseline"]
        row: dict[str, Any] = {"name": way.name, "role": way.role}
        row |= {"median_ms": median, "quartile1_ms": first, "quartile3_ms": third}
        row |= {"fraction_of_limit": None if limit is None else speeds[way.name] / speeds[limit]}
        row |= {"ratios": {other: medians[other] / median for other in others}}
        if way.bytes_per_element is not None:
            row["bytes_per_element"] = way.bytes_per_element
            row["gb_per_s"] = head["elements"] * speeds[way.name] / 1e6
        if way.simulated_s is not None:
            row |= {"simulated_ms": 1e3 * way.simulated_s, "over_simulated": median / way.simulated_s / 1e3}
        rows.append(row)
    left_out = [{"name": name, "reason": reason} for name, reason in skipped.items()]
    return {**head, "limit": limit, "rows": rows, "skipped": left_out}


# Columns besides the times, where rows have them: the key in a row, and how it is written.
_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "of limit": ("fraction_of_limit", "{:.2f}".format),
    "bytes/el.": ("bytes_per_element", "{:g}".format),
    "GB/s": ("gb_per_s", "{:.3g}".format),
    "simulated": ("simulated_ms", lambda ms: format_seconds(ms / 1e3)),
    "over it": ("over_simulated", "{:.3f}".format),
}


def table(section: Mapping[str, Any]) -> Group:
    """Format a section. "ours is": how many times longer a baseline took than avgpipe's first row."""
    rows = section["rows"]
    ratios: dict[str, float] = next((row["ratios"] for row in rows if row["role"] == "ours"), {})
    cells = []
    for row in rows:
        first, median, third = (
            format_seconds(row[f"{q}_ms"] / 1e3) for q in ("quartile1", "median", "quartile3")
        )
        found = {"": row["name"], "median": median, "quartiles": f"{first} - {third}"}
        found |= {h: write(row[key]) for h, (key, write) in _COLUMNS.items() if row.get(key) is not None}
        if row["name"] in ratios:
            found["ours is"] = f"{ratios[row['name']]:.2f}x"
        cells.append(found)
    made = grid(cells, styles=[_STYLES[row["role"]] for row in rows])
    notes = [section["asks"], f"limit: {section['limit']}" if section["limit"] else ""]
    notes += [f"left out: {skipped['name']}: {skipped['reason']}" for skipped in section["skipped"]]
    return Group(Text(title(section), style="bold"), made, Text("\n".join(filter(None, notes))), "")


def title(section: Mapping[str, Any]) -> str:
    case, size = section["case"], section.get("elements")
    elements = "" if size is None or case == format_bytes(size) else f", {size / 1e6:g} M elements"
    return f"{section['question']}, {case}{elements}"


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not among the known ones. ValueError."""
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name}: {nearest(name, tuple(known))}")


def check_memory(option: str, value: int, bytes_each: float, device: str = "cpu") -> None:
    """Refuse a size that exceeds the memory. ValueError."""
    needed, free = value * bytes_each, free_bytes(torch.device(device))
    if needed > _USABLE * free:
        raise ValueError(
            f"{option} {value}: needs {format_bytes(needed)} and {format_bytes(free)} are free, of which {_USABLE:.0%} "
            f"may be used; use {option} {int(_USABLE * free / bytes_each) // 8 * 8} or less"
        )


@contextmanager
def measuring() -> Iterator[None]:
    """Turn failures and Ctrl-C inside into one line; the processes have then been ended by their launcher."""
    try:
        with running():
            yield
    except KeyboardInterrupt as interrupt:
        raise CommandFailed("interrupted; the processes are ended", _INTERRUPTED) from interrupt
    finally:
        show_status("")


def report(name: str, config: Options, sections: Sequence[Mapping[str, Any]], notes: str = "") -> None:
    """Print the result of ``avgpipe bench NAME``, as one JSON object or as tables."""
    facts = examine().facts
    facts["machine"]["threads"] = getattr(config, "threads", 1)
    command = shlex.join(["avgpipe", "bench", name, *words(config.complete)])
    found = {"command": command, **facts, "sections": sections}
    machine = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    machine += f", torch {facts['versions']['torch']}"
    answer(config.json, found, *map(table, sections), notes, machine)
