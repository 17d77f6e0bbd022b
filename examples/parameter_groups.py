"""Groups of parameters by name: no weight decay on norms and biases, and lower rates for earlier layers.

A stage has its own parameters only, with their names in the whole model: settings must follow from the name
alone.
python examples/parameter_groups.py, or avgpipe run --stages 2 examples/parameter_groups.py.
"""

import torch
from torch import nn

from avgpipe import Pipeline, Plan


def optimizer(named_params):  # with this argument name, it gets pairs (name, parameter)
    groups = []
    for name, p in named_params:
        layer = int(name.split(".")[0])  # "3.weight" is of layer 3 of 6
        decay = 0.1 if p.dim() > 1 else 0.0  # norms and biases are vectors
        groups.append({"params": [p], "lr": 3e-3 * 0.8 ** (5 - layer), "weight_decay": decay})
    return torch.optim.AdamW(groups)


torch.manual_seed(0)  # every rank builds the same model and data
model = nn.Sequential(
    *(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU()), *(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
)
loader = [(x, x[:, :4].argmax(1)) for x in torch.randn(100, 32, 8)]
plan = Plan(stages=2, micro_batches=2)
with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer) as pipeline:
    losses = [result.loss for result in pipeline.train(loader)]
    if pipeline.world.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
