"""Two stages, each sharded over two ranks: torchrun --standalone --nproc-per-node 4 examples/fsdp_in_stages.py FOLDER

With "plain" after FOLDER two ranks continue from there, one for each stage, without shards.
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import avgpipe

folder, shards = sys.argv[1], 1 if "plain" in sys.argv else 2
mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("dp", "pp"))
place = mesh["dp"].get_local_rank()


def prepare_stage(module, stage, mesh):
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])


def batch(number):  # 64 samples in all, a share for each pipeline
    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(number)) * 4 - 2
    return x[place::shards], torch.sin(x[place::shards, :1] * x[place::shards, 1:])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
ranks = avgpipe.Ranks(mesh=mesh["pp"], prepare_stage=None if shards == 1 else prepare_stage)
with avgpipe.Pipeline(
    model, avgpipe.Plan(stages=2, micro_batches=4), loss_fn=nn.MSELoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=3e-3), seed=place, extensions=[ranks],
) as pipeline:  # fmt: skip
    if shards == 1:
        dcp.load(state := pipeline.sharded_state_dict(), checkpoint_id=folder)
        pipeline.load_sharded_state_dict(state)
    losses = [r.loss for r in pipeline.train(map(batch, range(pipeline.batches, pipeline.batches + 100)))]
    dcp.save(pipeline.sharded_state_dict(), checkpoint_id=folder)
    # A line is one write, also if Python does not buffer: otherwise lines of several ranks may mix.
    print(f"rank {torch.distributed.get_rank()}: {losses[0]:.4f} to {losses[-1]:.4f}\n", end="")
