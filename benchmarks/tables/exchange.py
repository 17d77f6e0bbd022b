"""The sum of a gradient over many hosts: seconds and bytes by way and number of hosts."""

from __future__ import annotations

from benchmarks.tables.markdown import MIB, Record, duration, table


def exchange_seconds(record: Record) -> str:
    """A row for each network and way."""
    rows = []
    for network in dict.fromkeys(row["network"] for row in record["rows"]):
        for way in dict.fromkeys(row["way"] for row in record["rows"]):
            some = [r for r in record["rows"] if (r["network"], r["way"]) == (network, way)]
            rows.append((network, way, *(duration(row["seconds"]) for row in some)))
    return table("network | way | " + " | ".join(f"{n:,} hosts:" for n in record["hosts"]), rows)


def exchange_bytes(record: Record) -> str:
    """A row for each way, at the largest number of hosts."""
    gradient, most = record["mib"] * MIB, max(record["hosts"])
    rows = []
    for way in dict.fromkeys(row["way"] for row in record["rows"]):
        few, many = (
            next(r for r in record["rows"] if (r["network"], r["way"], r["hosts"]) == ("groups", way, hosts))
            for hosts in (4, most)
        )
        rows.append(
            (
                way,
                *(f"{row['sent_bytes'] / gradient:,.2f}" for row in (few, many)),
                f"{many['messages']:,}",
                f"{many['shared_bytes'] / gradient:,.1f}",
            )
        )
    return table(
        f"way | gradients that the busiest host sends, 4 hosts: | {most:,} hosts: | messages that it sends: | "
        "gradients that leave the busiest group:",
        rows,
    )
