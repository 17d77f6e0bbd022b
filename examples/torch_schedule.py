"""Advance forward in a script of torch.distributed.pipelining: one line differs from one with Schedule1F1B.
avgpipe run --stages 2 examples/torch_schedule.py, or torchrun --nproc-per-node 2 examples/torch_schedule.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from avgpipe.interop.torch_pipelining import ScheduleAdvanceForward

dist.init_process_group("gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # every rank makes the same layers and data
layers = [nn.Sequential(nn.Linear(2 if k == 0 else 32, 32), nn.Tanh()) for k in range(stages)]
layers[-1].append(nn.Linear(32, 1))
stage = PipelineStage(layers[rank], rank, stages, torch.device("cpu"))
# was: schedule = Schedule1F1B(stage, 8, loss_fn=nn.MSELoss())
schedule = ScheduleAdvanceForward(stage, 8, loss_fn=nn.MSELoss())
optimizer = torch.optim.Adam(layers[rank].parameters(), lr=1e-2)

for batch in range(200):
    x = torch.rand(64, 2) * 4 - 2
    y, losses = torch.sin(x[:, :1] * x[:, 1:]), []
    # the first stage takes the inputs, the last one the targets
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if stage.is_last else {}))
    optimizer.step()
    optimizer.zero_grad()
    if stage.is_last and batch % 40 == 39:
        print(f"batch {batch + 1}: loss {torch.stack(losses).mean().item():.3f}")
dist.destroy_process_group()
