"""Costs of workers besides the layers, measured in separate processes: runtime, memory, link and sums."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.errors import PeerLost, PipelineTimeout
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Channel, Key, Link, Mailbox, Message
from avgpipe.links.shared import Inbox, SharedLink
from avgpipe.links.transport import Endpoint
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.profile import LinkProfile
from avgpipe.ranks.environment import return_freed_memory, status_bytes
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.met import gather
from avgpipe.ranks.rendezvous import join
from avgpipe_ext import ring

_TIMEOUT_S = 120.0
_SMALL, _LARGE = 2**10, 2**22  # bytes of the messages
_CPU = torch.device("cpu")
_ALONE, _CROWDED = 1, 1 << 20  # numbers of neighbours with which a mailbox spins, and does not
_SAMPLES = 5
_STAGES, _MICRO_BATCHES, _BATCHES = 2, 8, 9  # of the pipeline that times the runtime
_VALUES = 4096  # float32 values of a sample
_CACHES_BYTES = 2**25
_BETWEEN_BATCHES = ("caller", "loader")
_LIBRARIES = ("avgpipe", "transformers")  # libraries whose modules a worker loads for a model


@dataclass(frozen=True)
class WorkerCosts:
    """Costs of a worker; the fields are explained in ``Profile``.

    Attributes:
        batch_s: Seconds of the runtime per batch, besides its actions.
    """

    action_s: float
    batch_s: float
    process_bytes: float
    link: LinkProfile | None
    reduction: LinkProfile | None

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> WorkerCosts:
        """Invert ``dataclasses.asdict``."""
        links = {name: LinkProfile(**found[name]) for name in ("link", "reduction") if found[name]}
        return cls(**{**found, **links})


def measure_workers(model: Sequence[nn.Module], threads: int, with_link: bool) -> WorkerCosts:
    """Start one process, or two that are linked like workers of one host. PipelineError when one fails.

    The processes load the code of ``model``, which takes memory.
    """
    used = {type(module).__module__ for layer in model for module in layer.modules()}
    modules = sorted(name for name in used if name.partition(".")[0] in _LIBRARIES)
    arguments = {"modules": modules, "with_link": with_link, "threads": threads}
    processes = 2 if with_link else 1
    found = run_on_ranks(f"{__name__}:worker", processes, arguments, timeout_s=_TIMEOUT_S, threads=threads)[0]
    return WorkerCosts.from_dict(found)


def worker(modules: Sequence[str], with_link: bool, threads: int) -> dict[str, Any]:
    """Run as a process of :func:`measure_workers`. The result of rank 0 is used."""
    torch.set_num_threads(threads)
    for name in modules:
        importlib.import_module(name)
    return asdict(costs_here(with_link, _TIMEOUT_S))


def costs_here(with_link: bool, timeout_s: float) -> WorkerCosts:
    """Measure in a process of ``run_on_ranks``, which counts as a worker without a stage.

    The link is measured between ranks 0 and 1, if ``with_link``; they then have a process group, with timeout
    ``timeout_s``. Otherwise this process measures alone.
    """
    join(timeout_s, "gloo", size=2 if with_link else 1)
    link, reduction = _between(timeout_s) if with_link else (None, None)
    runtime_seconds(0)  # loads everything that a pipeline loads
    return_freed_memory()  # a pipeline would reuse the temporary memory of loading
    resident = status_bytes("VmRSS")
    action_s, batch_s = runtime_seconds(_CACHES_BYTES)
    return WorkerCosts(action_s, batch_s, resident, link, reduction)


# ---- between two workers -------------------------------------------------------------------------------------------


def _between(timeout_s: float) -> tuple[LinkProfile, LinkProfile]:
    """Measure messages and sums between the two ranks."""
    peers = OtherWorkers(timeout_s)
    make = peers.shared_memory if ring.supported() else peers.gloo
    # A worker that waits for an action of another one mostly waits so long that it sleeps.
    through = make(False)
    messages_s = [
        _median_s(partial(through.exchange, source=payload(size, peers.rank)), trips)
        for size, trips in ((_SMALL, 200), (_LARGE, 8))
    ]
    sums_s = [
        _median_s(partial(_sums, torch.zeros(size // 4)), times)
        for size, times in ((_SMALL, 20), (_LARGE, 8))  # a small one can take 8 ms
    ]
    dist.barrier()
    through.link.close(10)
    # Each of the two sends as many bytes as the sum has, one half in each of two steps.
    return _line(*messages_s), _line(sums_s[0] / 2, sums_s[1] / 2, share=0.5)


def _line(small_s: float, large_s: float, share: float = 1.0) -> LinkProfile:
    """Return the line through the seconds of a small and a large message, for ``share`` of the bytes."""
    return LinkProfile(small_s, share * (_LARGE - _SMALL) / max(large_s - small_s, 1e-9))


def _median_s(exchange: Callable[[int], float], times: int) -> float:
    exchange(times)  # makes slots, learns sizes
    samples = []
    for _ in range(_SAMPLES):
        dist.barrier()
        exchange(1)
        samples.append(exchange(times))
    return statistics.median(samples)


def _sums(values: torch.Tensor, count: int) -> float:
    """Sum ``count`` times over both processes; return the seconds of one sum."""
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(values)
    return (time.perf_counter() - begin) / count


Read = Callable[[torch.Tensor], object]


def leave(tensor: torch.Tensor) -> None:
    """Do not read a message: it was handed over."""


def payload(size: int, rank: int) -> torch.Tensor:
    """Return ``size`` bytes of int64, different for each rank."""
    return torch.arange(rank, rank + size // 8)


class OtherWorkers:
    """This process and the other one: ranks 0 and 1, whose stages have the same numbers."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.rank = timeout_s, dist.get_rank()
        self.other = 1 - self.rank

    def into(self, rank: int) -> list[Channel]:
        """Return the channel that ends at ``rank``: activations go up, gradients go down."""
        return [Channel(Message("FB"[1 - rank]), 0, 1 - rank, rank)]

    def key(self, rank: int, number: int) -> Key:
        """Return the key of message ``number`` to a rank."""
        return Key(*self.into(rank)[0], number, 0)

    def inboxes(self) -> tuple[Inbox, int, Inbox]:
        """Return this process's inbox, and the other one's id and inbox."""
        mine = Inbox.create(self.into(self.rank))
        theirs = gather(mine.offer())[self.other]
        opened = theirs["pid"], Inbox.open(theirs, self.into(self.other))
        dist.barrier()  # keep the file open until both processes have opened the other's
        return mine, *opened

    def shared_memory(self, spins: bool) -> Through:
        mine, pid, theirs = self.inboxes()
        end = self._end(Mailbox(mine.bell, _ALONE if spins else _CROWDED))
        return Through(self, SharedLink(mine, theirs, pid, end), end.mailbox)

    def gloo(self, spins: bool) -> Through:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        end = self._end(Mailbox(None, _ALONE if spins else _CROWDED))
        lost = lambda doing: PeerLost(f"the other process is gone; seen when {doing}")  # noqa: E731
        return Through(self, GroupLink(group, self.other, lost, end), end.mailbox)

    def _end(self, mailbox: Mailbox) -> Endpoint:
        return Endpoint(mailbox, _CPU, self.into(self.rank), self.into(self.other))


