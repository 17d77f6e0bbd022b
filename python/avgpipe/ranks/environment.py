"""What the environment of a process says of the run that it is a part of, and objects by their names."""

from __future__ import annotations

import importlib
import os
from typing import Any

# The number of this generation, where ranks are replaced; the folder in which a spare gets its place; and for
# isolated pipelines the address of the run, and this process's pipeline.
GENERATION, SPARE, RUN, PIPELINE = "AVGPIPE_GENERATION", "AVGPIPE_SPARE", "AVGPIPE_RUN", "AVGPIPE_PIPELINE"
STORE_FILE = "AVGPIPE_STORE"  # names the variable with the path of the file in which ranks of one host meet


def named(target: str) -> Any:
    """Return the object named "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def is_replaceable() -> bool:
    """Whether a rank that is killed is replaced here."""
    return GENERATION in os.environ


def generation() -> int:
    """Return how often the ranks have met again after one was replaced."""
    return int(os.environ.get(GENERATION, "0"))


def pipeline_here() -> int | None:
    """Return the pipeline of this process in a run of isolated ones; None elsewhere."""
    return int(os.environ[PIPELINE]) if RUN in os.environ else None
