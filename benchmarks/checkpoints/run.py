"""Question: how much throughput do checkpoints of a 100 MB model cost, one every ten seconds?

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints.run

Trains 24 linear layers of 1024 x 1024 (100.8 MB of float32) with Adam: in one process, and in two stages on two
processes with one pipeline and with two. Stretches of a few seconds take turns, A B C A B C: without a checkpoint,
with one that is written meanwhile, and with one that training waits for. A stretch begins with its checkpoint and ends
with its last batch; what is still being written then is waited for, and told. What a stretch takes longer than the one
without is what a checkpoint costs, also in ten seconds; in stretches of ten seconds a machine's noise would hide it.
Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from benchmarks.common.record import say, write_record
from benchmarks.tables.checkpoints import checkpoints

LAYERS, WIDTH, SAMPLES = 24, 1024, 64
MOST = 0.01  # of the throughput
CASES = {"K=1": Plan(micro_batches=4), "K=2 N=1": Plan(2, 1, 4), "K=2 N=2": Plan(2, 2, 4)}
WAYS = ("none", "meanwhile", "waiting")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every-s", type=float, default=10.0, help="between two checkpoints")
    parser.add_argument("--stretch-s", type=float, default=3.0, help="about how long a stretch takes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", help="for the checkpoints; default: a temporary one")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    limit_s = 60 + 4 * len(WAYS) * (asked.rounds + 1) * asked.stretch_s
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for name in asked.cases:
            arguments = {"case": name, "rounds": asked.rounds, "stretch_s": asked.stretch_s, "folder": folder}
            target, stages = "benchmarks.checkpoints.run:worker", CASES[name].stages
            found = run_on_ranks(target, stages, arguments, timeout_s=limit_s, say=say)
            rows.append({"case": name, **found[0]})
    record = {
        "model_bytes": 4 * LAYERS * WIDTH * (WIDTH + 1),
        "every_s": asked.every_s,
        "rounds": asked.rounds,
        "most": MOST,
        "rows": rows,
    }
    print(checkpoints(record))
    write_record("checkpoints", "what a checkpoint every ten seconds costs", record, asked.out)


def worker(case: str, rounds: int, stretch_s: float, folder: str) -> dict[str, Any]:
    """A rank: trains in stretches, and tells what they took. Seconds by way, in the order of the rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    inputs, target = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-4)

    with Pipeline(layers, CASES[case], loss_fn=nn.MSELoss(), optimizer=adam) as pipeline:

        def train(batches: int) -> float:
            begin = time.perf_counter()
            for _ in pipeline.train(repeat((inputs, target), batches)):
                pass
            pipeline.drain()
            return time.perf_counter() - begin

        train(4)
        taken_s = train(8)
        mean_s = pipeline.once("seconds of a batch", lambda: taken_s / 8)
        batches = max(2, round(stretch_s / mean_s))
        path = Path(folder) / case
        stretches = {way: Stretch(pipeline, path, way, lambda: train(batches)) for way in WAYS}
        for number in range(rounds + 1):
            for way in WAYS:
                progress(f"{case}: round {number} of {rounds}: {way}")
                stretches[way].run(is_counted=number > 0)
        size = sum(file.stat().st_size for file in path.glob("*.pt"))
        return {
            "batches": batches,
            "checkpoint_bytes": size,
            "copy_bytes": sum(pipeline.world.gather(_copied(pipeline))),
            "ways": {way: stretch.found() for way, stretch in stretches.items()},
        }


def _copied(pipeline: Pipeline) -> int:
    """How much main memory the copy takes that is written meanwhile."""
    return sum(memory.numel() for memory in pipeline._saving._snapshot._memory)


class Stretch:
    """So many batches after a checkpoint, if there is one, each time that it is run."""

    def __init__(self, pipeline: Pipeline, path: Path, way: str, train: Callable[[], float]) -> None:
        self._pipeline, self._path, self._way, self._train = pipeline, path, way, train
        self._seconds: list[float] = []
        self._pauses: list[float] = []  # in which training stood still at the beginning
        self._late: list[float] = []  # for which the writer was waited for at the end
        self._cpu: list[float] = []  # of processors, all ranks together

    def run(self, is_counted: bool) -> None:
        pipeline = self._pipeline
        pipeline.world.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if self._way != "none":
            pipeline.save(self._path, wait=self._way == "waiting")
        pause = time.perf_counter() - begin
        self._train()
        end = time.perf_counter()
        pipeline.wait_for_save()
        late = time.perf_counter() - end
        cpu = sum(pipeline.world.gather(time.process_time() - cpu))
        if is_counted:
            self._seconds.append(end - begin)
            self._pauses.append(pause)
            self._late.append(late)
            self._cpu.append(cpu)

    def found(self) -> dict[str, Any]:
        return {
            "seconds": self._seconds,
            "processor_s": self._cpu,
            "pause_s": statistics.median(self._pauses),
            "late_s": max(self._late),
        }


if __name__ == "__main__":
    main()
