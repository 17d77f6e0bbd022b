"""The two processes of the comparison: all rows of a section in turn, round after round."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from avgpipe.bench.machine import memory_available_bytes
from avgpipe.bench.result import SectionResult, summarise
from avgpipe.bench.section import Role, Section, Skipped, Variant
from avgpipe.bench.transfers import ways
from avgpipe.bench.transfers.settings import LATENCY_BYTES, TransferSettings
from avgpipe.bench.transfers.ways import Peers, Read, Through, Way
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.process import progress
from avgpipe.ranks.rendezvous import join
from avgpipe.units import format_bytes
from avgpipe_ext import ring

GLOO, MEMCPY = "plain gloo", "memcpy"
LATENCY, HANDED, READ = "latency", "handed over", "read once"
_ASKS = {
    LATENCY: "How long does a small message take?",
    HANDED: "A message as a tensor of the other process, unread: how many bytes a second?",
    READ: "The same, and the receiver adds up all of it.",
}
_NEEDS_LINUX = "needs Linux, with /proc"
_USABLE = 0.8  # of the free memory
_SPIN_S = 200e-6
_LATENCY_TRIPS = 1000  # there and back, of a sample
_SAMPLE_BYTES = 2**26  # of a sample, in each direction
_TRIPS = 3, 400  # at least and at most

Rows = list[tuple[str, Role, Way]]


def check(settings: TransferSettings) -> None:
    """ValueError for what this machine cannot do."""
    if settings.links == ("shm",) and not ring.supported():
        raise ValueError(f"--links shm: {_NEEDS_LINUX}; use gloo")
    free = memory_available_bytes("cpu")
    if free is not None and settings.memory_bytes > _USABLE * free:
        fitting = int(_USABLE * free * max(settings.sizes) / settings.memory_bytes)
        raise ValueError(
            f"--sizes {format_bytes(max(settings.sizes))}: needs {settings.memory_bytes / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; use at most {fitting // 2**20} MiB"
        )


def run(settings: TransferSettings, say: Callable[[str], None] = lambda line: None) -> list[SectionResult]:
    """Start both processes and measure. PipelineError when one of them fails."""
    found = run_on_ranks(
        f"{__name__}:worker", 2, {"settings": settings.to_json()}, timeout_s=settings.budget_s, say=say
    )
    return [SectionResult.from_json(section) for section in found[0]]


def worker(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A rank. What rank 0 measured counts."""
    chosen = TransferSettings.from_json(settings)
    torch.set_num_threads(1)
    join(chosen.timeout_s, "gloo")
    peers = Peers(chosen.timeout_s)
    skipped = _missing(chosen)
    links = [name for name in chosen.links if not any(item.name == name for item in skipped)]
    found = [_section(LATENCY, LATENCY_BYTES, _latency_rows(peers, links), chosen.rounds, skipped)]
    through = _links(peers, links)
    for size in chosen.sizes:
        for question, read in ((HANDED, ways.leave), (READ, ways.add_up)):
            rows = _bandwidth_rows(peers, links, through, size, read)
            found.append(_section(question, size, rows, chosen.rounds, skipped))
    for open_link in through.values():
        open_link.link.close(10)
    return [section.to_json() for section in found]


def _missing(settings: TransferSettings) -> list[Skipped]:
    return [Skipped("shm", _NEEDS_LINUX)] if "shm" in settings.links and not ring.supported() else []


def _latency_rows(peers: Peers, links: Sequence[str]) -> Rows:
    size = LATENCY_BYTES
    rows: Rows = []
    if "shm" in links:
        for how, spin_s in (("spinning", _SPIN_S), ("sleeping", 0.0)):
            rows.append((f"shm, the ring alone, {how}", "ours", ways.RingAlone(peers, size, spin_s)))
    for name, make in (("shm", ways.through_shared_memory), ("gloo", ways.through_group)):
        if name in links:
            for how, spins in (("spinning", True), ("sleeping", False)):
                rows.append((f"{name}, {how}", "ours", make(peers, spins).sending(size)))
    if "local" in links:
        rows.append(("local", "ours", ways.Local(peers, size)))
    return [*rows, (GLOO, "baseline", ways.PlainGloo(peers, size))]


def _links(peers: Peers, links: Sequence[str]) -> dict[str, Through]:
    """As in training where each worker has a processor: a wait spins briefly, then sleeps."""
    makers = {"shm": ways.through_shared_memory, "gloo": ways.through_group}
    return {name: make(peers, True) for name, make in makers.items() if name in links}


def _bandwidth_rows(
    peers: Peers, links: Sequence[str], through: dict[str, Through], size: int, read: Read
) -> Rows:
    rows: Rows = [(MEMCPY, "limit", ways.Memcpy(peers, size, read))]
    rows += [(name, "ours", link.sending(size, read)) for name, link in through.items()]
    if "local" in links:
        rows.append(("local", "ours", ways.Local(peers, size, read)))
    return [*rows, (GLOO, "baseline", ways.PlainGloo(peers, size, read))]


@contextmanager
def _own_processor(rank: int) -> Iterator[None]:
    """Inside, this thread stays on a processor that the other process's does not use, where there are two.

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


def _section(question: str, size: int, rows: Rows, rounds: int, skipped: Sequence[Skipped]) -> SectionResult:
    """Both ranks measure, rank 0 tells what."""
    progress(f"{question}, {format_bytes(size)}")
    fewest, most = _TRIPS
    trips = _LATENCY_TRIPS if question == LATENCY else min(most, max(fewest, _SAMPLE_BYTES // size))
    samples: list[list[float]] = [[] for _ in rows]
    for _, _, way in rows:  # makes slots and threads, learns sizes
        dist.barrier()
        way.exchange(trips)
    with _own_processor(dist.get_rank()):
        for _ in range(rounds):
            for (_, _, way), seconds in zip(rows, samples):
                dist.barrier()
                way.exchange(1)
                seconds.append(way.exchange(trips))
    variants = [Variant(name, role, 1.0, lambda way=way: way.exchange(1)) for name, role, way in rows]  # type: ignore[misc]
    section = Section(question, format_bytes(size), _ASKS[question], size, 0, lambda: variants)
    return summarise(section, variants, samples, skipped)
