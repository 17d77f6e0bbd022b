"""Question: how long does 1 KiB take through the shared-memory ring alone, without a link in Python?

    OMP_NUM_THREADS=1 python -m benchmarks.links.ring

The bytes are copied into a slot and noticed, and others are copied into a slot of the way back; the receiver spins
before it sleeps, or sleeps at once. `avgpipe bench transfers` times the same with a link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.measure.workers import OtherWorkers, payload
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.rendezvous import join
from avgpipe_ext import ring

SIZE, TRIPS, TIMEOUT_S = 1024, 1000, 60
SPINS_S = {"spinning": 200e-6, "sleeping": 0.0}


def worker(rounds: int) -> dict[str, list[float]]:
    """A rank, on a processor of its own where there are two. What rank 0 measured counts."""
    torch.set_num_threads(1)
    join(TIMEOUT_S, "gloo")
    peers = OtherWorkers(TIMEOUT_S)
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > 1:
        os.sched_setaffinity(0, {allowed[peers.rank]})
    found = {}
    for name, spin_s in SPINS_S.items():
        way = Alone(peers, spin_s)
        found[name] = [way.exchange(TRIPS) for _ in range(rounds + 1)][1:]
    return found


class Alone:
    def __init__(self, peers: OtherWorkers, spin_s: float) -> None:
        self._peers, self._spin_s, self._source = peers, spin_s, payload(SIZE, peers.rank)
        self._mine, pid, theirs = peers.inboxes()
        (into_me,), (into_them,) = peers.into(peers.rank), peers.into(peers.other)
        self._sender, self._receiver = theirs.sender(into_them), self._mine.receiver(into_me, pid)

    def exchange(self, count: int) -> float:
        """Seconds of one direction."""
        dist.barrier()
        begin, bell = time.perf_counter(), self._mine.bell
        for number in range(count):
            if number or self._peers.rank == 0:  # the second rank answers what it has taken
                self._send()
            seen = bell.count()
            while self._receiver.take() is None:
                if bell.wait(seen, TIMEOUT_S, self._spin_s) == seen:
                    raise TimeoutError(f"nothing came through the ring for {TIMEOUT_S} s")
                seen = bell.count()
        if self._peers.rank != 0:
            self._send()
        return (time.perf_counter() - begin) / (2 * count)

    def _send(self) -> None:
        ring.copy(self._sender.reserve(SIZE), self._source.data_ptr(), SIZE)
        self._sender.publish(SIZE, 0, 0, 0, 0)


def main() -> None:
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="File of the record; default: in benchmarks/results.")
    options = parser.parse_args()
    found: dict[str, Any] = run_on_ranks(
        "benchmarks.links.ring:worker", 2, {"rounds": options.rounds}, timeout_s=600
    )[0]
    for name, seconds in found.items():
        print(f"{name:9} {1e6 * statistics.median(seconds):8.2f} us")
    write_record(
        "ring", "latency of the shared-memory ring alone", {"bytes": SIZE, "seconds": found}, options.out
    )


if __name__ == "__main__":
    main()
