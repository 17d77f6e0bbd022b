"""Several pipelines on one GPU: one worker of several, and a GPU divided to emulate several."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.tables.markdown import Record, table

_HOWS = {"eager": "eagerly", "actions": "a graph for each action", "row": "a graph for the batch"}
_FIRST = "avgpipe 1f1b, N = 1, M = 4 each, own"


def one_card_lanes(record: Record) -> str:
    """Return samples per second of one lane, and the ratios of two and four lanes to it."""
    found: dict[tuple[str, int, str, int], dict[int, float]] = defaultdict(dict)
    for row in record["lanes"]:
        if not row["wire"]:
            found[row["model"], row["M"], row["how"], row["k"]][row["N"]] = row["samples_per_s"]
    rows = [
        (
            *(model, micro_batches, worker, _HOWS[how], f"{of[1]:,.0f}"),
            *(f"{of[n] / of[1]:.2f}" if n in of else "" for n in (2, 4)),
        )
        for (model, micro_batches, how, worker), of in found.items()
    ]
    return table("model | M: | stage: | issued | N = 1, samples/s: | N = 2: | N = 4:", rows)


def one_card_cluster(record: Record) -> str:
    """Compare systems with one pipeline of 1F1B, on each model, without and with a network line."""
    found: dict[str, dict[tuple[str, float], float]] = defaultdict(dict)
    for row in record["cluster"]["rows"]:
        if "samples_per_s" in row:
            found[row["row"]][row["model"], row["wire"]] = row["samples_per_s"]
    columns = list(found[_FIRST])
    rows = [("1F1B, N = 1, M = 4, samples/s", *(f"{found[_FIRST][column]:,.0f}" for column in columns))]
    for name, of in found.items():
        if name != _FIRST:
            cells = [f"{of[c] / found[_FIRST][c]:.2f}" if c in of else "" for c in columns]
            rows.append((name.removeprefix("avgpipe ").replace(" each, own", ""), *cells))
    heads = [f"{model}{', 10 Gbit/s' if wire else ''}:" for model, wire in columns]
    return table(" | ".join(["", *heads]), rows)
