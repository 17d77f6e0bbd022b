"""Pipelines that are lost and join again: avgpipe run --isolate --stages 2 --pipelines 3 examples/isolated.py [EPOCHS]

Kill any of its processes, and watch the others continue; 1000 epochs take minutes. The variables are
read after the Pipeline is made, because a process that waits as a spare gets them there.
"""

import os
import sys

import torch
from torch import nn

import avgpipe

EPOCHS, BATCHES = int(sys.argv[1]) if sys.argv[1:] else 2, 40


def batches_of(epoch, start):  # the same in every process, whenever it joins
    generator = torch.Generator().manual_seed(epoch)
    inputs = torch.randn(BATCHES, 24, 16, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs[start:]]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
plan = avgpipe.Plan(stages=2, pipelines=3, micro_batches=6, isolate=True)
with avgpipe.Pipeline(
    model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3), timeout_s=60
) as pipeline:
    epoch, start = divmod(pipeline.batches, BATCHES)  # in a pipeline that joins: where the others are
    while epoch < EPOCHS:
        for _ in pipeline.train(batches_of(epoch, start)):
            pass
        epoch, start = epoch + 1, 0
        found = pipeline.evaluate(batches_of(EPOCHS, 0))
        if os.environ["AVGPIPE_PIPELINE"] == os.environ["RANK"] == "0":
            print(f"epoch {epoch}: loss {found.loss:.4f}", flush=True)
