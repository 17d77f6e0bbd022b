"""Your own model: trained by python, by avgpipe run, and by the commands, which call make().

python examples/train_your_model.py
avgpipe run --stages 2 examples/train_your_model.py
avgpipe train examples/train_your_model.py:make --stages 2 --pipelines 2
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import avgpipe


def samples(count: int) -> TensorDataset:
    """Return points of a plane, and for each the index of its ring, of four around the centre."""
    points = torch.randn(count, 2)
    return TensorDataset(points, points.norm(dim=1).mul(2).long().clamp(max=3))


def make(lr: float = 3e-3) -> avgpipe.Task:
    return avgpipe.Task(
        model=nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
        loader=DataLoader(samples(2048), batch_size=32, shuffle=True),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        held_out=DataLoader(samples(512), batch_size=128),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    task = make()
    plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=4)
    with avgpipe.Pipeline(task.model, plan, loss_fn=task.loss_fn, optimizer=task.optimizer) as pipeline:
        for result in pipeline.train(task.loader):
            if result.batch % 16 == 0 and pipeline.world.rank == 0:
                print(f"batch {result.batch}: loss {result.loss:.3f}")
        loss = pipeline.evaluate(task.held_out).loss
        task.model.load_state_dict(pipeline.state_dict())
        if pipeline.world.rank == 0:
            print(f"held out: loss {loss:.3f}")
