"""Models that train in stages as on one device."""

from __future__ import annotations

from benchmarks.tables.markdown import Record, table


def vision(record: Record) -> str:
    rows = []
    for name, row in record["rows"].items():
        library, _, model = name.partition(" ")
        differences = [row["differences"].get(str(stages)) for stages in record["stages"]]
        cells = ["" if value is None else _difference(value, record["bound"]) for value in differences]
        what = "equal" if row["equal"] else "refused" if "refused" in row else "**unequal**"
        if "failed" in row:
            what = "**failed**"
        words = row.get("refused") or row.get("failed") or ""
        parameters = f"{row['parameters'] / 1e6:.2f} M"
        rows.append(
            (library, model, parameters, row["by"], row["layers"], *cells, what + f": {words}" * bool(words))
        )
    stages = " | ".join(f"K = {k}:" for k in record["stages"])
    return table(f"library | model | parameters: | traced by | layers: | {stages} |", rows)


def vision_count(record: Record) -> str:
    found = record["rows"].values()
    equal = sum(row["equal"] for row in found)
    refused = sum("refused" in row for row in found)
    return table(
        "tried: | equal: | refused with a message: | neither: | by torch.export:",
        [
            (
                len(found),
                equal,
                refused,
                len(found) - equal - refused,
                sum(r["by"] == "torch.export" for r in found),
            )
        ],
    )


def _difference(value: float, bound: float) -> str:
    text = f"{value:.0e}" if value else "0"
    return text if value < bound else f"**{text}**"
