"""What each process of a run over hosts trains: one stage with a gradient of some size, whose samples take some time.

    avgpipe run --isolate ... benchmarks/hosts/job.py TIMES --pipelines 3 --mib 12

With ``--pipelines 1`` it trains alone, started by Python. The process of pipeline 0 writes a line of JSON into the file
TIMES for each result: batch, samples, time. The clock is the same in all processes of a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch import nn

import avgpipe

ENDLESS = 100_000  # batches; the run is ended from outside


class Layer(nn.Module):
    """Weights that each sample needs, and a device that takes ``sample_s`` for each."""

    def __init__(self, numel: int, sample_s: float) -> None:
        super().__init__()
        self.weights, self._sample_s = nn.Parameter(torch.zeros(numel)), sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self._sample_s)
        return x + self.weights.mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times")
    parser.add_argument("--pipelines", type=int, required=True)
    parser.add_argument("--mib", type=float, required=True, help="of the gradient")
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--speeds", default="", help="of each pipeline, if they differ")
    parser.add_argument("--warmup-rounds", type=int, help="of the rule; default: the plan's")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    own = int(os.environ.get("AVGPIPE_PIPELINE", 0))
    speed = [*map(float, asked.speeds.split(","))][own] if asked.speeds else 1.0
    plan = avgpipe.Plan(
        stages=1,
        pipelines=asked.pipelines,
        micro_batches=asked.micro_batches,
        warmup_rounds=asked.warmup_rounds,
        isolate=asked.pipelines > 1,
    )
    batch = torch.zeros(asked.micro_batches, 1), torch.ones(asked.micro_batches, 1)
    with (
        avgpipe.Pipeline(
            nn.Sequential(Layer(round(asked.mib * 2**20 / 4), asked.sample_s / speed)),
            plan,
            loss_fn=nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
            timeout_s=120,
        ) as pipeline,
        open(asked.times, "a" if own == 0 else "r") as file,
    ):
        pipeline.enter()
        for result in pipeline.train(batch for _ in range(pipeline.batches, ENDLESS)):
            if own == 0:
                print(json.dumps([result.batch, result.samples, time.monotonic()]), file=file, flush=True)


if __name__ == "__main__":
    main()
