"""How much of plain gloo's speed the link through torch.distributed keeps, between two processes of this host.

Two processes exchange messages over the loopback device, in turn by plain `dist.isend` and `dist.irecv` and by
`GroupLink`: A B A B, so that both see the same machine. Run as `python benchmarks/links/run.py`.

to and fro   a message goes there, then one comes back; seconds of one direction
in a row     `WINDOW` messages go there, then a small one comes back; bytes of the messages per second
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import multiprocessing

from avgpipe.errors import PeerLost
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Endpoint, Mailbox
from avgpipe.links.message import Channel, Key, Message
from avgpipe.ranks.machine import keep_freed_memory

WINDOW = 32
_POSTED = 4  # receives of plain gloo
_SAMPLE_BYTES = 64 << 20
_TIMEOUT_S = 60
FORTH, BACK = Channel(Message.ACTIVATION, 0, 0, 1), Channel(Message.GRADIENT, 0, 1, 0)
ANSWER = Channel(Message.EVALUATION, 0, 1, 0)


class Plain:
    """dist.isend and dist.irecv; receives are posted before they are needed."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._peer = rank, 1 - rank
        self._source = torch.ones(size, dtype=torch.uint8)
        self._targets = [torch.empty_like(self._source) for _ in range(_POSTED)]
        self._answer = torch.ones(1)

    def to_and_fro(self, rounds: int) -> None:
        coming = dist.irecv(self._targets[0], self._peer)
        dist.barrier()
        for left in range(rounds, 0, -1):
            if self._rank == 0:
                sent = dist.isend(self._source, self._peer)
            coming.wait()
            if left > 1:
                coming = dist.irecv(self._targets[0], self._peer)
            if self._rank == 1:
                sent = dist.isend(self._source, self._peer)
            sent.wait()

    def in_a_row(self, rounds: int) -> None:
        coming = [dist.irecv(target, 0) for target in self._targets] if self._rank == 1 else []
        dist.barrier()
        for left in range(rounds, 0, -1):
            if self._rank == 0:
                answer = dist.irecv(self._answer, 1)
                sent = [dist.isend(self._source, 1) for _ in range(WINDOW)]
                for work in [*sent, answer]:
                    work.wait()
            else:
                for n in range(WINDOW):
                    coming[n % _POSTED].wait()
                    if left > 1 or n < WINDOW - _POSTED:
                        coming[n % _POSTED] = dist.irecv(self._targets[n % _POSTED], 0)
                dist.isend(self._answer, 0).wait()


class Linked:
    """The link, with the mailbox on which its worker waits."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self._rank, self._mailbox = rank, Mailbox()
        ends = ([BACK, ANSWER], [FORTH])
        end = Endpoint(self._mailbox, torch.device("cpu"))
        self._link = GroupLink(group, 1 - rank, ends[rank], ends[1 - rank], PeerLost, end)
        self._source, self._answer, self._number = torch.ones(size, dtype=torch.uint8), torch.ones(1), 0

    def _send(self, channel: Channel, value: torch.Tensor, number: int) -> None:
        self._link.send(Key(*channel, number, 0), value)

    def _receive(self, channel: Channel, number: int) -> None:
        key = Key(*channel, number, 0)
        assert self._mailbox.wait_until(lambda: key in self._mailbox, _TIMEOUT_S)
        self._mailbox.take(key)

    def to_and_fro(self, rounds: int) -> None:
        dist.barrier()
        for number in range(self._number, self._number + rounds):
            if self._rank == 0:
                self._send(FORTH, self._source, number)
                self._receive(BACK, number)
            else:
                self._receive(FORTH, number)
                self._send(BACK, self._source, number)
        self._number += rounds

    def in_a_row(self, rounds: int) -> None:
        dist.barrier()
        for first in range(self._number, self._number + rounds * WINDOW, WINDOW):
            if self._rank == 0:
                for number in range(first, first + WINDOW):
                    self._send(FORTH, self._source, number)
                self._receive(ANSWER, first)
            else:
                for number in range(first, first + WINDOW):
                    self._receive(FORTH, number)
                self._send(ANSWER, self._answer, first)
        self._number += rounds * WINDOW

    def close(self) -> None:
        dist.barrier()
        self._link.close(10)


def seconds(action: Callable[[int], None], rounds: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action(rounds)
    return time.perf_counter() - begin


def worker(rank: int, sizes: Sequence[int], repeats: int, path: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    for size in sizes:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        plain, linked = Plain(rank, size), Linked(rank, size, group)
        trips = max(8, min(2000, _SAMPLE_BYTES // size))
        for name in ("to_and_fro", "in_a_row"):
            rounds = trips if name == "to_and_fro" else max(2, trips // WINDOW)
            messages = rounds * (2 if name == "to_and_fro" else WINDOW)
            found: dict[str, list[float]] = {"plain": [], "link": []}
            for way in (plain, linked):
                getattr(way, name)(max(2, rounds // 4))
            for _ in range(repeats):
                for label, way in (("plain", plain), ("link", linked)):
                    found[label].append(seconds(getattr(way, name), rounds) / messages)
            if rank == 0:
                a, b = statistics.median(found["plain"]), statistics.median(found["link"])
                columns = [f"{s * 1e6:9.1f} us {size / s / 1e9:6.2f} GB/s" for s in (a, b)]
                what = f"{name.replace('_', ' '):11} {size >> 10:6} KiB"
                print(f"{what}   plain {columns[0]}   link {columns[1]}   {a / b:5.2f}", flush=True)
        linked.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--kib", type=int, nargs="+", default=[1, 64, 1024, 4096, 16384], help="Message sizes."
    )
    parser.add_argument("--repeats", type=int, default=7, help="Samples of each way; their median counts.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ([kib << 10 for kib in options.kib], options.repeats, os.path.join(folder, "store"))
        multiprocessing.spawn(worker, arguments, nprocs=2)


if __name__ == "__main__":
    sys.exit(main())
