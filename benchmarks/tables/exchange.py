"""Many hosts: seconds and bytes of the sum of a gradient; what membership keeps and costs."""

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


# ---- membership ------------------------------------------------------------------------------------------------------

_KINDS = {
    "killed": "a process is killed",
    "stopped": "a host is stopped",
    "hung": "a process hangs",
    "cut": "hosts are cut off for longer than the timeout",
}


def members_promises(record: Record) -> str:
    """A row for each number of hosts."""
    rows = [
        (
            f"{row['hosts']:,}",
            f"{row['minutes']:,.0f}",
            f"{row['steps']:,}",
            *(f"{row['faults'].get(kind, 0):,}" for kind in _KINDS),
            f"{row['joins']:,}",
            f"{row['rosters']:,}",
            f"{row['retrained']:,}",
            f"{row['events']:,}",
        )
        for row in record["rows"]
    ]
    heads = "steps: | killed: | stopped: | hung: | cut off: | joined: | rosters: | shares trained by others:"
    return table(f"hosts: | simulated minutes: | {heads} | events:", rows)


def members_seconds(record: Record) -> str:
    """A row for each kind of loss: median and longest seconds to the roster without the lost ones."""
    rows = []
    for kind, name in {**_KINDS, "": "from one step to the next, where it is twice the usual time"}.items():
        some = [row["roster_s"].get(kind, {}) if kind else row["pauses_s"] for row in record["rows"]]
        cells = (f"{s['median']:.3f}, {s['most']:.1f}" if s.get("count") else "-" for s in some)
        rows.append((name, *cells))
    hosts = (row["hosts"] for row in record["rows"])
    return table("seconds, median and most | " + " | ".join(f"{n:,} hosts:" for n in hosts), rows)


def members_cost(record: Record) -> str:
    """A row for each number of hosts: with a loss and a join a minute, and a report of each host each second."""
    rows = []
    for cost in record["costs"]:
        share = cost["served"]["share"]
        percent = (cost["share"], cost["decode_share"] + cost["encode_share"])
        rows.append(
            (
                f"{cost['hosts']:,}",
                f"{cost['events_per_s']:,.0f}",
                f"{cost['in_per_s']:,.0f}",
                f"{cost['out_per_s']:,.0f}",
                f"{(cost['in_bytes_per_s'] + cost['out_bytes_per_s']) / 1000:,.0f}",
                *(f"{100 * part:.2f} %" for part in percent),
                f"{100 * share:.2f} %" if share <= 0.05 else f"**{100 * share:.2f} %**",
            )
        )
    heads = "events that the state machine handles in a second of a core: | messages in, each second:"
    heads += " | out: | kB/s: | state machine: | JSON: | the coordinator with its sockets, of a core:"
    return table(f"hosts: | {heads}", rows)


def members_sizes(record: Record) -> str:
    """A row for each number of hosts: bytes of one change."""
    rows = []
    for cost in record["costs"]:
        hosts, met = cost["hosts"], cost["meeting"]
        rows.append(
            (
                f"{hosts:,}",
                f"{cost['roster_bytes'] / 1000:,.1f} kB",
                f"{cost['change_bytes']:,} B",
                f"{hosts * cost['roster_bytes'] / 1e6:,.1f} MB",
                f"{(cost['roster_bytes'] + hosts * cost['change_bytes']) / 1e6:,.2f} MB",
                f"{met['messages']:,}",
                f"{met['bytes'] / 1e6:,.1f} MB",
            )
        )
    heads = "whole roster: | what a change sends of it: | a change, if all got it whole: | as it is:"
    return table(f"hosts: | {heads} | messages of a meeting of all: | bytes:", rows)
