"""Which families of transformers train in stages as on one device."""

from __future__ import annotations

from collections import Counter

from benchmarks.tables.markdown import Record, against, table

_NOT_BUILT = "not built"
_BARS = {
    "with a pipeline plan": ("equal, of those built", 0.90),
    "named without one": ("equal", 8),
}


def families_count(record: Record) -> str:
    """Count verdicts by group; the bar is for the share of those that could be built, or for a number."""
    rows = []
    for group in dict.fromkeys(row["group"] for row in record["rows"].values()):
        found = Counter(row["verdict"] for row in record["rows"].values() if row["group"] == group)
        built = found.total() - found[_NOT_BUILT]
        wrong = found["wrong"] + found["failed"]
        what, bar = _BARS.get(group, ("", 0.0))
        reached = found["equal"] / built if bar < 1 else float(found["equal"])
        cells = (
            found.total(),
            found[_NOT_BUILT],
            found["equal"],
            found["refused"],
            f"**{wrong}**" if wrong else 0,
        )
        shown = against(reached, least=bar, digits=3 if bar < 1 else 0)
        rows.append((group, *cells, shown, f"{bar:g} {what}" if what else ""))
    return table(
        "families | tried: | not built: | equal: | refused: | wrong or failed: | share equal: | bar", rows
    )


def families_not_equal(record: Record) -> str:
    """List the reason for each that is not equal."""
    rows = [
        (
            f"`{name}`",
            row["verdict"] if row["verdict"] in (_NOT_BUILT, "refused") else f"**{row['verdict']}**",
            _cell(row),
        )
        for name, row in record["rows"].items()
        if row["verdict"] != "equal"
    ]
    return table("family | verdict | message", rows)


def _cell(row: Record) -> str:
    return str(row.get("reason", "")).replace("|", "\\|").replace("<", "&lt;")


def families_equal(record: Record) -> str:
    """List the largest relative differences of each that is equal."""
    rows = []
    for name, row in record["rows"].items():
        if row["verdict"] == "equal":
            differences = [
                row[where][what] for where in ("one", "two") for what in ("outputs", "gradients", "weights")
            ]
            title = f"`{name}`" if name == row["class"] else f"`{name}`, {row['class']}"
            rows.append(
                (title, f"{row['parameters'] / 1e6:.1f} M", row["dtype"], *map(_difference, differences))
            )
    columns = "outputs: | gradients: | weights: | outputs, two processes: | gradients, two: | weights, two:"
    return table(f"family, class | parameters: | dtype | {columns}", rows)


def _difference(value: float) -> str:
    return f"{value:.0e}" if value else "0"
