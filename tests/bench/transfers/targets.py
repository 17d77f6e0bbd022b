"""What the ranks of these tests run."""

import torch
import torch.distributed as dist

from avgpipe.bench.transfers import ways
from avgpipe.ranks.rendezvous import join

SIZE = 4096


def every_way():
    """By name: whether each message that a rank got was the other one's, and the seconds."""
    join(60.0, "gloo")
    peers = ways.Peers(20.0)
    got = []

    def note(tensor):
        got.append(tensor.clone())

    shm, group = ways.through_shared_memory(peers, True), ways.through_group(peers, False)
    made = {
        "ring": ways.RingAlone(peers, SIZE, 0.0),
        "shm": shm.sending(SIZE, note),
        "gloo": group.sending(SIZE, note),
        "plain gloo": ways.PlainGloo(peers, SIZE, note),
        "local": ways.Local(peers, SIZE, note),
        "memcpy": ways.Memcpy(peers, SIZE, note),
    }
    found = {}
    for name, way in made.items():
        got.clear()
        dist.barrier()
        seconds = way.exchange(3)
        theirs = ways.payload(SIZE, peers.other)
        found[name] = {
            "messages": len(got),
            "right": all(torch.equal(tensor, theirs) for tensor in got),
            "seconds": seconds,
        }
    for link in (shm, group):
        link.link.close(10)
    return found
