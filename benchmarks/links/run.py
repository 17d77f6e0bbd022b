"""Question: how much of plain gloo's speed does the link through torch.distributed keep?

    OMP_NUM_THREADS=1 python -m benchmarks.links.run

Two processes exchange messages over the loopback device, by plain `dist.isend` and `dist.irecv` and by `GroupLink` in
turn, so that both see the same machine. The last column is plain gloo's time over the link's.

to and fro   a message goes there, then one comes back; the time of one direction
in a row     32 messages go there, then a small one comes back; the time of one of the 32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.errors import PeerLost
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Channel, Key, Mailbox, Message
from avgpipe.links.transport import Endpoint
from avgpipe.ranks.environment import keep_freed_memory
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.rendezvous import join

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
        end = Endpoint(self._mailbox, torch.device("cpu"), ends[rank], ends[1 - rank])
        self._link = GroupLink(group, 1 - rank, PeerLost, end)
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
        self._link.close(10)


def seconds(action: Callable[[int], None], rounds: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action(rounds)
    return time.perf_counter() - begin


def worker(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A rank. What rank 0 measured counts."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a Pipeline does
    join(_TIMEOUT_S, "gloo")
    rank, rows = dist.get_rank(), []
    for size in sizes:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        ways = {"plain": Plain(rank, size), "link": Linked(rank, size, group)}
        trips = max(8, min(2000, _SAMPLE_BYTES // size))
        for question in ("to_and_fro", "in_a_row"):
            rounds = trips if question == "to_and_fro" else max(2, trips // WINDOW)
            messages = rounds * (2 if question == "to_and_fro" else WINDOW)
            for way in ways.values():
                getattr(way, question)(max(2, rounds // 4))
            samples: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(repeats):
                for name, way in ways.items():
                    samples[name].append(seconds(getattr(way, question), rounds) / messages)
            rows.append({"question": question, "bytes": size, "seconds": samples})
        dist.barrier()
        ways["link"].close()
    dist.destroy_process_group()
    return rows


def line(row: dict[str, Any]) -> str:
    plain, link = (statistics.median(row["seconds"][name]) for name in ("plain", "link"))
    columns = [f"{s * 1e6:9.1f} us {row['bytes'] / s / 1e9:6.2f} GB/s" for s in (plain, link)]
    what = f"{row['question'].replace('_', ' '):11} {row['bytes'] >> 10:6} KiB"
    return f"{what}   plain {columns[0]}   link {columns[1]}   {plain / link:5.2f}"


def main() -> None:
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [1, 64, 1024, 4096, 16384]
    parser.add_argument("--kib", type=int, nargs="+", default=sizes, help="Sizes of messages.")
    parser.add_argument(
        "--repeats", type=int, default=7, help="Samples of each way, whose medians are shown."
    )
    parser.add_argument("--out", help="File of the record; default: in benchmarks/results.")
    options = parser.parse_args()
    asked = {"sizes": [kib << 10 for kib in options.kib], "repeats": options.repeats}
    rows = run_on_ranks("benchmarks.links.run:worker", 2, asked, timeout_s=1800)[0]
    print(*map(line, rows), sep="\n")
    write_record(
        "links", "speed of the torch.distributed link and of plain gloo", {"rows": rows}, options.out
    )


if __name__ == "__main__":
    main()
