"""Pipelines that are lost and join again: avgpipe run --isolate --stages 2 --pipelines 3 examples/isolated.py

Kill any of its processes, and watch the others continue.
"""

import os

import torch
from torch import nn

import avgpipe

EPOCHS, BATCHES = 2, 40


def batches_of(epoch: int, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of an epoch from ``start`` on: the same in every process, whenever it joins."""
    generator = torch.Generator().manual_seed(epoch)
    inputs = torch.randn(BATCHES, 24, 16, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in inputs[start:]]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
plan = avgpipe.Plan(stages=2, pipelines=3, micro_batches=6, isolate=True)

with avgpipe.Pipeline(
    model,
    plan,
    loss_fn=nn.MSELoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    timeout_s=60,
) as pipeline:
    # Not before: a process that waits as a spare learns its pipeline here.
    speaks = os.environ["AVGPIPE_PIPELINE"] == os.environ["RANK"] == "0"
    epoch, start = divmod(pipeline.batches, BATCHES)
    while epoch < EPOCHS:
        for _ in pipeline.train(batches_of(epoch, start)):
            pass
        epoch, start = epoch + 1, 0
        found = pipeline.evaluate(batches_of(EPOCHS, 0))
        if speaks:
            print(f"epoch {epoch}: loss {found.loss:.4f}")
