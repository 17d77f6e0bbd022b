"""The published systems, each a row of options over the same runtime."""

from __future__ import annotations

from typing import Any

# An option that is not named here is the caller's choice. ``micro_batches`` or ``pipelines`` in a row are fixed
# by the system.
SYSTEMS: dict[str, dict[str, Any]] = {
    "avgpipe": {"schedule": "advance-forward", "rule": "avgpipe", "staleness": 1},
    "gpipe": {"schedule": "all-forward-all-backward", "pipelines": 1},
    "dapple": {"schedule": "1f1b", "pipelines": 1},
    "model-parallel": {"schedule": "all-forward-all-backward", "pipelines": 1, "micro_batches": 1},
}
