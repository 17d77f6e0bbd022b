"""Question: what does torch.compile gain, layer by layer, in one process and in pipelines of two?

    OMP_NUM_THREADS=1 python -m benchmarks.overlap.compiled

Global batch 16, forward, backward and AdamW, two processes of one thread each. Rows, each without and with compiling:
one process, and avgpipe (N = 1, 2 pipelines) at the cut nearest to balance of the plain layers' times. A row's ratio is
to the same row without. First: seconds of the first batches of a row, in which it is compiled; what the compiler
keeps on disk from earlier runs makes them shorter.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import avgpipe

BATCH, RANKS, TIMEOUT_S = 16, 2, 600


def worker(model: str, parts: int, rounds: int, batches: int, compile: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from avgpipe.plan import Plan
    from avgpipe.ranks.process import progress
    from avgpipe.ranks.rendezvous import join
    from benchmarks.common.rows import OurRow, Task, TrainingRow, measure_rows
    from benchmarks.overlap.baselines import AloneRow, layer_seconds
    from benchmarks.overlap.cuts import nearest_to_balance
    from benchmarks.overlap.models import MODELS, VOCABULARY, loss

    torch.set_num_threads(1)
    join(TIMEOUT_S, "gloo")
    shape = MODELS[model]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, shape.length + 1), generator=draw)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    task = Task(inputs, targets, loss, lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True))
    progress("timing the layers")
    table = torch.tensor(layer_seconds(task, shape.layers(), parts), dtype=torch.float64)
    dist.broadcast(table, 0)  # all ranks must cut alike
    cut = nearest_to_balance(table.tolist(), RANKS, RANKS, 1)[0]
    compiled = shape.layers()
    for layer in compiled:
        layer.compile(**compile)
    rows: list[TrainingRow] = [
        AloneRow("one process", task, shape.layers(), parts),
        AloneRow("one process, compiled", task, compiled, parts),
    ]
    for pipelines in (1, 2):
        plan = Plan(stages=RANKS, pipelines=pipelines, micro_batches=parts, partition=cut, warmup_rounds=0)
        for label, options in (("", {}), (", compiled", {"extensions": [avgpipe.Compile(**compile)]})):
            name = f"avgpipe, N = {pipelines}{label}"
            rows.append(OurRow(name, task, shape.layers(), plan, timeout_s=TIMEOUT_S, **options))
    first = []
    for row in rows:
        dist.barrier()
        progress(f"first batches: {row.name}")
        begin = time.perf_counter()
        list(row.losses(row.pipelines))
        first.append(time.perf_counter() - begin)
    measured = measure_rows(rows, rounds, batches, progress)
    for row in rows:
        row.close()
    return {"cut": cut, "first_s": first, "rows": [row._asdict() for row in measured]}


def main() -> None:
    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import say, write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("transformer", "lstm"), default="transformer")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of a batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=4, help="of a row in a round, at least")
    parser.add_argument("--compile", type=json.loads, default={}, help="arguments of torch.compile, as JSON")
    parser.add_argument("--limit-s", type=float, default=3600, help="of the whole run")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("model", "parts", "rounds", "batches", "compile")}
    found = run_on_ranks(
        "benchmarks.overlap.compiled:worker",
        RANKS,
        asked,
        timeout_s=arguments.limit_s,
        say=say,
    )[0]
    record = {"batch": BATCH, **asked, "cut": found["cut"], "rows": _summary(found)}
    _print(record)
    question = "real compute in one and in two processes of one thread, with and without torch.compile"
    write_record(f"overlap-compiled-{arguments.model}", question, record, arguments.out)


def _summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    from benchmarks.common.schedules import summary

    rows: list[dict[str, Any]] = []
    for number, (row, first_s) in enumerate(zip(found["rows"], found["first_s"])):
        made = {**summary(row), "first_s": first_s}
        made["of_plain"] = made["median_s"] / rows[-1]["median_s"] if number % 2 else None
        rows.append(made)
    return rows


def _print(record: dict[str, Any]) -> None:
    print(f"\n{record['model']}, {record['parts']} micro-batches, medians of {record['rounds']} rounds")
    print("| | ms per batch | quartiles | to plain | first, s |\n|---|---|---|---|---|")
    for row in record["rows"]:
        ratio = "" if row["of_plain"] is None else f"{row['of_plain']:.3f}"
        print(
            f"| {row['name']} | {row['median_s'] * 1e3:.1f} | {row['quartile1_s'] * 1e3:.1f}-"
            f"{row['quartile3_s'] * 1e3:.1f} | {ratio} | {row['first_s']:.1f} |"
        )


if __name__ == "__main__":
    main()
