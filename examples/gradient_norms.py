"""An extension of one's own: the norm of every parameter's gradient, logged before each step.

python examples/gradient_norms.py, or avgpipe run --stages 2 examples/gradient_norms.py.
"""

import logging
import sys

import torch
from torch import nn

import avgpipe

log = logging.getLogger("gradients")


class GradientNorms(avgpipe.Extension):
    """Logs the norm of the gradient of every parameter before each step."""

    def __init__(self, every=1):
        if every < 1:
            raise ValueError(f"every must be 1 or more, not {every}")
        self.every = every

    def before_step(self, step):
        if step.batch % self.every == 0:
            for name, gradient in step.gradients.items():
                place = f"batch {step.batch}, pipeline {step.pipeline}, stage {step.stage}"
                log.info("%s: %s has norm %.4f", place, name, gradient.norm())


logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
torch.manual_seed(0)  # every rank builds the same model and data
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
loader = [(x, x[:, :4].argmax(1)) for x in torch.randn(20, 32, 8)]
with avgpipe.Pipeline(
    model,
    avgpipe.Plan(stages=2, micro_batches=4),
    loss_fn=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    extensions=[GradientNorms(every=10)],
) as pipeline:
    losses = [result.loss for result in pipeline.train(loader)]
