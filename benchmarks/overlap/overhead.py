"""Question: what does the host spend on an action, when stages compute next to nothing?

    OMP_NUM_THREADS=1 python -m benchmarks.overlap.overhead

Two stages that add a vector to 16 x 16 values, M = 8, two processes. Microseconds of wall time per action: the time of
a batch (in the steady state) over the 2 M forwards and backwards of one rank. The last row is eager autograd doing one
rank's work in one process, without any transport.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy
import torch
from torch import nn

MICRO_BATCHES, RANKS, WIDTH, SAMPLES = 8, 2, 16, 16
ACTIONS = 2 * MICRO_BATCHES
TORCH_ROWS = (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2))


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES // MICRO_BATCHES, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def worker(rounds: int, batches: int, links: list[str], pipelines: list[int]) -> list[dict[str, Any]]:
    from avgpipe.ranks.process import progress
    from avgpipe.ranks.rendezvous import join
    from benchmarks.common.rows import (
        OurRow,
        Task,
        TrainingRow,
        Unavailable,
        measure_rows,
        our_plan,
        torch_row,
    )
    from benchmarks.overlap.baselines import AloneRow

    torch.set_num_threads(1)
    join(60, "gloo")
    task = Task(
        torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, 1), loss, lambda p: torch.optim.SGD(p, lr=1e-3)
    )
    rows: list[TrainingRow | Unavailable] = []
    for link in links:
        for n in pipelines:
            plan = our_plan(RANKS, MICRO_BATCHES, pipelines=n)
            modules = [Adds() for _ in range(RANKS)]
            rows.append(OurRow(f"avgpipe, N = {n}, {link}", task, modules, plan, link=link))
    for schedule, chunks in TORCH_ROWS:
        modules = [Adds() for _ in range(RANKS * chunks)]
        rows.append(torch_row(f"torch {schedule}, {chunks} a rank", task, modules, schedule, MICRO_BATCHES))
    rows.append(AloneRow("eager autograd, one rank's work", task, [Adds()], MICRO_BATCHES))
    measured = measure_rows(
        [row for row in rows if not isinstance(row, Unavailable)], rounds, batches, progress
    )
    return [row._asdict() for row in measured]


def main() -> None:

    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import say, write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=60, help="of a row in a round, at least")
    parser.add_argument("--links", type=lambda text: text.split(","), default=["shm", "gloo"])
    parser.add_argument("--pipelines", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("rounds", "batches", "links", "pipelines")}
    ranks = run_on_ranks("benchmarks.overlap.overhead:worker", RANKS, asked, timeout_s=900, say=say)
    rows = []
    print("| | us per action | quartiles |\n|---|---|---|")
    for row in ranks[0]:
        samples = sorted(1e6 * seconds / ACTIONS for seconds in row["seconds"])
        first, third = numpy.quantile(samples, (0.25, 0.75))
        rows.append({"name": row["name"], "us_per_action": statistics.median(samples), "samples_us": samples})
        print(f"| {row['name']} | {rows[-1]['us_per_action']:.0f} | {first:.0f}-{third:.0f} |")
    write_record(
        "overlap-overhead", "wall time of the host per action", {**asked, "rows": rows}, arguments.out
    )


if __name__ == "__main__":
    main()
