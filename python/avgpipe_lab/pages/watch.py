"""``avgpipe watch``: shows a run in a folder, until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from avgpipe.cli.output import answer, arguments
from avgpipe.units import duration, format_bytes
from avgpipe_lab.commands import WatchConfig
from avgpipe_lab.pages.live import LiveRun

_LOOK_S = 0.5  # seconds between two updates of a terminal's page
_BLOCKS = "▁▂▃▄▅▆▇█"
_PICTURE = 56  # columns
_STOPPED = "stopped: no process of this machine holds the lock of its checkpoints, and nothing is written"


def run(config: WatchConfig) -> None:
    with arguments():
        live = LiveRun(Path(config.run))
        live.look()
    console = Console(highlight=False, markup=False)
    if config.json or config.once:
        if console.is_terminal or config.json:
            answer(config.json, live.to_json(), page(live))
        else:
            print(line(live))
        return
    try:
        if console.is_terminal:
            _show(live, console)
        else:
            _print_lines(live, config.every_s)
    except KeyboardInterrupt:  # the run itself continues
        sys.exit(130)


def _show(live: LiveRun, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a page that keeps updating until the run ends; its last state stays on the terminal."""
    with Live(page(live), console=console, auto_refresh=False) as shown:
        while live.status == "running":
            sleep(_LOOK_S)
            live.look()
            shown.update(page(live), refresh=True)


def _print_lines(live: LiveRun, every_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Print a line now and then, and one at the end."""
    print(line(live), flush=True)
    waited = 0.0
    while live.status == "running":
        sleep(_LOOK_S)
        waited += _LOOK_S
        live.look()
        if waited >= every_s or live.status != "running":
            waited = 0.0
            print(line(live), flush=True)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def line(live: LiveRun) -> str:
    """Describe a run in one line."""
    facts = _facts(live)
    shown = ("loss", "speed", "left", "busy", "peak memory", "drift", "validation")
    said = [f"{name} {facts[name]}" for name in shown if name in facts]
    return "  ".join([f"{live.status}: batch {facts['batch']}", *said])


def page(live: LiveRun) -> RenderableType:
    """Show a run as a panel."""
    progress, facts = live.progress, _facts(live)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if progress.total:
        table.add_row("so far", ProgressBar(total=progress.total, completed=progress.batches, width=_PICTURE))
    for name, fact in facts.items():
        table.add_row(name, Text(fact))
    if progress.losses:
        table.add_row("loss so far", Text(sparkline(list(progress.losses), _PICTURE), style="cyan"))
    parts: list[RenderableType] = [table]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in progress.warnings]
    if live.status == "stopped":
        parts.append(Text(_STOPPED, style="yellow"))
    return Panel(Group(*parts), title=Text(f"{_what(live)}, {live.status}"), title_align="left")


def _what(live: LiveRun) -> str:
    asked = {**live.options, **live.plan}
    words = [str(asked[name]) for name in ("workload", "preset", "system") if asked.get(name)]
    return f"{live.path.resolve().name}: {', '.join(words)}" if words else live.path.resolve().name


def _facts(live: LiveRun) -> dict[str, str]:
    """Return what is known about a run, as texts by name."""
    progress, valid, age_s = live.progress, live.progress.valid, live.checkpoint_age_s
    of = f"/{progress.total}" if progress.total else ""
    found: dict[str, str | None] = {
        "batch": f"{progress.batches}{of}" + (f", epoch {progress.epoch}" if progress.epoch else ""),
        "trained": f"{progress.samples} samples in {duration(progress.seconds)}",
        "loss": f"{progress.losses[-1]:.4f}" if progress.losses else None,
        "learning rate": _maybe(progress.lr, "{:.3g}"),
        "speed": _maybe(progress.samples_per_second, "{:.1f} samples/s"),
        "left": duration(progress.left_s)
        if progress.left_s is not None and live.status == "running"
        else None,
        "busy": ", ".join(f"{100 * share:.0f} %" for share in live.busy),
        "peak memory": ", ".join(map(format_bytes, live.peaks)),
        "drift": _maybe(live.drift, "{:.2g} of the norm"),
        "before training": _validation(progress.before),
        "validation": _validation(valid) if valid.get("batch") else None,
        "updates skipped": str(valid["skipped_updates"]) if valid.get("skipped_updates") else None,
        "checkpoint": f"{duration(age_s)} old" if age_s is not None else None,
    }
    return {name: fact for name, fact in found.items() if fact}


def _maybe(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _validation(row: Any) -> str:
    """Format the metrics, or else the loss, of a validation, and after which batch it was."""
    values = row.get("metrics") or {"loss": row.get("loss")}
    said = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    when = f" after {row['batch']} batches" if row.get("batch") else ""
    return ", ".join(said) + when if said else ""


def sparkline(values: Sequence[float], columns: int) -> str:
    """Draw the values as a small picture, from least to greatest; more than ``columns`` are averaged first."""
    groups = min(columns, len(values))
    bounds = [len(values) * n // groups for n in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, span = min(means), max(means) - min(means)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(steps * (mean - low) / span) if span else 0] for mean in means)
