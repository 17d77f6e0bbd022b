"""``avgpipe bench transfers``: times messages between two processes by each link, plain gloo, and one memcpy."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.cli.output import arguments, show_status
from avgpipe.links.link import LocalLink, Mailbox
from avgpipe.measure.workers import OtherWorkers, Read, leave, payload
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.units import format_bytes
from avgpipe_ext import ring
from avgpipe_lab.bench import Way, check_memory, check_names, measuring, report, summarise
from avgpipe_lab.commands import TransfersConfig

LINKS = TransfersConfig.links
_ASKS = {
    "latency": "How long does a small message take, from the send until the tensor is there?",
    "handed over": "A message as a tensor of the other process, unread: how many bytes a second?",
    "read once": "The message handed over, and added up by the receiver: how many bytes a second?",
}
_NOTES = """\
One message at a time back and forth; times are half of a round trip. The threads that send and wait have a processor
each, if there are two; threads of gloo run anywhere. plain gloo: dist.send, and dist.irecv that is posted before.
memcpy: one, of the same bytes within a process, between as many buffers as the others use. shm, gloo: avgpipe's links,
with the mailbox that workers wait on; unless stated otherwise it spins briefly and then sleeps. local: within a
process, nothing is copied."""
_LATENCY_BYTES, _WORD_BYTES = 1024, 8
_COPIES = 16  # most copies of the largest message that both processes hold
_LATENCY_TRIPS = 1000  # round trips of a sample
_SAMPLE_BYTES, _FEWEST, _MOST = 2**26, 3, 400  # of a sample in each direction; least and most trips

Exchange = Callable[[int], float]  # both ranks call it with a number of messages; returns seconds per message


def run(config: TransfersConfig) -> None:
    with arguments():
        check(config)
    with measuring():
        asked = {"config": config.to_json()}  # includes the timeout of waits
        sections, *_ = run_on_ranks(f"{__name__}:worker", 2, asked, say=show_status)
    report("transfers", config, sections, _NOTES)


def check(config: TransfersConfig) -> None:
    """Refuse values that are out of range, and links that this machine does not have. ValueError."""
    if not config.links:
        raise ValueError(f"--links: name some of {','.join(LINKS)}")
    check_names("--links", config.links, LINKS)
    for size in config.sizes:
        if size < _WORD_BYTES or size % _WORD_BYTES:
            raise ValueError(f"--sizes {size}: must be multiples of {_WORD_BYTES} bytes, and at least one")
    if config.links == ("shm",) and not ring.supported():
        raise ValueError("--links shm: needs Linux, with /proc; use gloo")
    check_memory("--sizes", max(config.sizes), _COPIES)


def worker(config: str) -> list[dict[str, Any]]:
    """Measure as a rank; the result of rank 0 is used."""
    asked = TransfersConfig.from_json(config)
    torch.set_num_threads(1)
    join(asked.timeout_s, "gloo")
    peers = OtherWorkers(asked.timeout_s)
    makers = {"shm": peers.shared_memory, "gloo": peers.gloo}
    left_out = {} if ring.supported() or "shm" not in asked.links else {"shm": "needs Linux, with /proc"}
    names = [name for name in makers if name in asked.links and name not in left_out]
    # A worker with its own processor spins before it sleeps, others sleep at once.
    through = {
        (name, how): makers[name](how == "spinning") for name in names for how in ("spinning", "sleeping")
    }
    found = []
    for size, question in [(_LATENCY_BYTES, "latency"), *product(asked.sizes, ("handed over", "read once"))]:
        progress(f"{question}, {format_bytes(size)}")
        latency, source = question == "latency", payload(size, peers.rank)
        read: Read = torch.Tensor.sum if question == "read once" else leave
        ways = [] if latency else [Way("memcpy", "limit", 1.0, _memcpy(peers, size, read))]
        for (name, how), link in through.items():
            if latency or how == "spinning":
                exchange = partial(link.exchange, source=source, read=read)
                ways.append(Way(f"{name}, {how}" if latency else name, "ours", 1.0, exchange))
        if "local" in asked.links:
            ways.append(Way("local", "ours", 1.0, _local(peers, source, read)))
        ways.append(Way("plain gloo", "baseline", 1.0, _plain_gloo(peers, source, read)))
        trips = _LATENCY_TRIPS if latency else min(_MOST, max(_FEWEST, _SAMPLE_BYTES // size))
        head = {"question": question, "case": format_bytes(size), "asks": _ASKS[question], "elements": size}
        found.append(summarise(head, ways, _samples(ways, trips, asked.rounds), left_out))
    for link in through.values():
        link.link.close(10)
    return found


def _samples(ways: Sequence[Way], trips: int, rounds: int) -> list[list[float]]:
    """Measure all ways in turn on both ranks, round after round.

    Each thread has its own processor meanwhile, like workers that compute: the kernel would place two
    processes that only take turns on one processor, and waking a process there is no measure of waking one
    elsewhere.
    """
    allowed = sorted(os.sched_getaffinity(0))
    samples: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):  # the first round makes slots and threads, and learns sizes
        for way, seconds in zip(ways, samples):
            dist.barrier()
            way.run(1)
            seconds.append(way.run(trips))
        if len(allowed) > 1 and number == 0:
            os.sched_setaffinity(0, {allowed[dist.get_rank()]})
    os.sched_setaffinity(0, allowed)
    return [seconds[1:] for seconds in samples]


# ---- ways to exchange messages, besides avgpipe's links between processes --------------------------------------------


def _local(peers: OtherWorkers, source: torch.Tensor, read: Read) -> Exchange:
    """Return a link within a process."""
    mailbox, key = Mailbox(), peers.key(1, 0)
    link = LocalLink(mailbox, torch.device("cpu"))

    def once() -> None:
        link.send(key, source)
        mailbox.wait_until(lambda: key in mailbox, 0)
        read(mailbox.take(key))

    return partial(_alone, peers, once)


def _memcpy(peers: OtherWorkers, size: int, read: Read) -> Exchange:
    """Return one memcpy of the same bytes between two buffers of one process.

    It alternates between two pairs of buffers, so that caches serve it as they serve the ways above, which
    use a source and a slot in either direction.
    """
    pairs = cycle([(payload(size, 0), payload(size, 1)) for _ in range(2)])

    def once() -> None:
        source, target = next(pairs)
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        read(target)

    return partial(_alone, peers, once)


def _alone(peers: OtherWorkers, once: Callable[[], None], count: int) -> float:
    """Return the seconds of ``once`` on the first rank; the second one waits meanwhile."""
    begin = time.perf_counter()
    for _ in range(count if peers.rank == 0 else 0):
        once()
    return (time.perf_counter() - begin) / count


def _plain_gloo(peers: OtherWorkers, source: torch.Tensor, read: Read) -> Exchange:
    """Return dist.send and dist.irecv; the receive is posted before the message that it answers is sent."""
    target = torch.empty_like(source)

    def exchange(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            coming = dist.irecv(target, peers.other)
            assert coming is not None
            if peers.rank == 0:
                dist.send(source, peers.other)
            coming.wait()
            read(target)
            if peers.rank == 1:
                dist.send(source, peers.other)
        return (time.perf_counter() - begin) / (2 * count)

    return exchange
