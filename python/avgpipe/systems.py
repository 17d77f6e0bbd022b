"""The published systems, each a row of options over the same runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

from avgpipe.errors import nearest

DEFAULT_PIPELINES, DEFAULT_MICRO_BATCHES = 2, 4
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


def check_systems(what: str, names: Sequence[str]) -> None:
    """Raise ValueError unless these are names of systems, at least one, each once; ``what`` begins the message."""
    for number, name in enumerate(names or [""]):
        if name not in SYSTEMS:
            raise ValueError(f"{what}: unknown system {name!r}: {nearest(name, tuple(SYSTEMS))}")
        if name in names[:number]:
            raise ValueError(f"{what}: {name} is named twice, name it once")


def with_sizes(system: str, options: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the options of a plan with the default pipelines and micro-batches, where a system leaves them open.

    Args:
        system: Name of the system.
        options: The options that were given, with ``stages``.
        batch_size: Samples of a batch.
    """
    fixed_ones, found = SYSTEMS[system], dict(options)
    if "pipelines" not in fixed_ones:
        found.setdefault("pipelines", DEFAULT_PIPELINES)
    if "micro_batches" not in fixed_ones:
        # They only keep stages busy.
        wanted = 1 if "stages" in fixed_ones else min(DEFAULT_MICRO_BATCHES, batch_size)
        stages = options["stages"]
        replication = options.get("replication", row(system, stages).get("replication"))
        found.setdefault("micro_batches", micro_batches(system, stages, replication, wanted))
    return found
