"""Pipelines on several hosts: a step, its bytes, and shares by speed."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import MIB, Record, against, ms, table

_OVER_GLOO, _GRADIENTS, _OF_SPEEDS = 1.15, 2.0, 0.95  # bars


def hosts_steps(record: Record) -> str:
    """A row for each number of hosts."""
    gradient = record["mib"] * MIB
    rows = []
    for row in record["rows"]:
        busiest = [max(row[f"avgpipe_{way}_bytes"]) / gradient for way in ("sent", "received")]
        rows.append(
            (
                row["hosts"],
                ms(row["gloo_s"]),
                *(
                    text
                    for name in ("avgpipe", "light", "warmup")
                    for text in (
                        ms(row[f"{name}_s"]),
                        against(row[f"{name}_over_gloo"], most=_OVER_GLOO if name != "warmup" else None),
                    )
                ),
                *(
                    "/".join(f"{b / MIB:.1f}" for b in row[f"avgpipe_{w}_bytes"])
                    for w in ("sent", "received")
                ),
                *(against(of, most=_GRADIENTS) for of in busiest),
                f"{max(row['gloo_sent_bytes']) / gradient:.2f}",
            )
        )
    return table(
        "hosts: | ms/all-reduce: | ms/step: | over all-reduce: | ms/step, 1 micro-batch: | over all-reduce: | "
        "ms/step in warm-up: | over all-reduce: | MiB sent a step by each host: | received: | "
        "gradients sent by the busiest: | received: | by all-reduce:",
        rows,
    )


def hosts_speeds(record: Record) -> str:
    """The samples per second of all hosts beside the sum of what each reaches alone."""
    alone = {one["speed"]: statistics.median(one["samples_per_s"]) for one in record["alone"]}
    limit, measured = (
        sum(map(alone.__getitem__, record["speeds"])),
        statistics.median(record["samples_per_s"]),
    )
    row = [
        " + ".join(f"{speed:g}" for speed in record["speeds"]),
        ", ".join(f"{rate:.1f}" for rate in alone.values()),
        f"{limit:.1f}",
        f"{measured:.1f}",
        against(measured / limit, least=_OF_SPEEDS),
    ]
    return table(
        "speeds of the hosts | samples/s alone, of each speed: | the sum: | measured, median: | of the sum:",
        [row],
    )
