"""A process that is killed is replaced: avgpipe run --stages 3 --spares 1 examples/spares.py

Kill any of its processes, and the run still has the same losses.
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
plan = avgpipe.Plan(stages=3, pipelines=2, micro_batches=4)

with avgpipe.Pipeline(
    model,
    plan,
    loss_fn=nn.MSELoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    extensions=[avgpipe.Copies(every_s=10)],
) as pipeline:
    epoch, start = divmod(pipeline.batches, BATCHES)
    while epoch < EPOCHS:
        for _ in pipeline.train(batches_of(epoch, start)):
            pass
        epoch, start = epoch + 1, 0
        found = pipeline.evaluate(batches_of(EPOCHS, 0))
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch}: loss {found.loss:.4f}")
