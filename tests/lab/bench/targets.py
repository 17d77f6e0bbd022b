"""What the ranks of these tests run."""

import torch
import torch.distributed as dist

from avgpipe.measure.workers import OtherWorkers, payload
from avgpipe.ranks.rendezvous import join
from avgpipe_lab.bench import transfers

SIZE = 4096


def every_way():
    """By name: whether each message that a rank got was the other one's, and the seconds."""
    join(60.0, "gloo")
    peers = OtherWorkers(20.0)
    got = []

    def note(tensor):
        got.append(tensor.clone())

    shm, group = peers.shared_memory(True), peers.gloo(False)
    source = payload(SIZE, peers.rank)
    made = {
        "shm": lambda count: shm.exchange(count, source, note),
        "gloo": lambda count: group.exchange(count, source, note),
        "plain gloo": transfers._plain_gloo(peers, source, note),
        "local": transfers._local(peers, source, note),
        "memcpy": transfers._memcpy(peers, SIZE, note),
    }
    found = {}
    for name, exchange in made.items():
        got.clear()
        dist.barrier()
        seconds = exchange(3)
        theirs = payload(SIZE, peers.other)
        found[name] = {
            "messages": len(got),
            "right": all(torch.equal(tensor, theirs) for tensor in got),
            "seconds": seconds,
        }
    for link in (shm, group):
        link.link.close(10)
    return found