class Through:
    """A link, with the mailbox on which its worker waits. Both ranks exchange one message at a time."""

    def __init__(self, peers: OtherWorkers, link: Link, mailbox: Mailbox) -> None:
        self._peers, self.link, self._mailbox = peers, link, mailbox
        self._next = 0

    def exchange(self, count: int, source: torch.Tensor, read: Read = leave) -> float:
        """Return the seconds of one direction, the mean of ``count`` round trips."""
        begin = time.perf_counter()
        for number in range(self._next, self._next + count):
            if self._peers.rank == 0:
                self.link.send(self._peers.key(1, number), source)
                self._receive(number, read)
            else:
                self._receive(number, read)
                self.link.send(self._peers.key(0, number), source)
        self._next += count
        return (time.perf_counter() - begin) / (2 * count)

    def _receive(self, number: int, read: Read) -> None:
        key, mailbox = self._peers.key(self._peers.rank, number), self._mailbox
        if not mailbox.wait_until(lambda: key in mailbox, self._peers.timeout_s):
            raise PipelineTimeout(
                f"rank {self._peers.rank} waited {self._peers.timeout_s:g} s for {self.link.name}"
            )
        read(mailbox.take(key))


# ---- the runtime ---------------------------------------------------------------------------------------------------


def runtime_seconds(caches_bytes: int) -> tuple[float, float]:
    """Return the seconds of the runtime for an action, beyond the layers, and for a batch.

    They are measured in a pipeline over all ranks, or within this process: all that its workers record
    besides computing and waiting. Layers write ``caches_bytes`` bytes, and so empty the caches, as real ones
    do: the runtime is slower then.
    """
    model = [_Cold(caches_bytes) for _ in range(_STAGES)]
    batch = torch.zeros(_MICRO_BATCHES, _VALUES)
    plan = Plan(stages=_STAGES, micro_batches=_MICRO_BATCHES, schedule="1f1b")
    sgd = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
    with Pipeline(model, plan, loss_fn=_loss, optimizer=sgd, device="cpu", timeout_s=_TIMEOUT_S) as pipeline:
        for _ in pipeline.train([(batch, batch)] * _BATCHES):
            pass
        timeline = pipeline.timeline().window(_BATCHES // 3, _BATCHES - 1)
    actions = sum(event.kind in "FB" for event in timeline.events)
    batches = len({event.batch for event in timeline.events}) * timeline.stages
    rows = timeline.breakdown()
    between_s = sum(row.host_s.get(detail, 0.0) for row in rows for detail in _BETWEEN_BATCHES)
    other_s = sum(row.send_s + row.other_s + sum(row.host_s.values()) for row in rows)
    return (other_s - between_s) / actions, between_s / batches


class _Cold(nn.Module):
    """Maps (samples, values) to itself."""

    def __init__(self, caches_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scratch = torch.zeros(caches_bytes // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.add_(1)
        return x + self.weight


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()
