"""A plan for your own model: profiled, predicted, searched for, and timed to check the prediction.
avgpipe run --stages 2 examples/choose_plan.py times the best plans; python examples/choose_plan.py only predicts them.
"""

import torch
from torch import nn

import avgpipe


def block(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), *(block(256) for _ in range(6)), nn.Linear(256, 10))
inputs, target = torch.randn(128, 64), torch.randint(10, (128,))  # a batch like those of the run
learning = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}

if __name__ == "__main__":
    plan = avgpipe.tune(model, inputs, target=target, workers=2, **learning)
    plan.save("plan.json")
    with avgpipe.Pipeline(model, plan, **learning) as pipeline:
        for _ in pipeline.train([(inputs, target)] * 20):
            pass
        timeline = pipeline.timeline()
        if pipeline.world.rank == 0:
            print(plan)
            print(timeline.explain())
