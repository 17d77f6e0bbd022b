"""``avgpipe bench transfers``: messages between two processes by each link, beside gloo alone and one memcpy."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.cli.bench.commands import TransfersConfig
from avgpipe.cli.bench.machine import memory_available_bytes
from avgpipe.cli.bench.sections import Skipped, Variant, measuring, plot, report, say, summarise, table
from avgpipe.cli.errors import arguments
from avgpipe.links.link import LocalLink, Mailbox
from avgpipe.measure.workers import Peers, Read, Through, leave, payload
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.timeline.plot import check_picture
from avgpipe.units import format_bytes
from avgpipe_ext import ring

LINKS = TransfersConfig.links
_LATENCY, _LATENCY_BYTES = "latency", 1024
_ASKS = {
    _LATENCY: "How long does a small message take, from sending to having the tensor?",
    "handed over": "A message as a tensor of the other process, unread: how many bytes a second?",
    "read once": "The message handed over, and added up by the receiver: how many bytes a second?",
}
_NOTES = """\
A message at a time to and fro, half of a round trip. The two threads that send and wait have a processor each, where
there are two; threads of gloo run anywhere. plain gloo: dist.send, and dist.irecv that is posted before. memcpy: one,
of the same bytes within a process, between as many buffers as the others touch. shm, gloo: our links, with the mailbox
that workers wait on; where it is not said, it spins briefly and then sleeps. local: within a process, nothing is
copied."""
_WORD_BYTES = 8
_COPIES, _USABLE = 16, 0.8  # of the largest message, held by both processes at most; of the free memory
_SPIN_S = 200e-6
_LATENCY_TRIPS = 1000  # there and back, of a sample
_SAMPLE_BYTES, _FEWEST, _MOST = 2**26, 3, 400  # of a sample in each direction, and its trips

Rows = list[
    tuple[str, Any, Callable[[int], float]]
]  # name, role, and what exchanges so many messages in seconds each


def run(config: TransfersConfig) -> None:
    with arguments():
        check(config)
        if config.plot is not None:
            check_picture(config.plot)
    sizes, rounds = config.sizes, config.rounds
    asked = {name: getattr(config, name) for name in ("links", "sizes", "rounds", "timeout_s")}
    limit_s = (
        60 + config.timeout_s + rounds * (5 + sum(20 + size / 5e7 for size in sizes))
    )  # far above the need
    with measuring():
        sections = run_on_ranks(f"{__name__}:worker", 2, asked, timeout_s=limit_s, say=say)[0]
        if config.plot is not None:
            plot(sections, f"messages between two processes, medians of {rounds} rounds", config.plot)
    report("transfers", config, {"sections": sections}, [*map(table, sections), _NOTES])


def check(config: TransfersConfig) -> None:
    """ValueError for what is out of range, and for what this machine cannot do."""
    if not config.links:
        raise ValueError(f"--links: name some of {','.join(LINKS)}")
    for name in config.links:
        if name not in LINKS:
            raise ValueError(f"--links {name}: no such link, use some of {','.join(LINKS)}")
    for size in config.sizes:
        if size < _WORD_BYTES or size % _WORD_BYTES:
            raise ValueError(f"--sizes {size}: must be multiples of {_WORD_BYTES} bytes, and at least one")
    if config.links == ("shm",) and not ring.supported():
        raise ValueError("--links shm: needs Linux, with /proc; use gloo")
    free, needed = memory_available_bytes("cpu"), _COPIES * max(config.sizes)
    if free is not None and needed > _USABLE * free:
        raise ValueError(
            f"--sizes {format_bytes(max(config.sizes))}: needs {format_bytes(needed)} and {format_bytes(free)} are "
            f"free; use at most {int(_USABLE * free / _COPIES) // 2**20} MiB"
        )


def worker(links: list[str], sizes: list[int], rounds: int, timeout_s: float) -> list[dict[str, Any]]:
    """A rank. What rank 0 measured counts."""
    torch.set_num_threads(1)
    join(timeout_s, "gloo")
    peers = Peers(timeout_s)
    left_out = [Skipped("shm", "needs Linux, with /proc")] if "shm" in links and not ring.supported() else []
    links = [name for name in links if all(name != skipped.name for skipped in left_out)]
    section = partial(_section, rounds=rounds, skipped=left_out)
    found = [section(_LATENCY, _LATENCY_BYTES, _latency_rows(peers, links))]
    # As in training where each worker has a processor: a wait spins briefly, then sleeps.
    makers = {"shm": peers.shared_memory, "gloo": peers.gloo}
    through = {name: make(True) for name, make in makers.items() if name in links}
    for size in sizes:
        for question, read in (("handed over", leave), ("read once", torch.Tensor.sum)):
            rows = _bandwidth_rows(peers, "local" in links, through, size, read)
            found.append(section(question, size, rows))
    for opened in through.values():
        opened.link.close(10)
    return found


def _latency_rows(peers: Peers, links: Sequence[str]) -> Rows:
    size, source, rows = _LATENCY_BYTES, payload(_LATENCY_BYTES, peers.rank), Rows()
    if "shm" in links:
        for how, spin_s in (("spinning", _SPIN_S), ("sleeping", 0.0)):
            rows.append((f"shm, the ring alone, {how}", "ours", _ring_alone(peers, size, spin_s)))
    for name, make in (("shm", peers.shared_memory), ("gloo", peers.gloo)):
        for how, spins in (("spinning", True), ("sleeping", False)) if name in links else ():
            rows.append((f"{name}, {how}", "ours", partial(make(spins).exchange, source=source)))
    if "local" in links:
        rows.append(("local", "ours", _local(peers, size, leave)))
    return [*rows, ("plain gloo", "baseline", _plain_gloo(peers, size, leave))]


def _bandwidth_rows(peers: Peers, local: bool, through: dict[str, Through], size: int, read: Read) -> Rows:
    source = payload(size, peers.rank)
    rows: Rows = [("memcpy", "limit", _memcpy(peers, size, read))]
    rows += [
        (name, "ours", partial(link.exchange, source=source, read=read)) for name, link in through.items()
    ]
    if local:
        rows.append(("local", "ours", _local(peers, size, read)))
    return [*rows, ("plain gloo", "baseline", _plain_gloo(peers, size, read))]


def _section(question: str, size: int, rows: Rows, rounds: int, skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Both ranks measure all rows in turn, round after round; rank 0 tells what."""
    progress(f"{question}, {format_bytes(size)}")
    trips = _LATENCY_TRIPS if question == _LATENCY else min(_MOST, max(_FEWEST, _SAMPLE_BYTES // size))
    samples: list[list[float]] = [[] for _ in rows]
    for _, _, exchange in rows:  # makes slots and threads, learns sizes
        dist.barrier()
        exchange(trips)
    with _own_processor(dist.get_rank()):
        for _ in range(rounds):
            for (_, _, exchange), seconds in zip(rows, samples):
                dist.barrier()
                exchange(1)
                seconds.append(exchange(trips))
    head = {
        "question": question,
        "case": format_bytes(size),
        "asks": _ASKS[question],
        "elements": size,
        "memory_bytes": 0,
    }
    variants = [Variant(name, role, 1.0, partial(exchange, 1)) for name, role, exchange in rows]
    return summarise(head, variants, samples, skipped)


@contextmanager
def _own_processor(rank: int) -> Iterator[None]:
    """Keep this thread on a processor that the other process does not use, where there are two.

    Workers that compute have one each; of two processes that only take turns, the system makes neighbours on one, and
    waking a process there is no measure of waking one elsewhere.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(allowed) < 2:
        yield
        return
    os.sched_setaffinity(0, {allowed[rank]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


# ---- ways to exchange messages: each is called by both ranks with the same count ------------------------------------


def _ring_alone(peers: Peers, size: int, spin_s: float) -> Callable[[int], float]:
    """The ring without a link: copied into a slot, noticed, and another copied into a slot of the way back."""
    mine, pid, theirs = peers.inboxes()
    (into_me,), (into_them,) = peers.into(peers.rank), peers.into(peers.other)
    sender, receiver = theirs.sender(into_them), mine.receiver(into_me, pid)
    source = payload(size, peers.rank)

    def send() -> None:
        ring.copy(sender.reserve(size), source.data_ptr(), size)
        sender.publish(size, 0, 0, 0, 0)

    def exchange(count: int) -> float:
        begin = time.perf_counter()
        for number in range(count):
            if number or peers.rank == 0:  # the second rank answers what it has taken
                send()
            seen = mine.bell.count()
            while receiver.take() is None:
                if mine.bell.wait(seen, peers.timeout_s, spin_s) == seen:
                    raise TimeoutError(f"nothing came through the ring for {peers.timeout_s:g} s")
                seen = mine.bell.count()
        if peers.rank != 0:
            send()
        return (time.perf_counter() - begin) / (2 * count)

    return exchange


def _local(peers: Peers, size: int, read: Read) -> Callable[[int], float]:
    """A link within a process; the second rank waits meanwhile."""
    mailbox, key, source = Mailbox(), peers.key(1, 0), payload(size, 0)
    link = LocalLink(mailbox, torch.device("cpu"))

    def exchange(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count if peers.rank == 0 else 0):
            link.send(key, source)
            mailbox.wait_until(lambda: key in mailbox, 0)
            read(mailbox.take(key))
        return (time.perf_counter() - begin) / count

    return exchange


def _plain_gloo(peers: Peers, size: int, read: Read) -> Callable[[int], float]:
    """dist.send and dist.irecv; the receive is posted before the message that is answered is sent."""
    source, target = payload(size, peers.rank), payload(size, 0)

    def exchange(count: int) -> float:
        coming = dist.irecv(target, peers.other)
        dist.barrier()  # the first one is posted on both sides
        begin = time.perf_counter()
        for left in range(count, 0, -1):
            if peers.rank == 0:
                dist.send(source, peers.other)
            assert coming is not None
            coming.wait()
            read(target)
            coming = dist.irecv(target, peers.other) if left > 1 else None
            if peers.rank == 1:
                dist.send(source, peers.other)
        return (time.perf_counter() - begin) / (2 * count)

    return exchange


def _memcpy(peers: Peers, size: int, read: Read) -> Callable[[int], float]:
    """One memcpy of the same bytes between two buffers of one process; the second rank waits meanwhile.

    It goes to and fro between two pairs of buffers, so that caches serve it as they serve the ways above: those
    touch a source and a slot in either direction.
    """
    pairs = [(payload(size, 0), payload(size, 1)) for _ in range(2 if peers.rank == 0 else 0)]

    def exchange(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count if pairs else 0):
            for source, target in pairs:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
                read(target)
        return (time.perf_counter() - begin) / (2 * count)

    return exchange
