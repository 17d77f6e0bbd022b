"""What the workers of test_launch.py run."""

import os
import signal
import time
from pathlib import Path

from avgpipe.ranks.process import progress


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


def misses_its_peer():
    from avgpipe.errors import PeerLost

    if os.environ["RANK"] == "0":
        raise PeerLost("rank 1 died")
    time.sleep(1)
    raise ValueError("later")


def leaves():
    from avgpipe.errors import PeerLost

    if os.environ["RANK"] == "1":
        os._exit(0)
    raise PeerLost("rank 1 has closed its connection")


def leaves_without_a_result():
    os._exit(0)


def fails_at_its_end():
    meets()
    if os.environ["RANK"] == "1":
        raise ValueError("at the very end")


def stops(folder):
    here = Path(folder, "process")
    if os.environ["RANK"] == "0":
        here.with_suffix(".new").write_text(str(os.getpid()))
        here.with_suffix(".new").rename(here)
        os.kill(os.getpid(), signal.SIGSTOP)
    while not here.exists() or Path("/proc", here.read_text(), "stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    raise ValueError("rank 0 does not answer")


def refuses():
    print("what standard output gets is kept back, too")
    raise SystemExit(2)


def threads():
    return os.environ["OMP_NUM_THREADS"]


def sleeps(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)


def variable(name: str) -> str | None:
    return os.environ.get(name)
