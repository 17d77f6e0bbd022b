"""Isolated pipelines on several hosts, which continue from FOLDER after the first host was lost. On each host:

avgpipe run --isolate --at HEAD:7000 examples/every_host.py FOLDER
"""

import os
import pathlib
import signal
import sys

import torch
from torch import nn

import avgpipe

BATCHES, folder = 400, pathlib.Path(sys.argv[1])


class Batches:
    """The batches from a number on: the same in every process, whenever it begins."""

    def __init__(self, start):
        self.start = start

    def __len__(self):
        return BATCHES - self.start

    def __iter__(self):
        for number in range(self.start, BATCHES):
            draw = torch.Generator().manual_seed(number)
            x = torch.rand(64, 2, generator=draw) * 4 - 2
            yield x, torch.sin(x[:, :1] * x[:, 1:])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=4, isolate=True)
with avgpipe.Pipeline(
    model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.Adam(p, lr=3e-3), timeout_s=60
) as pipeline:
    # From avgpipe run --requeue, when Slurm will end the job.
    signal.signal(signal.SIGUSR2, lambda *_: pipeline.preempt())
    if folder.exists():
        pipeline.load(folder)
    for result in pipeline.train(Batches(pipeline.batches)):
        if result.batch % 20 == 19:
            pipeline.save(folder)
            if os.environ["AVGPIPE_PIPELINE"] == os.environ["RANK"] == "0":
                print(f"batch {result.batch}: loss {result.loss:.4f}", flush=True)
        if pipeline.preempted:
            break
    pipeline.save(folder)
