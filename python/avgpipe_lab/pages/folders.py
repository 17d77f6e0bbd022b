"""Read folders of runs and of comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from avgpipe.errors import reason
from avgpipe.report.course import limited, read_metrics, read_object, stretches, unbroken
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.compare.comparison import Comparison, Figures, SystemResult

_RUN_FILES = ("metrics.jsonl", "summary.json", "run.json", "timeline.json")
_COMPARISON = "compare.json"
_LISTED = 5  # folders named in an error


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
        name: Name of the run beside others.
        rows: Rows of metrics.jsonl, each with a kind, a batch and seconds.
        summary: Empty for a run that has not finished; None for numbers that are not finite, or huge.
        plan: Content of plan.json.
        options: Content of run.json.
        timeline: Timeline of the last batches; None if there is none.
        problems: Sentences on files that could not be read.
    """

    name: str
    path: Path
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    plan: Mapping[str, Any]
    options: Mapping[str, Any]
    timeline: Timeline | None
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, name: str = "") -> Run:
        """Read a folder; a missing or damaged file gives an empty field, and damage a problem."""
        problems: list[str] = []
        files = {part: read_object(path / f"{part}.json", problems) for part in ("summary", "plan", "run")}
        files["summary"] = limited(files["summary"])
        timeline = None
        if (path / "timeline.json").is_file():
            try:
                timeline = Timeline.from_chrome_trace(path / "timeline.json")
            except (ValueError, OSError) as error:
                problems.append(f"timeline.json: {reason(error)}")
        parts = files["summary"], files["plan"], files["run"], timeline, tuple(problems)
        return cls(name or path.resolve().name, path, tuple(read_metrics(path)), *parts)

    @property
    def title(self) -> str:
        """Describe what was trained."""
        asked = {**self.options, **self.summary}
        words = [str(asked[name]) for name in ("workload", "preset") if asked.get(name)]
        title = self.summary.get("title")
        return " ".join(words) + (f" ({title})" if title else "")

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of the runtime."""
        given = (self.summary.get("warnings"), *(row.get("warnings") for row in self.rows))
        return next(filter(None, given), [])

    def recent(self) -> Timeline | None:
        """Return the longest stretch of the timeline without a pause, such as a validation; None without events."""
        if self.timeline is None or not self.timeline.events:
            return None
        return unbroken(self.timeline, stretches(self.rows))


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _RUN_FILES)


def read_folders(paths: Sequence[Path]) -> tuple[list[Run], list[Comparison]]:
    """Read folders of runs and of comparisons, with all runs of these; ValueError for a folder that is neither."""
    found: dict[Path, tuple[Path, Path]] = {}  # the given folder, and the run's own folder
    comparisons = []
    for path in paths:
        compares = (path / _COMPARISON).is_file()
        if not compares and not is_run(path):
            raise ValueError(_no_run(path))
        for run in runs_of_comparison(path) if compares else [path]:
            found.setdefault(run.resolve(), (path, run))
        comparisons += [read_comparison(path)] if compares else []
    names = [_name(asked, run, several=len(paths) > 1) for asked, run in found.values()]
    full = [name if names.count(name) == 1 else str(run) for name, run in zip(names, found)]
    return [Run.read(run, name) for run, name in zip(found, full)], comparisons


def runs_of_comparison(path: Path) -> list[Path]:
    """Return the runs in a comparison's folder, all seeds of each system; systems in the order of the table."""
    order = [outcome.system for outcome in read_comparison(path).outcomes]
    places = {name: place for place, name in enumerate(order)}
    systems = sorted(
        (p for p in path.iterdir() if p.is_dir()), key=lambda p: (places.get(p.name, len(places)), p.name)
    )
    return [
        run for system in systems for run in ([system] if is_run(system) else filter(is_run, _inside(system)))
    ]


def _inside(path: Path) -> list[Path]:
    return sorted((p for p in path.iterdir() if p.is_dir()), key=lambda p: (len(p.name), p.name))


def _name(asked: Path, run: Path, several: bool) -> str:
    if asked == run:
        return run.resolve().name
    inside = str(run.relative_to(asked))
    return f"{asked.resolve().name}/{inside}" if several else inside


def _no_run(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: no such folder; give one that avgpipe train or avgpipe compare wrote"
    runs = [str(p) for p in _inside(path) if is_run(p) or (p / _COMPARISON).is_file()]
    hint = "give one that avgpipe train or avgpipe compare wrote"
    if runs:
        more = f" and {len(runs) - _LISTED} more" if len(runs) > _LISTED else ""
        hint = f"did you mean {', '.join(runs[:_LISTED])}{more}?"
    return f"{path}: holds neither {' nor '.join(_RUN_FILES[:2])} nor {_COMPARISON}; {hint}"


def read_comparison(path: Path) -> Comparison:
    """Read compare.json; ValueError if it is damaged."""
    content = read_object(path / _COMPARISON, [])
    names = [field.name for field in fields(Comparison) if field.name != "outcomes"]
    try:
        outcomes = tuple(map(_outcome, content["systems"]))
        return Comparison(outcomes=outcomes, **{name: content[name] for name in names})
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path / _COMPARISON} is damaged ({type(error).__name__}: {reason(error)}): give the folders of its runs"
        ) from error


def _outcome(row: Mapping[str, Any]) -> SystemResult:
    """Read a row of compare.json."""
    found = [_figures(of) for of in row.get("runs", [row]) if "samples" in of]
    first, others, warnings = found[0] if found else None, tuple(found[1:]), tuple(row["warnings"])
    return SystemResult(row["system"], row["status"], first, row["reason"], warnings, others)


def _figures(row: Mapping[str, Any]) -> Figures:
    return Figures(**{field.name: row[field.name] for field in fields(Figures)})
