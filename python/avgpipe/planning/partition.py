"""Partitions: the result of a partitioner, the partitioners by name, and the two that are not from a paper."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from avgpipe import plugins
from avgpipe.errors import check_count, nearest
from avgpipe.model.balance import check_stages, least_bottleneck
from avgpipe.plan import Plan
from avgpipe.planning.chain import (
    Chain,
    limit_of,
    stage_costs,
)
from avgpipe.planning.cluster import Cluster, ring_s
from avgpipe.planning.cuts import CutSearch, Training
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.planning.simulation import steady_batch_s
from avgpipe.schedule import RECOMPUTE, Schedule, build_schedule, published
from avgpipe.systems import micro_batches
from avgpipe.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Partition:
    """Layers and number of workers of each stage, as ``Plan`` takes them, and the method's prediction.

    - system, micro_batches: the plan's system, one of ``avgpipe.systems``, and the micro-batches of a batch.
    - boundaries: the first layers of stages 1 to K-1. replication: workers of each stage.
    - stage_s: per stage, the predicted seconds between two micro-batches if it never waits: forward and
      backward over its replicas, or their synchronisation if that is longer.
    - value: the optimum of ``objective``: seconds, bytes or, for "2bw", samples per second.
    - memory_bytes: per stage, of one of its workers; empty if the method does not compute memory.
    - micro_batch_size: samples. workers: number of workers available. layers: number of layers of the model.
    - recompute: of "2bw": activations are computed again in the backward.
    - placement: per stage its workers, in ascending order; None: numbered stage after stage.
    - machines: of "dapple": per stage, how many devices it has on each machine.
    - notes: further remarks, a sentence each.
    """

    method: str
    layers: int
    boundaries: Sequence[int]
    replication: Sequence[int]
    stage_s: Sequence[float]
    objective: str
    value: float
    micro_batch_size: float
    workers: int
    memory_bytes: Sequence[float] = ()
    recompute: bool = False
    placement: Sequence[Sequence[int]] | None = None
    machines: Sequence[Sequence[int]] | None = None
    notes: tuple[str, ...] = ()
    system: str = "avgpipe"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))
        for kept, names in (
            (int, ("boundaries", "replication")),
            (float, ("stage_s", "memory_bytes")),
            (tuple, ("placement", "machines")),
        ):
            for name in names:
                if getattr(self, name) is not None:
                    object.__setattr__(self, name, tuple(map(kept, getattr(self, name))))
        if any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(f"boundaries={self.boundaries}: must rise between 0 and {self.layers} layers")
        if len(self.replication) != self.stages or len(self.stage_s) != self.stages:
            raise ValueError(
                f"replication={self.replication} and stage_s={self.stage_s}: give one for each of {self.stages} stages"
            )

    @classmethod
    def of_chain(cls, chain: Chain, firsts: Sequence[int], *, exact: bool = True, **found: Any) -> Partition:
        """Return the partition of ``chain`` into stages that begin with ``firsts``; other fields are passed on.

        Notes say whether transfers between workers count as free, and, unless ``exact``, that better ones may
        exist.
        """
        notes = []
        if chain.link is not None and chain.link.bytes_per_s == math.inf:
            notes.append("transfers count as free: the profile has no link, give link= or levels=")
        if not exact:
            notes.append("found by local search, as there are too many possibilities to try all")
        return cls(
            layers=chain.layers,
            boundaries=firsts[1:],
            micro_batch_size=chain.micro_batch_size,
            notes=tuple(notes),
            **found,
        )

    def plan(self, **options: Any) -> Plan:
        """Return a plan of this partition for the method's system; ``options`` complete it.

        It has the micro-batches of the optimum, or more if every replica needs one.
        """
        wanted = options.pop("micro_batches", self.micro_batches)
        made: dict[str, Any] = {
            "stages": self.stages,
            "partition": self.boundaries or None,
            "replication": self.replication if max(self.replication) > 1 else None,
            "placement": self.placement,
            "micro_batches": micro_batches(self.system, self.stages, self.replication, wanted),
            "recompute": "always" if self.recompute else "never",
        }
        return Plan.for_system(self.system, **{**made, **options})

    @property
    def stages(self) -> int:
        return len(self.boundaries) + 1

    @property
    def bounds(self) -> list[int]:
        """Return the first layer of every stage, then the number of layers."""
        return [0, *self.boundaries, self.layers]

    def __str__(self) -> str:
        """Format the prediction, then a line for each stage."""
        used = min(sum(self.replication), self.workers)  # a worker may have several stages
        spare = "" if used == self.workers else f" of {self.workers}"
        many = "s" if self.stages > 1 else ""
        lines = [
            f"{self.method}: {self.layers} layers in {self.stages} stage{many} on {used}{spare} workers, micro-batches "
            f"of {self.micro_batch_size:g} samples",
            f"{self.objective}: {self._value()}",
        ]
        for k, (first, last) in enumerate(pairwise(self.bounds)):
            layers = f"layer {first}" if last == first + 1 else f"layers {first} to {last - 1}"
            replicas = f"{self.replication[k]} worker{'s' if self.replication[k] > 1 else ''}"
            about = [f"stage {k}: {layers}", replicas, f"{format_seconds(self.stage_s[k])} per micro-batch"]
            if self.memory_bytes:
                about.append(format_bytes(self.memory_bytes[k]))
            if self.machines is not None:
                about.append("on " + _machines(self.machines[k]))
            lines.append(", ".join(about))
        return "\n".join([*lines, *self.notes])

    def _value(self) -> str:
        if "bytes" in self.objective:
            return format_bytes(self.value)
        if "per second" in self.objective:
            return f"{self.value:.4g}"
        return format_seconds(self.value)


def _machines(counts: Sequence[int]) -> str:
    """Name runs of machines with equal counts: "4 of each of machines 0 to 2, 1 of machine 3"."""
    words = []
    for count, run in groupby(range(len(counts)), key=counts.__getitem__):
        first, *more = run
        if count:
            where = f"each of machines {first} to {more[-1]}" if more else f"machine {first}"
            words.append(f"{count} of {where}")
    return ", ".join(words)


# ---- by name -------------------------------------------------------------------------------------------------------


def partition_methods() -> list[str]:
    """Return the names that :func:`partition` knows: its own, and those that installed packages add.

    A package adds a function of a profile, a number of stages (or None) and options by name, which returns a
    ``Partition``; see ``avgpipe.plugins``. ``avgpipe_lab`` has those of papers.
    """
    return [*_METHODS, *plugins.names(plugins.PARTITIONERS)]


def partition(
    profile: Profile, stages: int | None = None, *, method: str = "simulated", **options: Any
) -> Partition:
    """Cut the layers of ``profile`` into stages.

    All methods but "2bw", which chooses it, take ``micro_batch_size`` (samples; None: the largest that was
    measured). ``link`` is a ``LinkProfile``; None: the profile's; if it has none, transfers count as free,
    with a note. The methods, with their other options:

    - "pipedream" (Narayanan et al. 2019, section 3.1): the least time of the slowest stage, link or
      synchronisation, with up to ``workers`` (None: as many as stages, or 4), where a stage may have several.
      ``levels``: (units, bytes_per_s) of each level of the network, lowest first, instead of ``workers`` and
      ``link``. ``memory_limit_bytes``: of a worker.
    - "dapple" (Fan et al. 2021, section 4): the least time of one synchronous batch of ``micro_batches``.
      Workers as for pipedream; ``levels``, at most two, are the devices of a machine and the machines.
    - "2bw" (Narayanan et al. 2021, section 4): most samples per second over width, depth, micro-batch size and
      recomputation, for ``workers`` and batches of ``batch_size`` samples. ``micro_batch_sizes`` to try; ``link``,
      ``memory_limit_bytes``, ``recompute``.
    - "balance": the least bottleneck, the largest stage. ``by``: "time" or "bytes".
    - "simulated": the least simulated time per batch with the schedule of the run: ``micro_batches``,
      ``pipelines``, ``schedule``, ``advance``, ``stages_per_worker``, ``recompute``, ``link``,
      ``memory_limit_bytes``.

    Args:
        profile: Profile of the model.
        stages: Number of stages K; None: the method's optimum, or up to 4 for the last two.
        method: Name of the method.
        **options: Options of the method.

    Raises:
        ValueError: For an unknown method, for invalid counts, and if nothing fits into the memory: by how
            much, and what would fit.
        TypeError: For an option that the method does not have.
    """
    if method not in partition_methods():
        raise ValueError(f"unknown method {method!r}: {nearest(str(method), partition_methods())}")
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile={profile!r}: must be a Profile, make one with avgpipe.profile or Profile.load"
        )
    known = method_options(method)
    for option, value in options.items():
        if option not in known:
            raise TypeError(
                f"{option}={value!r}: method {method!r} has no such option; {nearest(option, known)}"
            )
    found: Partition = _function(method)(profile, stages, **options)
    return found


def method_options(method: str) -> list[str]:
    """The options of a method, beside ``profile`` and ``stages``."""
    return list(inspect.signature(_function(method)).parameters)[2:]


def _function(method: str) -> Callable[..., Partition]:
    if method in _METHODS:
        return _METHODS[method]
    function: Callable[..., Partition] = plugins.load(plugins.PARTITIONERS, method)
    return function


def simulated_batch_s(
    profile: Profile,
    found: Partition,
    schedule: Schedule,
    cluster: Cluster,
    pipelines: int = 1,
    recompute: str = "never",
) -> float:
    """Return the simulated seconds of a batch of ``schedule``, with the replicas of ``found``, on a cluster's workers.

    A stage is as fast as its slowest device, a boundary as its slowest link. Replicas sum their gradients
    over a ring of their slowest link, after the last backward.
    """
    chain = Chain(profile, found.micro_batch_size)
    costs = stage_costs(chain, found.bounds, schedule.micro_batches, pipelines, recompute)
    workers = schedule.replicas
    links = [cluster.slowest(here, there) for here, there in pairwise(workers)]
    rings = [cluster.slowest(own, own) for own in workers]
    sums_s = [
        ring_s(chain.parameter_bytes(*block), len(own), ring.bytes_per_s)
        + 2 * (len(own) - 1) * ring.latency_s
        for block, own, ring in zip(pairwise(found.bounds), workers, rings)
    ]
    on_cluster = replace(
        costs.on_devices([min(cluster.devices[w].speed for w in own) for own in workers]),
        transfer_s=[
            chain.boundary_bytes[first] / link.bytes_per_s for first, link in zip(found.boundaries, links)
        ],
        latency_s=[link.latency_s for link in links],
        allreduce_s=sums_s,
    )
    return steady_batch_s(schedule, on_cluster, pipelines=pipelines)


# ---- balance -------------------------------------------------------------------------------------------------------


def balanced(
    profile: Profile,
    stages: int | None = None,
    *,
    by: str = "time",
    micro_batch_size: float | None = None,
) -> Partition:
    """Method "balance" of :func:`avgpipe.partition`: torchgpipe's balance by time or by size, over the profile.

    With ``by="time"`` the size of a stage is the seconds of forward and backward of a micro-batch; with
    "bytes" its weights, gradients, optimizer state and the bytes held for one micro-batch. Transfers and the
    place of a stage in the pipeline are ignored.
    """
    if by not in ("time", "bytes"):
        raise ValueError(f"by={by!r}: {nearest(str(by), ['time', 'bytes'])}")
    chain = Chain(profile, micro_batch_size)
    count = min(4, len(profile.layers)) if stages is None else stages

    cost = chain.compute_s if by == "time" else chain.stage_bytes
    value, boundaries = least_bottleneck(chain.layers, count, lambda k, first, last: cost(first, last))
    bounds = list(pairwise([0, *boundaries, chain.layers]))
    return Partition.of_chain(
        chain,
        [0, *boundaries],
        method="balance",
        replication=[1] * count,
        stage_s=[chain.compute_s(*block) for block in bounds],
        objective="time of the slowest stage" if by == "time" else "bytes of the largest stage",
        value=value,
        workers=count,
        memory_bytes=[chain.stage_bytes(*block) for block in bounds] if by == "bytes" else [],
    )


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulated(
    profile: Profile,
    stages: int | None = None,
    *,
    micro_batches: int = 8,
    pipelines: int = 1,
    schedule: str = "advance-forward",
    advance: int | Sequence[int] | str | None = None,
    stages_per_worker: int | None = None,
    recompute: str = "never",
    link: LinkProfile | None = None,
    micro_batch_size: float | None = None,
    memory_limit_bytes: float | None = None,
) -> Partition:
    """Method "simulated" of :func:`avgpipe.partition`.

    The time is ``steady_batch_s`` of the stages' costs (:func:`avgpipe.planning.chain.stage_costs`). The
    search is that of :class:`avgpipe.planning.cuts.CutSearch`: the optimum if cuts are few, else local
    search, with a note.

    Args:
        profile: Profile of the model.
        stages: Number of stages K; None: up to 4.
        micro_batches, pipelines: See ``Plan``.
        schedule: See ``build_schedule``, also for the next two.
        advance: Advance of "advance-forward".
        stages_per_worker: For schedules that have any number of them, such as "interleaved-1f1b".
        recompute: See ``Plan``.
        link: Link between two workers.
        micro_batch_size: Samples of a micro-batch.
        memory_limit_bytes: Memory of a worker: weights, gradients and optimizer state of each pipeline, in as many
            versions as the schedule needs, with several pipelines the reference and an update buffer for each,
            and the micro-batches in flight on all pipelines at once.
    """
    count = min(4, len(profile.layers)) if stages is None else stages
    check_count("pipelines", pipelines)
    limit = limit_of(memory_limit_bytes)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: {nearest(str(recompute), RECOMPUTE)}")
    check_stages(len(profile.layers), count)
    order = build_schedule(schedule, count, micro_batches, advance, stages_per_worker)
    level = Cluster.like(profile, order.workers, link=link).levels[0]
    chain = Chain(profile, micro_batch_size, level.link)
    training = Training(chain, order, pipelines, recompute, published(schedule).weights)
    limits = None if limit == math.inf else [limit] * order.workers
    cut, batch_s, exact = CutSearch(training, limits).best()
    blocks = list(pairwise([0, *cut, chain.layers]))
    return Partition.of_chain(
        chain,
        [0, *cut],
        exact=exact,
        method="simulated",
        replication=[1] * count,
        stage_s=[training.compute_s(*block) for block in blocks],
        objective=f"one batch of {micro_batches} micro-batches, {order.name}{_more(pipelines, recompute)}",
        value=batch_s,
        workers=order.workers,
        memory_bytes=[training.stage_bytes(k, *block) for k, block in enumerate(blocks)],
        micro_batches=micro_batches,
    )


def _more(pipelines: int, recompute: str) -> str:
    several = f", {pipelines} pipelines" if pipelines > 1 else ""
    return several + (f", recomputing {recompute}" if recompute != "never" else "")


_METHODS: dict[str, Callable[..., Partition]] = {"simulated": simulated, "balance": balanced}
