"""A model of your own whose last layer uses its first features again: the tracer finds the values between stages.
avgpipe run --stages 2 examples/skip_connection.py, or python examples/skip_connection.py for both in one process.
"""

import torch
from torch import nn

from avgpipe import Pipeline, Plan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 64), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4), nn.ReLU())
        self.last = nn.Linear(68, 1)

    def forward(self, x):
        features = self.features(x)
        return self.last(torch.cat([self.middle(features), features], 1))


def batch(size):
    x = torch.rand(size, 2) * 4 - 2
    return x, torch.sin(x[:, :1] * x[:, 1:])


torch.manual_seed(0)  # every rank builds the same model and data
model, data, test = Net(), [batch(64) for _ in range(200)], batch(1000)
plan = Plan(stages=2, pipelines=2, micro_batches=2)
with Pipeline(
    model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)
) as pipeline:
    for result in pipeline.train(data):
        if result.batch % 40 == 0 and pipeline.world.rank == 0:
            print(f"batch {result.batch}: loss {result.loss:.3f}")
    error = pipeline.evaluate([test]).loss  # on every rank
if pipeline.world.rank == 0:
    print(f"error {error:.4f}; of the answer 0 always: {test[1].square().mean():.4f}")
