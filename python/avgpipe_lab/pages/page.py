"""The page of a run, of several runs, or of a comparison: the content of their folders as charts and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from avgpipe import __version__
from avgpipe.cli.output import answer, arguments, check_file, running
from avgpipe.files import write_atomically
from avgpipe.report.course import numbers
from avgpipe.report.pictures import Curve, Point
from avgpipe.timeline.html import timeline_sections
from avgpipe.timeline.page import Block, Chart, Line, Page, Section, Sentences, Table
from avgpipe.units import duration, format_bytes
from avgpipe_lab.commands import ReportConfig
from avgpipe_lab.compare import text
from avgpipe_lab.compare.comparison import Comparison, format_figure
from avgpipe_lab.pages.folders import Run, read_folders

_MOST_POINTS = 1500  # of a line: a screen cannot show more
_LEAST_POINTS, _POINTS = 100, 9000  # of a line at least, and of all lines of a chart together
_SPEED_POINTS = 150  # of the speed: each is the mean over some batches
_SPAN = 5.0  # an axis is logarithmic from this ratio of largest to smallest value
_MIB = 2**20


def report_page(runs: Sequence[Run], comparisons: Sequence[Comparison] = ()) -> Page:
    """Make the page. What the folders lack is left out; the page says so where a reader would look for it."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    if len(comparisons) == 1:
        title = f"{comparisons[0].what}: systems compared"
    titles = dict.fromkeys(filter(None, (run.title for run in runs)))
    about = "; ".join([*titles, f"written by avgpipe {__version__}"])
    records = {run.name: run.timeline for run in runs if run.timeline is not None}
    recent = {run.name: found for run in runs if (found := run.recent()) is not None}
    names = {run.name: place for place, run in enumerate(runs)}
    sections = [
        *map(_compared, comparisons),
        Section("Summary", (_summary(runs),)),
        Section("Learning", tuple(_learning(runs))),
        *timeline_sections(records, recent, names),
        _workers(runs),
        _warnings(runs),
        Section("Plan and versions", (_plans(runs), *_options(runs))),
    ]
    shown = tuple(section for section in sections if section.blocks)
    return Page(title, about, tuple(names), shown)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _compared(comparison: Comparison) -> Section:
    rows = []
    for outcome in comparison.outcomes:
        cells = text.cells(comparison, outcome)
        rows.append(tuple(f"{cell} \u2605" if best else cell for cell, best in cells))
    table = Table(tuple(text.headings(comparison)), tuple(rows), "\u2605 the best of its column")
    notes = Sentences((*text.notes(comparison), text.advice(comparison)))
    return Section("Systems compared", (table, notes))


def _summary(runs: Sequence[Run]) -> Table:
    facts = [{name: fact(run) for name, fact in _FACTS.items()} for run in runs]
    known = [name for name in _FACTS if any(of_run[name] not in (None, "") for of_run in facts)]
    return _beside(runs, "run", [{name: _cell(of_run[name]) for name in known} for of_run in facts])


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _last_row(run: Run) -> Mapping[str, Any]:
    return run.rows[-1] if run.rows else {}


def _asked(run: Run, name: str) -> Any:
    """Return a word or number of the plan, or of the summary."""
    value = run.summary.get(name, run.plan.get(name))
    return value if isinstance(value, str | int | float) else None


def _figure(run: Run, name: str, form: Callable[[float], str] = format_figure) -> str | None:
    value = run.summary.get(name)
    return None if value is None else form(value)


def _batches(run: Run) -> str | None:
    done = run.summary.get("batches")
    done = sum(row["kind"] == "train" for row in run.rows) if done is None else done
    total = next((row["total_batches"] for row in run.rows if row.get("total_batches")), None)
    return f"{done} of {total}, not finished" if not run.summary and total else f"{done}"


def _metric(run: Run, name: str) -> str | None:
    value = _figure(run, name)
    return None if value is None else f"{run.summary.get('metric_name', 'metric')} {value}"


def _trained(run: Run) -> str | None:
    seconds = run.summary.get("train_seconds", _last_row(run).get("seconds"))
    return None if seconds is None else duration(seconds)


def _target(run: Run) -> str | None:
    target = run.summary.get("target")
    if target is None:
        return None
    reached = run.summary.get("seconds_to_target")
    when = f"after {duration(reached)}" if reached is not None else "not reached"
    return f"{str(target).replace('=', ' ')}: {when}"


def _busy(run: Run) -> str | None:
    return ", ".join(f"{100 * share:.0f} %" for share in numbers(run.summary.get("worker_busy_fraction")))


