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
NAMES = "avgpipe.names"  # of the package avgpipe itself


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages add to a group, sorted."""
    return tuple(sorted(_found(group)))


def function(name: str) -> Any:
    """Return what the package ``avgpipe`` has under a name that ``avgpipe_lab`` adds. ImportError without it."""
    if name not in names(NAMES):
        raise ImportError(f"avgpipe.{name} is a part of avgpipe_lab, which is not installed here")
    return load(NAMES, name)


def load(group: str, name: str) -> Any:
    """Import what a name of a group names. KeyError where no package adds it."""
    return _found(group)[name].load()
