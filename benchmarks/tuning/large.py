"""Question: how long does a plan for 1,000 devices and a model of 200 layers take, from a profile made on one?

    OMP_NUM_THREADS=1 python benchmarks/tuning/large.py

A transformer of 198 blocks between an embedding and a head is profiled on this CPU; the cluster is
examples/cluster.toml, 125 machines of 8, whose devices are taken to be as quick as this one. Nothing of it runs there:
times are predictions.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY, WIDTH, BLOCKS, LENGTH = 8192, 128, 198, 64


def profiled() -> Any:
    import torch

    from avgpipe import profile

    sys.path.insert(0, str(HERE.parent / "overlap"))
    from models import Attention, Embedding, Perceptron, loss

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(Attention(WIDTH, 4), Perceptron(WIDTH)) for _ in range(BLOCKS)]
    model = [Embedding(WIDTH, LENGTH), *blocks, torch.nn.Linear(WIDTH, VOCABULARY)]
    tokens = torch.randint(VOCABULARY, (8, LENGTH))
    return profile(
        model,
        tokens,
        target=tokens,
        loss_fn=loss,
        optimizer=torch.optim.AdamW,
        micro_batch_sizes=(1, 2, 4, 8),
        budget_s=30,
        name=f"transformer of {BLOCKS} blocks",
    )


def main() -> None:
    from avgpipe.bench.machine import machine, versions
    from avgpipe.measure.shapes import Space
    from avgpipe.measure.table import lines, table
    from avgpipe.measure.tuner import study
    from avgpipe.planning.cluster import Cluster

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch-sizes", type=lambda text: [int(b) for b in text.split(",")], default=[512, 4096]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    from rich.console import Console

    known, cluster = profiled(), Cluster.load(HERE.parents[1] / "examples" / "cluster.toml")
    screen, cases = Console(highlight=False, markup=False, width=140), []
    for size in arguments.batch_sizes:
        seconds = []
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            found = study(known, cluster, Space(cluster.workers, len(known.layers), size))
            seconds.append(time.perf_counter() - begin)
        screen.print(table(found))
        for text in lines(found):
            screen.print(text)
        screen.print(
            f"a batch of {size}: {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        )
        cases.append({"batch_size": size, "seconds": seconds, **found.to_json()})
    date = time.strftime("%Y-%m-%d")
    record = {
        "question": "the time that a plan for 1,000 devices and 200 layers takes",
        "date": date,
        "command": "OMP_NUM_THREADS=1 " + shlex.join(["python", "benchmarks/tuning/large.py", *sys.argv[1:]]),
        "machine": machine(1, "cpu"),
        "versions": versions(),
        "cases": cases,
    }
    path = Path(arguments.out or HERE.parent / "results" / f"tuning-large-{date}.json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