def _peaks(run: Run) -> str | None:
    return ", ".join(map(format_bytes, numbers(run.summary.get("peak_memory_bytes"))))


_FACTS: dict[str, Callable[[Run], Any]] = {
    "system": lambda run: _asked(run, "system"),
    "stages": lambda run: _asked(run, "stages"),
    "pipelines": lambda run: _asked(run, "pipelines"),
    "micro-batches": lambda run: _asked(run, "micro_batches"),
    "schedule": lambda run: _asked(run, "schedule"),
    "batch size": lambda run: _asked(run, "batch_size"),
    "batches": _batches,
    "samples": lambda run: run.summary.get("samples", _last_row(run).get("samples")),
    "training": _trained,
    "samples/s": lambda run: _figure(run, "samples_per_second"),
    "last": lambda run: _metric(run, "metric"),
    "best": lambda run: _metric(run, "best_metric"),
    "target": _target,
    "busy": _busy,
    "peak memory": _peaks,
    "updates skipped": lambda run: run.summary.get("skipped_updates") or None,
}


def _plans(runs: Sequence[Run]) -> Table:
    """Make the table of plans, field by field, with options and versions."""
    return _beside(runs, "plan", [{**_words(run.plan), **_versions(run)} for run in runs])


def _options(runs: Sequence[Run]) -> list[Table]:
    asked = [{n: v for n, v in _words(run.options).items() if n not in run.plan} for run in runs]
    return [_beside(runs, "options", asked)] if any(asked) else []


