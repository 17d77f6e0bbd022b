"""``avgpipe partition``: compares where several methods cut a model, and writes a plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from avgpipe.cli.config import PartitionConfig
from avgpipe.cli.measuring import check_target, cluster_of, link_of, profile_of
from avgpipe.cli.output import answer, arguments, check_file, grid, running
from avgpipe.cli.resolve import check_device
from avgpipe.errors import nearest
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning import Profile, partition, partition_methods
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.partition import method_options, simulated_batch_s
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import check_workload, is_script, workload_names
from avgpipe.units import format_bytes, format_seconds


def run(config: PartitionConfig) -> None:
    with arguments():
        batch_size = _check(config)
    with running():
        profile = _profile(config, batch_size)
    with arguments():  # what fits into the memory is known from the profile only
        cluster = cluster_of(config, profile)
        batch_size = batch_size or config.micro_batches * profile.micro_batch_sizes[-1]
        rows, plans = [], {}
        for method in config.method or partition_methods():
            try:
                row, plans[method] = _found(config, profile, cluster, batch_size, method)
            except ValueError as error:
                row = {"method": method, "error": str(error)}
            rows.append(row)
        if not plans:
            raise ValueError("; ".join(f"{row['method']}: {row['error']}" for row in rows))
    best = max((row for row in rows if row["method"] in plans), key=lambda row: row["samples_per_s"])[
        "method"
    ]
    if config.out is not None:
        with running():
            plans[best].save(config.out)
    answer(
        config.json,
        {"model": profile.model, "best": best, "methods": rows},
        f"{profile.model}: {len(profile.layers)} layers",
        grid([_cells(row) for row in rows], texts=4),
        *(f"{row['method']}: {note}" for row in rows for note in row.get("notes", [row.get("error")])),
        f"best: {best}" + (f"; plan: {config.out}" if config.out is not None else ""),
    )


def _check(config: PartitionConfig) -> int | None:
    """Return the samples of a batch, None if the profile sets them; ValueError for contradictions."""
    known = partition_methods()
    for name in config.method or ():
        if name not in known:
            raise ValueError(f"unknown method {name!r}: {nearest(name, known)}")
    check_target(config)
    link_of(config)
    if config.out is not None:
        check_file(config.out)
    if _is_profile(config.workload):
        return config.batch_size
    if config.workload not in workload_names() and not is_script(config.workload):
        raise ValueError(
            f"{config.workload!r} is neither a workload nor a file that `avgpipe profile` wrote: "
            f"{nearest(config.workload, workload_names())}"
        )
    check_device(config.device)
    return check_workload(config.workload, config.build_options()).batch_size


def _is_profile(workload: str) -> bool:
    return Path(workload).is_file() and not is_script(workload)


def _profile(config: PartitionConfig, batch_size: int | None) -> Profile:
    if batch_size is None or _is_profile(config.workload):
        with arguments():
            return Profile.load(config.workload)
    return profile_of(config, profiled_sizes(batch_size))


def _found(
    config: PartitionConfig, profile: Profile, cluster: Cluster, batch_size: int, method: str
) -> tuple[dict[str, Any], Plan]:
    """Return a method's result, with the simulated time of the plan's batch, which some systems split."""
    found = partition(profile, method=method, **_options(config, profile, cluster, batch_size, method))
    free = "pipelines" not in SYSTEMS[found.system]  # the system leaves these choices open
    chosen = {n: getattr(config, n) for n in ("schedule", "pipelines", "micro_batches")} if free else {}
    plan = found.plan(**chosen)
    share_s = simulated_batch_s(
        profile, found, plan.build_schedule(), cluster, plan.pipelines, plan.recompute
    )
    batch_s = plan.shares * share_s
    samples = found.micro_batch_size * plan.micro_batches
    speed = {
        "batch_samples": samples,
        "batch_s": batch_s,
        "samples_per_s": samples / batch_s if batch_s else 0.0,
    }
    return {**asdict(found), "plan": asdict(plan), **speed}, plan


def _cells(row: dict[str, Any]) -> dict[str, str]:
    if "error" in row:
        return {"method": row["method"]}
    placed, memory = row["placement"], row["memory_bytes"]
    return {
        "method": row["method"],
        "first layers": ",".join(map(str, row["boundaries"])) or "-",
        "replicas": ",".join(map(str, row["replication"])),
        "workers": " | ".join(",".join(map(str, own)) for own in placed) if placed else "in order",
        "batch": f"{row['batch_samples']:g}",
        "predicted": format_seconds(row["batch_s"]),
        "samples/s": f"{row['samples_per_s']:.4g}",
        **({"most memory": format_bytes(max(memory))} if memory else {}),
    }


def _options(
    config: PartitionConfig, profile: Profile, cluster: Cluster, batch_size: int, method: str
) -> dict[str, Any]:
    """Return those of all options, given or derived, that the method takes."""
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
