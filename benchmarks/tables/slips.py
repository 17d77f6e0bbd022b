"""Slips of ordinary training scripts, and whether they are reported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from benchmarks.tables.markdown import Record, table

_SILENT = "SILENT"


def slips_count(record: Record) -> str:
    """Count the verdicts of each slip over models and plans."""
    rows = []
    for slip, counts in _by_slip(record).items():
        what = record["slips"][slip]
        cells = [_bold(verdict, counts[verdict]) for verdict in record["verdicts"]]
        rows.append((slip, what["what"], *cells))
    columns = " | ".join(f"{verdict}:" for verdict in record["verdicts"])
    return table(f"slip | description | {columns}", rows)


def slips_plans(record: Record) -> str:
    """Count the verdicts of each plan."""
    rows = []
    for plan in record["plans"]:
        counts = _sum(of_slip.get(plan, {}) for of_slip in record["counts"].values())
        rows.append((plan, *(_bold(verdict, counts[verdict]) for verdict in record["verdicts"])))
    columns = " | ".join(f"{verdict}:" for verdict in record["verdicts"])
    return table(f"plan | {columns}", rows)


def slips_silent(record: Record) -> str:
    """List silent differences: for each slip the models, the plans and the largest difference."""
    found = defaultdict(list)
    for trial in record["trials"]:
        if trial["verdict"] == _SILENT:
            found[trial["slip"]].append(trial)
    rows = []
    for slip, trials in found.items():
        worst = max(trials, key=lambda trial: trial.get("apart", 0.0))
        models = dict.fromkeys(trial["model"] for trial in trials)
        plans = [plan for plan in record["plans"] if any(trial["plan"] == plan for trial in trials)]
        where = f"`{worst['where']}` of {worst['model']}, {worst['plan']}"
        rows.append((slip, ", ".join(models), _plans(plans, record), f"{worst['apart']:.1g}", where))
    if not rows:
        return "None."
    return table("slip | models | plans | largest relative difference: | of", rows)


def _plans(some: list[str], record: Record) -> str:
    left = [plan for plan in record["plans"] if plan not in some]
    if not left:
        return "all"
    return f"all but {left[0]}" if len(left) == 1 and len(some) > 1 else ", ".join(some)


def slips_design(record: Record) -> str:
    """List the slips that differ by design, and where this is documented."""
    rows = []
    for slip, counts in _by_slip(record).items():
        if counts["by design"]:
            why = (
                record["slips"][slip]["design"]
                or "BatchNorm, buffers of pipelines, or random numbers of layers"
            )
            rows.append((slip, counts["by design"], why))
    return table("slip | trials: | documented as", rows)


def slips_ranks(record: Record) -> str:
    """List the outcomes of slips in two processes."""
    rows = [(row["slip"], row["what"], row["verdict"], _cell(row["said"])) for row in record.get("ranks", ())]
    return table("slip | description | verdict | message", rows)


def _by_slip(record: Record) -> dict[str, Counter[str]]:
    return {slip: _sum(of_plans.values()) for slip, of_plans in record["counts"].items()}


def _sum(counts: Iterable[dict[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def _bold(verdict: str, count: int) -> str:
    if not count:
        return ""
    return f"**{count}**" if verdict == _SILENT else str(count)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
