"""Read folders of runs and of comparisons.

Nothing in a file is trusted: a value that is not a number where one is expected is left out, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from avgpipe.errors import reason
from avgpipe.report.course import number, parse_target, read_metrics, read_object, stretches, unbroken
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.compare.comparison import OK, Comparison, Figures, SystemResult

_RUN_FILES = ("metrics.jsonl", "summary.json", "run.json", "timeline.json")
_COMPARISON = "compare.json"
_LISTED = 5  # folders named in an error
_MOST_ROWS = 1024  # of a timeline, and pipelines: more cannot be drawn, and would take long to find out


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
        name: Name of the run beside others.
        rows: Rows of metrics.jsonl, each with a kind, a batch and seconds.
        summary: Empty for a run that has not finished.
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
        found = read_metrics(path)
        rows = tuple(row for row in found if _is_sound(row))
        if len(rows) < len(found):
            problems.append(
                f"metrics.jsonl: {len(found) - len(rows)} of {len(found)} rows are damaged and left out"
            )
        files = {part: read_object(path / f"{part}.json", problems) for part in ("summary", "plan", "run")}
        timeline = None
        if (path / "timeline.json").is_file():
            try:
                timeline = _drawable(Timeline.from_chrome_trace(path / "timeline.json"))
            except (ValueError, OSError, RecursionError) as error:
                problems.append(f"timeline.json: {reason(error)}")
        parts = files["summary"], files["plan"], files["run"], timeline, tuple(problems)
        return cls(name or path.resolve().name, path, rows, *parts)

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
        told = [self.summary.get("warnings"), *(row.get("warnings") for row in self.rows)]
        first = next((warnings for warnings in told if isinstance(warnings, list) and warnings), [])
        return list(map(str, first))

    def recent(self) -> Timeline | None:
        """Return the longest stretch of the timeline without a pause, such as a validation; None without events."""
        if self.timeline is None or not self.timeline.events:
            return None
        return unbroken(self.timeline, stretches(self.rows))


def _drawable(timeline: Timeline) -> Timeline:
    """Return the timeline; ValueError for one with more rows or pipelines than any run has."""
    for what, count in (("rows", timeline.stages), ("pipelines", len({e.pipeline for e in timeline.events}))):
        if count > _MOST_ROWS:
            raise ValueError(f"has {count} {what}: at most {_MOST_ROWS} can be drawn")
    return timeline


def _is_sound(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the fields that every reader needs, of the right types."""
    wanted = {"train": ("loss",), "valid": ("loss", "metric")}
    kind, distances = row["kind"], row.get("distances")
    if not isinstance(kind, str) or kind not in wanted or not all(name in row for name in wanted[kind]):
        return False
    values = [row["batch"], row.get("seconds")]
    values += [row[name] for name in ("samples", "loss", "metric") if row.get(name) is not None]
    sound = distances is None or (isinstance(distances, dict) and _are_sound(distances))
    return sound and all(number(value) is not None for value in values)


def _are_sound(distances: Mapping[str, Any]) -> bool:
    """Return whether distances are numbers, or null for values that were not finite."""
    norm, pairs = distances.get("norm"), distances.get("between")
    lists = [[norm], distances.get("to_reference"), *(pairs if isinstance(pairs, list) else [pairs])]
    known = [of for of in lists if of is not None]
    return all(isinstance(of, list) and all(v is None or number(v) is not None for v in of) for of in known)


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
    limit = number(content.get("memory_limit_bytes"))
    try:
        return Comparison(
            what=str(content["what"]),
            workers=int(content["workers"]),
            outcomes=tuple(map(_outcome, content["systems"])),
            metric_name=str(content["metric_name"]),
            lower_is_better=bool(content["lower_is_better"]),
            trivial=number(content.get("trivial")),
            target=_target(content.get("target")),
            memory_limit_bytes=None if limit is None else int(limit),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path / _COMPARISON} is damaged ({type(error).__name__}: {reason(error)}): give the folders of its runs"
        ) from error


def _target(target: Any) -> float | str | None:
    """Return a valid target; ValueError for an invalid one."""
    if target is not None:
        parse_target(target)
    return target  # type: ignore[no-any-return]  # a number, or as loss=2.1


def _outcome(row: Mapping[str, Any]) -> SystemResult:
    """Read a row of compare.json; KeyError, TypeError or ValueError for a damaged one."""
    if not isinstance(row, dict):
        raise TypeError(f"a system is a {type(row).__name__}")
    first, *others = [_figures(of) for of in row["runs"]] if row.get("runs") else [_figures(row)]
    status, why = str(row["status"]), str(row.get("reason") or "")
    warnings = tuple(map(str, row.get("warnings") or ()))
    if status == OK and first is None:
        raise ValueError("a system that finished has no figures")
    known = tuple(figures for figures in others if figures is not None)
    return SystemResult(str(row["system"]), status, first, why, warnings, known)


def _figures(row: Mapping[str, Any]) -> Figures | None:
    """Read the figures of a run: numbers, except for the schedule's name."""
    if "samples" not in row:
        return None
    values = {field.name: row[field.name] for field in fields(Figures)}
    optional = ("samples_to_target", "seconds_to_target", "metric", "best_metric")
    for name, value in values.items():
        if name == "schedule":
            values[name] = str(value)
        elif number(value) is None and not (value is None and name in optional):
            raise ValueError(f"{name}={value!r}")
    return Figures(**values)
