"""Question: how long does a plan for 1,000 devices and a model of 200 layers take, from a profile made on one?

    OMP_NUM_THREADS=1 python -m benchmarks.tuning.large

A transformer of 198 blocks between an embedding and a head is profiled on this CPU; the cluster is
examples/cluster.toml, 125 machines of 8, whose devices are taken to be as quick as this one. Nothing of it runs there:
times are predictions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY, WIDTH, BLOCKS, LENGTH = 8192, 128, 198, 64


def profiled() -> Any:
    import torch

    from avgpipe import profile
    from benchmarks.overlap.models import Attention, Embedding, Perceptron, loss

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
    from rich.console import Console

    from avgpipe.cli.tune import lines, table
    from avgpipe.measure.search import Space
    from avgpipe.measure.tune import study
    from avgpipe.planning.cluster import Cluster
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch-sizes", type=lambda text: [int(b) for b in text.split(",")], default=[512, 4096]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()

    known, cluster = profiled(), Cluster.load(HERE.parents[1] / "examples" / "cluster.toml")
    screen, cases = Console(highlight=False, markup=False, width=140), []
    for size in arguments.batch_sizes:
        seconds = []
        for _ in range(arguments.rounds):
            begin = time.perf_counter()
            found = study(Space(known, cluster, size))
            seconds.append(time.perf_counter() - begin)
        screen.print(table(found))
        for text in lines(found):
            screen.print(text)
        screen.print(
            f"a batch of {size}: {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        )
        cases.append({"batch_size": size, "seconds": seconds, **found.to_json()})
    question = "the time that a plan for 1,000 devices and 200 layers takes"
    write_record("tuning-large", question, {"cases": cases}, arguments.out)


if __name__ == "__main__":
    main()
