"""What the workers of test_cluster.py run."""

import os
import time
from pathlib import Path

from avgpipe.bench.schedules.cluster import progress


def adds(a, b):
    progress(f"rank {os.environ['RANK']} adds")
    return {"sum": a + b, "rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"])}


def command_line(secret):
    return Path("/proc/self/cmdline").read_text().split("\0")


def meets():
    import torch
    import torch.distributed as dist

    from avgpipe.ranks.rendezvous import join

    join(60.0, "gloo")
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


def one_row_fails(settings, without=()):
    """The benchmark's worker, but rank 1 fails at pipedream's second batch."""
    from avgpipe.bench.schedules import benchmark
    from avgpipe.bench.schedules.our_rows import OurRow

    whole = OurRow.losses

    def losses(self, batches):
        for n, loss in enumerate(whole(self, batches)):
            if self.name == "avgpipe pipedream" and n == 1 and os.environ["RANK"] == "1":
                raise ValueError("rank 1 had enough")
            yield loss

    OurRow.losses = losses
    return benchmark.worker(settings, without)
