"""Question: how near to half of one process's time do two processes of one thread come, training real models?

    OMP_NUM_THREADS=1 python -m benchmarks.overlap.real --model transformer
    OMP_NUM_THREADS=1 python -m benchmarks.overlap.real --model lstm

Global batch 16, forward, backward and AdamW. Rows: one process (accumulating over 1, 2, 4, 8 micro-batches), avgpipe
(N = 1, 2, 3 pipelines, which share each batch), torch.distributed.pipelining's schedules, and
DistributedDataParallel over the same two processes. Layers are timed; every system tries the cuts nearest to balance
with each number of micro-batches, and its best is measured in turn with all the others. Limit: half of the time of
the fastest single process.
"""

from __future__ import annotations

import argparse
from typing import Any

BATCH = 16


def main() -> None:
    arguments = _arguments()
    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import say, write_record

    asked = {
        name: getattr(arguments, name) for name in ("model", "rounds", "batches", "cuts", "links", "only")
    }
    ranks = run_on_ranks(
        "benchmarks.overlap.contest:worker",
        2,
        asked,
        timeout_s=arguments.limit_s,
        say=say,
    )
    record = {"batch": BATCH, **asked, **_summary(ranks[0])}
    _print(record)
    question = "real compute, two processes of one thread, against half of one process's time"
    write_record(f"overlap-{arguments.model}", question, record, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("transformer", "lstm"), required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=4, help="of a row in a round, at least")
    parser.add_argument("--cuts", type=int, default=3, help="tried by every system")
    parser.add_argument("--links", type=lambda text: text.split(","), default=["shm", "gloo"])
    parser.add_argument("--only", default="", metavar="REGEX", help="systems by name; default: all")
    parser.add_argument("--limit-s", type=float, default=3600, help="of the whole run")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    return parser.parse_args()


def _summary(rank: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.common.schedules import summary

    rows = [summary(row) for row in rank["rows"]]
    limit = min(row["median_s"] for row in rows if row["name"].startswith("one process")) / 2
    for row in rows:
        row["samples_per_s"] = BATCH / row["median_s"]
        row["of_limit"] = limit / row["median_s"]
    return {"limit_s": limit, "layer_s": rank["layer_s"], "rows": rows, "tried": rank["tried"]}


def _print(record: dict[str, Any]) -> None:
    print(f"\n{record['model']}, medians of {record['rounds']} rounds")
    print("| | ms per batch | quartiles | samples/s | of limit |\n|---|---|---|---|---|")
    print(
        f"| limit: half of the fastest single process | {record['limit_s'] * 1e3:.1f} | | "
        f"{BATCH / record['limit_s']:.2f} | 1 |"
    )
    for row in record["rows"]:
        print(
            f"| {row['name']} | {row['median_s'] * 1e3:.1f} | {row['quartile1_s'] * 1e3:.1f}-"
            f"{row['quartile3_s'] * 1e3:.1f} | {row['samples_per_s']:.2f} | {row['of_limit']:.3f} |"
        )


if __name__ == "__main__":
    main()
