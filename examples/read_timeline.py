"""A run whose first stage has too much work and whose loader is slow, its timeline, and the explanation.
avgpipe run --stages 2 examples/read_timeline.py FOLDER
"""

import pathlib
import sys
import time

import torch
from torch import nn

import avgpipe

folder = pathlib.Path(sys.argv[1])


def batches(count):
    for _ in range(count):
        time.sleep(0.03)  # a slow source of data
        yield torch.randn(256, 512), torch.randn(256, 512)


torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))
plan = avgpipe.Plan(stages=2, micro_batches=4, schedule="1f1b", partition=[6])  # 6 layers, then 2
with avgpipe.Pipeline(
    model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
) as pipeline:
    for _ in pipeline.train(batches(20)):
        pass
    timeline = pipeline.timeline()
    if pipeline.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        print(timeline.explain())
        timeline.plot(folder / "timeline.png", batches=3)
        timeline.to_chrome_trace(folder / "timeline.json")  # for Perfetto