def _beside(runs: Sequence[Run], what: str, columns: Sequence[Mapping[str, str]]) -> Table:
    """Make a table with a column for each run."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple((name, *(column.get(name, "-") for column in columns)) for name in names)
    return Table((what, *(run.name for run in runs)), rows, "", (None, *range(len(runs))))


def _words(values: Mapping[str, Any]) -> dict[str, str]:
    """Format the values that were chosen; values that are None or empty are left out."""
    left_out: tuple[Any, ...] = ("", [], None)
    return {str(n): str(value) for n, value in values.items() if value is not False and value not in left_out}


def _versions(run: Run) -> dict[str, str]:
    versions = run.summary.get("versions", {})
    return {f"version of {name}": str(version) for name, version in versions.items()}


def _warnings(runs: Sequence[Run]) -> Section:
    blocks: list[Block] = []
    for place, run in enumerate(runs):
        said = (*run.warnings, *run.problems)
        if said:
            blocks.append(Sentences(said, run.name if len(runs) > 1 else "", place))
    return Section("Warnings", tuple(blocks))


# ---- charts ----------------------------------------------------------------------------------------------------------


def _learning(runs: Sequence[Run]) -> list[Chart]:
    loss: list[Line] = []
    metric: list[Line] = []
    valid: list[Line] = []
    drift: list[Line] = []
    for place, run in enumerate(runs):
        curve, judged = Curve.of(run.rows), str(run.summary.get("metric_name", "metric"))
        loss.append(_line(place, 0, "each batch", curve.loss, "faint"))
        loss.append(_line(place, 0, "smoothed", curve.smoothed()))
        metric.append(_line(place, 0, judged, curve.metric, "marks"))
        valid.append(_line(place, 0, "validation loss", curve.valid_loss, "marks"))
        drift.append(_line(place, 0, "from the reference", curve.to_reference, "marks"))
        drift.append(_line(place, 1, "between replicas", curve.between, "marks"))
    names = ", ".join(dict.fromkeys(line.name for line in metric))
    found = [
        _chart("loss", "Training loss", "loss", loss),
        _chart("metric", "Validation metric", names, metric),
        _chart("valid-loss", "Validation loss", "loss", valid),
        _chart("rate", "Learning rate", "learning rate", _of_rows(runs, "lr", "learning rate"), scale="zero"),
        _chart("norm", "Norm of the gradients", "norm", _of_rows(runs, "grad_norm", "gradient norm")),
        _chart(
            "speed", "Speed", "samples per second", [_speed(place, run) for place, run in enumerate(runs)],
            scale="zero",
        ),
        _chart(
            "drift", "Drift of the replicas", "distance over the reference's norm", drift,
                "If averaging works, the distances level off; if they grow through the run, pull harder or "
                "average more often.", "zero",
        ),
    ]  # fmt: skip
    return [chart for chart in found if chart.lines]


def _workers(runs: Sequence[Run]) -> Section:
    """Make the charts of memory and busy shares at validations, with a line per worker."""
    memory = _per_worker(runs, "peak_memory_bytes", 1 / _MIB)
    busy = _per_worker(runs, "worker_busy_fraction", 1.0)
    charts = (
        _chart(
            "memory", "Memory", "peak so far, MiB", memory,
                "The peak of each worker so far: on a CPU that of its whole process, on an accelerator what torch "
                "had allocated.", "zero",
        ),
        _chart("busy", "Busy", "computing share of the time", busy, "Since the previous validation.", "share"),
    )  # fmt: skip
    missing = [run.name for run in runs if not any(numbers(row.get("peak_memory_bytes")) for row in run.rows)]
    shown: tuple[Block, ...] = tuple(chart for chart in charts if chart.lines)
    if missing:
        said = f"{text.listed(missing)}: no memory was recorded over time; the summary has the known peaks"
        shown = (*shown, Sentences((said,)))
    return Section("Workers over time", shown, "At validations.")


def _per_worker(runs: Sequence[Run], name: str, scale: float) -> list[Line]:
    lines = []
    for place, run in enumerate(runs):
        rows = [row for row in run.rows if numbers(row.get(name))]
        for worker in range(max((len(row[name]) for row in rows), default=0)):
            known = [row for row in rows if worker < len(row[name])]
            points = [Point(row["seconds"], row["samples"], scale * row[name][worker]) for row in known]
            lines.append(_line(place, worker, f"worker {worker}", points, "marks"))
    return lines


def _of_rows(runs: Sequence[Run], name: str, words: str) -> list[Line]:
    """Make a line for each run whose batches have this number."""
    lines = []
    for place, run in enumerate(runs):
        rows = [row for row in run.rows if row["kind"] == "train" and row.get(name) is not None]
        points = [Point(row["seconds"], row["samples"], row[name]) for row in rows]
        lines.append(_line(place, 0, words, points))
    return lines


def _speed(place: int, run: Run) -> Line:
    """Make the line of samples per second, each point the mean over some batches."""
    rows = [row for row in run.rows if row["kind"] == "train"]
    step = -(-len(rows) // _SPEED_POINTS) or 1
    marks = [(0.0, 0), *((row["seconds"], row["samples"]) for row in rows[step - 1 :: step])]
    points = [Point(s, n, (n - of) / (s - begun)) for (begun, of), (s, n) in pairwise(marks) if s > begun]
    return _line(place, 0, "samples per second", points)


def _line(
    run: int,
    part: int,
    name: str,
    points: Sequence[Point],
    style: Literal["line", "faint", "marks"] = "line",
) -> Line:
    columns: tuple[Sequence[float], ...] = tuple(zip(*points)) if points else ((), (), ())
    seconds, samples, values = columns
    return Line(run, part, name, samples, seconds, values, style)


def thinned(line: Line, most: int) -> Line:
    """Thin a line to ``most`` points, the least and greatest of every stretch, so that no spike is lost."""
    values: Sequence[Any] = line.values
    if len(values) <= most:
        return line
    width = -(-len(values) // (most // 2))
    kept: list[int] = []
    for first in range(0, len(values), width):
        stretch = range(first, min(first + width, len(values)))
        kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    samples, seconds, shown = ([of[n] for n in kept] for of in (line.samples, line.seconds, values))
    return replace(line, samples=samples, seconds=seconds, values=shown)


def _chart(
    name: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    note: str = "",
    scale: Literal["linear", "log", "zero", "share"] = "linear",
) -> Chart:
    """Make a chart of the lines with points; values over orders of magnitude get a logarithmic axis."""
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, len(lines))))
    known = tuple(thinned(line, most) for line in lines if line.values)
    values = [value for line in known for value in line.values if value is not None]
    if scale == "linear" and values and 0 < min(values) < max(values) / _SPAN:
        scale = "log"
    return Chart(name, title, unit, known, note, scale)


# ---- avgpipe report --------------------------------------------------------------------------------------------------


_NAME = "report.html"


def run(config: ReportConfig) -> None:
    with arguments():
        paths = [Path(folder) for folder in config.runs]
        out = Path(config.out or (paths[0] / _NAME if len(paths) == 1 else _NAME))
        runs, comparisons = read_folders(paths)
        check_file(str(out))
        content = report_page(runs, comparisons).html().encode()
    with running():
        write_atomically(out, content)
    found = {"report": str(out), "bytes": len(content), "runs": [one.name for one in runs]}
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.problems]
    answer(
        config.json,
        {**found, "problems": problems},
        *problems,
        f"report: {out} ({format_bytes(len(content))})",
    )
