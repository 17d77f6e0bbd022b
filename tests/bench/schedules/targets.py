"""What the workers of test_cluster.py run."""

import os
import time
from pathlib import Path

from avgpipe.bench.schedules.cluster import progress


def adds(a, b):
    progress(f"rank {os.environ['RANK']} adds")
    return {"sum": a + b, "rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"])}


def meets():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    return float(total)


def fails(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise ValueError("one is enough")
    time.sleep(100)


def sleeps(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)
