"""The published systems, each a row of options over the same runtime."""

from __future__ import annotations

from typing import Any

STAGES = "stages"  # as a number in a row: as many as there are stages

# An option that is not named here is the caller's choice. ``micro_batches`` or ``pipelines`` in a row are fixed
# by the system.
SYSTEMS: dict[str, dict[str, Any]] = {
    "avgpipe": {"schedule": "advance-forward", "rule": "avgpipe", "staleness": 1},
    "gpipe": {"schedule": "all-forward-all-backward", "pipelines": 1},
    "dapple": {"schedule": "1f1b", "pipelines": 1},
    "pipedream": {"schedule": "pipedream", "weights": "stash", "pipelines": 1, "micro_batches": 1},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "weights": "double-buffer", "pipelines": 1},
    # The elastic moving average of a replica for each batch in flight.
    "ea-pipe": {"schedule": "1f1b", "rule": "easgd", "staleness": 1, "pipelines": STAGES, "micro_batches": 1},
    "model-parallel": {"schedule": "all-forward-all-backward", "pipelines": 1, "micro_batches": 1},
}

# The least that the caller may choose, and what he gets without choosing.
_LEAST: dict[str, dict[str, Any]] = {"pipedream-2bw": {"micro_batches": STAGES}}


def fixed(system: str, stages: int) -> dict[str, Any]:
    """The row of a system, with ``stages`` stages."""
    return _resolved(SYSTEMS[system], stages)


def least(system: str, stages: int) -> dict[str, int]:
    """Numbers that the caller may choose, but not below these."""
    return _resolved(_LEAST.get(system, {}), stages)


def _resolved(row: dict[str, Any], stages: int) -> dict[str, Any]:
    return {name: stages if value == STAGES else value for name, value in row.items()}
