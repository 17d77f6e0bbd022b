"""``avgpipe partition``: where several methods cut a model, side by side, and a plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from avgpipe.cli.config import PartitionConfig
from avgpipe.cli.errors import arguments, running
from avgpipe.cli.measuring import check_target, cluster_of, link_of, profile_of
from avgpipe.cli.output import check_file, grid, show
from avgpipe.cli.resolve import check_device
from avgpipe.errors import nearest
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning import Partition, Profile, partition, partition_methods
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.partition import method_options, simulated_batch_s
from avgpipe.systems import SYSTEMS
from avgpipe.units import format_bytes, format_seconds
from avgpipe.workloads import check_workload, workload_names


def run(config: PartitionConfig) -> None:
    with arguments():
        batch_size = _check(config)
    with running():
        profile = _profile(config, batch_size)
    with arguments():  # only the profile tells what fits into the memory
        cluster = cluster_of(config, profile)
        batch_size = batch_size or config.micro_batches * profile.micro_batch_sizes[-1]
        methods = config.method or partition_methods()
        rows = [_row(config, profile, cluster, batch_size, method) for method in methods]
        if all(row.plan is None for row in rows):
            raise ValueError("; ".join(f"{row.method}: {row.error}" for row in rows))
    best = max((row for row in rows if row.plan is not None), key=lambda row: row.samples_per_s)
    if config.out is not None and best.plan is not None:
        with running():
            best.plan.save(config.out)
    if config.json:
        answer = {"model": profile.model, "best": best.method, "methods": [row.to_json() for row in rows]}
        print(json.dumps(answer))
        return
    table = grid(
        ["method", "first layers", "replicas", "workers"], ["batch", "predicted", "samples/s", "most memory"]
    )
    for row in rows:
        table.add_row(row.method, *row.cells())
    show(
        f"{profile.model}: {len(profile.layers)} layers",
        table,
        *(
            f"{row.method}: {note}"
            for row in rows
            for note in (row.found.notes if row.found else [row.error])
        ),
        f"best: {best.method}" + (f"; plan: {config.out}" if config.out is not None else ""),
    )


def _check(config: PartitionConfig) -> int | None:
    """The samples of a batch, None where the profile says it; ValueError for what cannot be."""
    known = partition_methods()
    for name in config.method or ():
        if name not in known:
            raise ValueError(f"unknown method {name!r}: {nearest(name, known)}")
    check_target(config)
    link_of(config)
    if config.out is not None:
        check_file(config.out)
    if Path(config.workload).is_file():
        return config.batch_size
    if config.workload not in workload_names():
        raise ValueError(
            f"{config.workload!r} is neither a workload nor a file that `avgpipe profile` wrote: "
            f"{nearest(config.workload, workload_names())}"
        )
    check_device(config.device)
    return check_workload(config.workload, config.build_options()).batch_size


def _profile(config: PartitionConfig, batch_size: int | None) -> Profile:
    if batch_size is None or Path(config.workload).is_file():
        with arguments():
            return Profile.load(config.workload)
    return profile_of(config, profiled_sizes(batch_size))


@dataclass(frozen=True)
class _MethodRow:
    """What a method found and what comes of it, or why it found nothing.

    Attributes:
        batch_s: Simulated seconds of a batch of ``plan``, of which some systems have smaller ones.
    """

    method: str
    found: Partition | None = None
    plan: Plan | None = None
    batch_s: float = 0.0
    error: str = ""

    @property
    def samples(self) -> float:
        return self.found.micro_batch_size * self.plan.micro_batches if self.found and self.plan else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.batch_s if self.batch_s else 0.0

    def to_json(self) -> dict[str, Any]:
        if self.found is None or self.plan is None:
            return {"method": self.method, "error": self.error}
        predicted = {
            "batch_samples": self.samples,
            "batch_s": self.batch_s,
            "samples_per_s": self.samples_per_s,
        }
        return {**asdict(self.found), "plan": asdict(self.plan), **predicted}

    def cells(self) -> list[str]:
        found = self.found
        if found is None:
            return ["-"] * 7
        placed = found.placement
        return [
            ",".join(map(str, found.boundaries)) or "-",
            ",".join(map(str, found.replication)),
            "in order" if placed is None else " | ".join(",".join(map(str, own)) for own in placed),
            f"{self.samples:g}",
            format_seconds(self.batch_s),
            f"{self.samples_per_s:.4g}",
            format_bytes(max(found.memory_bytes)) if found.memory_bytes else "-",
        ]


def _row(
    config: PartitionConfig, profile: Profile, cluster: Cluster, batch_size: int, method: str
) -> _MethodRow:
    try:
        found = partition(profile, method=method, **_options(config, profile, cluster, batch_size, method))
        free = "pipelines" not in SYSTEMS[found.system]  # whose choices are not the system's
        chosen = {n: getattr(config, n) for n in ("schedule", "pipelines", "micro_batches")} if free else {}
        plan = Plan.for_partition(found, **chosen)
        batch_s = simulated_batch_s(
            profile, found, plan.build_schedule(), cluster, plan.pipelines, plan.recompute
        )
    except ValueError as error:
        return _MethodRow(method, error=str(error))
    return _MethodRow(method, found, plan, batch_s)


def _options(
    config: PartitionConfig, profile: Profile, cluster: Cluster, batch_size: int, method: str
) -> dict[str, Any]:
    """Those of all that were given or follow that the method takes."""
    taken = method_options(method)
    limits = [device.memory_bytes for device in cluster.devices if device.memory_bytes is not None]
    options: dict[str, Any] = {
        "micro_batches": config.micro_batches,
        "pipelines": config.pipelines,
        "schedule": config.schedule,
        "micro_batch_size": batch_size / config.micro_batches,
        "batch_size": batch_size,
        "memory_limit_bytes": min(limits, default=None),
    }
    if "levels" in taken and len(cluster.levels) > 1:
        options.update(levels=cluster.levels, stages=config.stages)
    else:
        stages = min(cluster.workers, len(profile.layers)) if "workers" not in taken else None
        slowest = min(cluster.levels, key=lambda level: level.bytes_per_s)
        options.update(workers=cluster.workers, link=slowest.link, stages=config.stages or stages)
    return {name: value for name, value in options.items() if name in (*taken, "stages")}
