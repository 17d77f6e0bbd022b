"""Training on several hosts that restarts by itself after a failure. On each of two hosts, which share FOLDER:

torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id run-1 --rdzv-endpoint HOST0:29400
  examples/several_hosts.py FOLDER
"""

import os
import pathlib
import sys

import torch
from torch import nn

import avgpipe

BATCHES, folder = 400, pathlib.Path(sys.argv[1])


def batch(number):  # the same on every rank, and after a restart
    draw = torch.Generator().manual_seed(number)
    x = torch.rand(64, 2, generator=draw) * 4 - 2
    return x, torch.sin(x[:, :1] * x[:, 1:])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
plan = avgpipe.Plan(stages=int(os.environ["WORLD_SIZE"]), micro_batches=4)
with avgpipe.Pipeline(
    model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.Adam(p, lr=3e-3), timeout_s=60
) as pipeline:
    if folder.exists():
        pipeline.load(folder)
    for result in pipeline.train(batch(n) for n in range(pipeline.batches, BATCHES)):
        if result.batch % 20 == 19:
            pipeline.save(folder)
            if pipeline.world.rank == 0:
                print(f"batch {result.batch}: loss {result.loss:.4f}", flush=True)
