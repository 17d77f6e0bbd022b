"""The published systems, each a row of options over the same runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

from avgpipe.errors import check_count, check_name
from avgpipe.schedule import checked_replication
from avgpipe.schedule.builders import MOST

WORKERS = "workers"  # in a row: the number of workers, with one stage each

# An option that is not named here is the caller's choice. ``stages``, ``micro_batches`` or ``pipelines`` in a row are
# fixed by the system.
SYSTEMS: dict[str, dict[str, Any]] = {
    "avgpipe": {"schedule": "advance-forward", "staleness": 1},
    # With the averaging of the paper: an optimizer and an elastic force for each pipeline.
    "avgpipe-elastic": {"schedule": "advance-forward", "rule": "avgpipe", "staleness": 1},
    "gpipe": {"schedule": "all-forward-all-backward", "pipelines": 1},
    "dapple": {"schedule": "1f1b", "pipelines": 1},
    "pipedream": {"schedule": "pipedream", "weights": "stash", "pipelines": 1},
    "pipedream-predicted": {"schedule": "pipedream", "weights": "predicted", "pipelines": 1},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "weights": "double-buffer", "pipelines": 1},
    # The elastic moving average of a replica for each batch in flight.
    "ea-pipe": {
        "schedule": "1f1b",
        "rule": "easgd",
        "staleness": 1,
        "pipelines": WORKERS,
        "micro_batches": 1,
        "batch": "per-pipeline",
    },
    "data-parallel": {"schedule": "1f1b", "pipelines": 1, "stages": 1, "replication": [WORKERS]},
    # Each worker continues with its own batch, and sends the others its update when it is done.
    "data-parallel-asp": {
        "schedule": "1f1b",
        "rule": "avgpipe",
        "staleness": "asynchronous",
        "pipelines": WORKERS,
        "stages": 1,
        "spread": True,
        "batch": "per-pipeline",
    },
    "model-parallel": {"schedule": "all-forward-all-backward", "pipelines": 1, "micro_batches": 1},
}


def row(system: str, workers: int) -> dict[str, Any]:
    """Return a system's options on ``workers`` workers of one stage each."""
    found = {name: workers if value == WORKERS else value for name, value in SYSTEMS[system].items()}
    if found.get("replication") == [WORKERS]:
        found["replication"] = [workers]
    return found


def fixed(system: str) -> dict[str, Any]:
    """Return a system's options that are the same on any number of workers."""
    return {name: value for name, value in SYSTEMS[system].items() if value not in (WORKERS, [WORKERS])}


def micro_batches(system: str, stages: int, replication: Sequence[int] | None, wanted: int = 1) -> int:
    """Return the least number for a system, at least ``wanted``; equal for each replica of a stage."""
    weights = SYSTEMS[system].get("weights")
    if weights in ("stash", "predicted"):  # whole batches are in flight
        wanted = 1
    if weights == "double-buffer":  # two versions are enough then, and each exists when a batch runs on it
        counts = replication or [1] * stages
        wanted = max(wanted, stages, *(-(-sum(counts[k:]) // r) * r - r for k, r in enumerate(counts)))
    step = lcm(*(replication or ()))
    return -(-wanted // step) * step


def check_options(system: str, plan: object) -> None:
    """Refuse a plan with a published system's name and other options: a name alone changes nothing."""
    check_name("system", system, tuple(SYSTEMS))
    for name, value in fixed(system).items():
        if getattr(plan, name) != value:
            raise ValueError(
                f"system {system!r} has {name} {value!r}, and this plan {getattr(plan, name)!r}: write "
                f"Plan.for_system({system!r}, ...), which sets the options of the system"
            )


def complete(system: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the plan of a system: its row, completed by ``options``."""
    check_name("system", system, tuple(SYSTEMS))
    check_count("stages", options.get("stages", 1), most=MOST)
    found = row(system, options.get("stages", 1))
    for name in ("pipelines", "micro_batches"):
        if name in found and options.get(name, found[name]) != found[name]:
            raise ValueError(f"system {system!r} has {name} = {found[name]}, not {options[name]}")
    stages = found.get("stages", options.get("stages", 1))
    chosen = {**found, "system": system, **options, "stages": stages}
    replication = checked_replication(chosen.get("replication"), stages)
    return {"micro_batches": micro_batches(system, stages, replication), **chosen}
