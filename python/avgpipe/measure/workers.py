"""Costs of workers beside the layers, measured in separate processes: runtime, memory, link and sums."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.measure.link import Peers, Through, payload
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning.profile import LinkProfile
from avgpipe.ranks.launch import run_on_ranks
from avgpipe.ranks.machine import return_freed_memory
from avgpipe.ranks.process import call
from avgpipe.ranks.rendezvous import join
from avgpipe_ext import ring

_TIMEOUT_S = 120.0
_SMALL, _LARGE = 2**10, 2**22  # bytes of the messages
_SMALL_TRIPS, _LARGE_TRIPS = 200, 8  # of a sample
_SUMS = 20, 8  # the same of sums, of which a small one was seen to take 8 ms
_SAMPLES = 5
_STAGES, _MICRO_BATCHES, _BATCHES = 2, 8, 9  # of the pipeline whose runtime is timed
_VALUES = 4096  # of a sample, float32
_CACHES_BYTES = 2**25
_BETWEEN_BATCHES = ("caller", "loader")
_LIBRARIES = ("avgpipe", "transformers")  # whose modules a worker loads for a model


@dataclass(frozen=True)
class WorkerCosts:
    """Costs of a worker; the fields are explained in ``Profile``.

    Attributes:
        batch_s: What the runtime takes for a batch beside its actions.
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


def measure_workers(
    model: Sequence[nn.Module],
    threads: int,
    with_link: bool,
    loads: tuple[str, dict[str, Any]] | None = None,
) -> WorkerCosts:
    """Start one process, or two that are linked as workers of one host are. PipelineError when one fails.

    model: of which the processes load the code, which takes memory. loads: see ``profile``.
    """
    modules = sorted(
        {
            name
            for layer in model
            for m in layer.modules()
            if (name := type(m).__module__).partition(".")[0] in _LIBRARIES
        }
    )
    arguments = {"modules": modules, "with_link": with_link, "threads": threads, "loads": loads}
    processes = 2 if with_link else 1
    found = run_on_ranks(f"{__name__}:worker", processes, arguments, timeout_s=_TIMEOUT_S, threads=threads)[0]
    return WorkerCosts.from_dict(found)


def worker(
    modules: Sequence[str], with_link: bool, threads: int, loads: tuple[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """A process of :func:`measure_workers`. What rank 0 measured counts."""
    torch.set_num_threads(threads)
    for name in modules:
        importlib.import_module(name)
    loaded = call(*loads) if loads is not None and os.environ["RANK"] == "0" else None
    found = costs_here(with_link, _TIMEOUT_S)
    del loaded
    return asdict(found)


def costs_here(with_link: bool, timeout_s: float) -> WorkerCosts:
    """Measure in a process of ``run_on_ranks``, which counts as a worker without its share of the model.

    with_link: in ranks 0 and 1, which then have a process group, whose waits end after timeout_s; else this process is
    alone in its own.
    """
    join(timeout_s, "gloo", size=2 if with_link else 1)
    link, reduction = _between(timeout_s) if with_link else (None, None)
    runtime_seconds(0)  # what a pipeline loads is there
    return_freed_memory()  # what loading took for a moment, a pipeline would use again
    resident = _resident_bytes()
    action_s, batch_s = runtime_seconds(_CACHES_BYTES)
    return WorkerCosts(action_s, batch_s, resident, link, reduction)


# ---- between two workers -------------------------------------------------------------------------------------------


def _between(timeout_s: float) -> tuple[LinkProfile, LinkProfile]:
    """Measure messages and sums between the two ranks."""
    peers = Peers(timeout_s)
    make = peers.shared_memory if ring.supported() else peers.gloo
    # A worker that waits for an action of another one mostly waits so long that it sleeps.
    through = make(False)
    small_s = _message_s(through, payload(_SMALL, peers.rank), _SMALL_TRIPS)
    large_s = _message_s(through, payload(_LARGE, peers.rank), _LARGE_TRIPS)
    sums_s = [_sum_s(size, trips) for size, trips in zip((_SMALL, _LARGE), _SUMS)]
    dist.barrier()
    through.link.close(10)
    # Each of two sends as many bytes as there are, one half in each of two steps.
    return _line(small_s, large_s), _line(sums_s[0] / 2, sums_s[1] / 2, share=0.5)


def _line(small_s: float, large_s: float, share: float = 1.0) -> LinkProfile:
    """Seconds of a small one, and bytes a second of a large one beyond that, of ``share`` of the bytes."""
    return LinkProfile(small_s, share * (_LARGE - _SMALL) / max(large_s - small_s, 1e-9))


def _sum_s(size: int, times: int) -> float:
    """Seconds of a sum over both."""
    values = torch.zeros(size // 4)
    samples = []
    for _ in range(_SAMPLES + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(values)
        samples.append((time.perf_counter() - begin) / times)
    return statistics.median(samples[1:])


def _message_s(through: Through, source: torch.Tensor, trips: int) -> float:
    through.exchange(trips, source)  # makes slots, learns sizes
    samples = []
    for _ in range(_SAMPLES):
        dist.barrier()
        through.exchange(1, source)
        samples.append(through.exchange(trips, source))
    return statistics.median(samples)


# ---- the runtime ---------------------------------------------------------------------------------------------------


def runtime_seconds(caches_bytes: int) -> tuple[float, float]:
    """Return what the runtime takes for an action beyond the layers, and for a batch.

    In a pipeline over all ranks, or within this process: what its workers record besides computing and waiting. Layers
    write so many bytes, and leave nothing in such caches, as real ones do: the runtime is slower then.
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
    of_action_s = of_batch_s = 0.0
    for row in timeline.breakdown():
        between_s = sum(row.host_s.get(detail, 0.0) for detail in _BETWEEN_BATCHES)
        of_batch_s += between_s
        of_action_s += row.send_s + row.other_s + sum(row.host_s.values()) - between_s
    return of_action_s / actions, of_batch_s / batches


class _Cold(nn.Module):
    """(samples, values) -> the same."""

    def __init__(self, caches_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scratch = torch.zeros(caches_bytes // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.add_(1)
        return x + self.weight


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
