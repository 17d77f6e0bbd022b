"""Libraries that only some workloads need."""

from __future__ import annotations

import importlib
import logging
from typing import Any


class LibraryNotFound(ImportError, ValueError):
    """A workload needs a library that is not installed. The message names it and how to get it."""


def library(name: str, user: str) -> Any:
    """The module ``name``, imported now, which ``user`` needs. Raises LibraryNotFound."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise LibraryNotFound(
            f"{user} needs {name.split('.')[0]}, which cannot be imported ({error}): "
            "pip install 'avgpipe[workloads]'"
        ) from None
    logging.getLogger(name.split(".")[0]).setLevel(logging.ERROR)  # its hints are not for our users
    return module
