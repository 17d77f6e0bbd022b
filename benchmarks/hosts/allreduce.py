"""Sum a tensor over hosts with gloo, again and again: the time that a step of pipelines on these hosts needs at least.

    python benchmarks/hosts/allreduce.py RANK HOSTS ADDRESS MIB REPEATS

Rank 0 prints a line of JSON with the seconds of each repeat.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    rank, hosts, address, mib, repeats = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29555", rank=int(rank), world_size=int(hosts)
    )
    gradient, seconds = torch.zeros(round(float(mib) * 2**20 / 4)), []
    for _ in range(int(repeats) + 1):
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(gradient)
        seconds.append(time.monotonic() - begin)
    if rank == "0":
        print(json.dumps({"seconds": seconds[1:]}), flush=True)  # the first one connects
    dist.barrier()


if __name__ == "__main__":
    main()
