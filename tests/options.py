"""Options of a Pipeline by the names of their fields, for tests that are given some of many."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from avgpipe.options import (
    Audit,
    BitChecks,
    Compile,
    Copies,
    CudaGraphs,
    FusedGradients,
    MemoryLimit,
    MovingAverage,
    Precision,
    Ranks,
    Source,
    WeightsFrom,
)

# By name: the class of the extension, and its field.
FIELDS: dict[str, tuple[Any, str]] = {
    **{name: (Precision, name) for name in ("autocast", "loss_scale", "wire_dtype", "skip_nonfinite")},
    **{name: (Ranks, name) for name in ("mesh", "group", "prepare_stage")},
    **{name: (Source, name) for name in ("names_of", "loss_weight", "batch_dim")},
    "weights_from": (WeightsFrom, "source"),
    "copies_every_s": (Copies, "every_s"),
    "verify_every": (BitChecks, "every"),
    "verify_wire": (BitChecks, "wire"),
    "ema_decay": (MovingAverage, "decay"),
    "check": (Audit, "when"),
    "memory_limit_bytes": (MemoryLimit, "bytes"),
}


def grouped(**options: Any) -> dict[str, Any]:
    """Return arguments of a Pipeline: options that extensions have as extensions, without those that are None."""
    found: dict[Any, dict[str, Any]] = defaultdict(dict)
    rest, extensions = {}, list(options.pop("extensions", ()))
    for name, value in options.items():
        if name in FIELDS:
            kind, its_name = FIELDS[name]
            if value is not None:
                found[kind][its_name] = value
        elif name == "cuda_graphs":
            extensions += [CudaGraphs()] if value else []
        elif name == "fuses_gradients":
            extensions += [FusedGradients()] if value else []
        elif name == "compile":
            extensions += [] if value is False else [Compile(**({} if value is True else value))]
        else:
            rest[name] = value
    extensions += [kind(**fields) for kind, fields in found.items()]
    return {**rest, "extensions": extensions} if extensions else rest
