"""What other packages add to avgpipe by entry points: commands, workloads and partitioners.

A package lists them in its metadata, and they are imported when they are asked for::

    [project.entry-points."avgpipe.workloads"]
    my-model = "my_package.models:SOURCE"

``avgpipe_lab`` beside this package does so; nothing here imports it by its name.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

COMMANDS = "avgpipe.commands"  # an avgpipe.cli.options.Command, or a CommandGroup
WORKLOADS = "avgpipe.workloads"  # an avgpipe.tasks.WorkloadSource
PARTITIONERS = "avgpipe.partitioners"  # a function, see avgpipe.planning.partition


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages add to a group, sorted."""
    return tuple(sorted(_found(group)))


def load(group: str, name: str) -> Any:
    """Import what a name of a group names. ImportError where no package adds it."""
    if name not in _found(group):
        raise ImportError(f"{name} is a part of avgpipe_lab, which is not installed here")
    return _found(group)[name].load()
