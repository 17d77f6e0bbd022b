"""Ranks of which one may be replaced: they meet anew each time, as another *generation*.

Each generation meets under names of its own in the launcher's store, where the launcher announces it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from avgpipe.errors import PeerLost

# These variables say which generation this is, where ranks are replaced, and in which pipe a spare is told its rank.
GENERATION, SPARE = "AVGPIPE_GENERATION", "AVGPIPE_SPARE"
_LOOK_S = 0.01


def is_replaceable() -> bool:
    """Whether a rank that is killed is replaced here."""
    return GENERATION in os.environ


def generation() -> int:
    return int(os.environ.get(GENERATION, "0"))


def announcement(number: int) -> str:
    """The name under which the launcher says which ranks a generation has anew."""
    return f"generation/{number}"


def become_a_rank(first: Callable[[], None]) -> None:
    """Wait, in a spare process, until the launcher says which rank this one is; elsewhere return at once.

    ``first``: what a spare does before it waits.
    """
    pipe = os.environ.pop(SPARE, None)
    if pipe is None:
        return
    first()
    with open(pipe) as told:
        line = told.readline()
    if not line:
        sys.exit(0)  # no rank needs it: the run is over
    os.environ.update(json.loads(line))


def next_generation(store: Any, timeout_s: float) -> list[int]:
    """Be of the next generation, once the launcher has announced it; return the ranks that are new in it."""
    name, deadline = announcement(generation() + 1), time.monotonic() + timeout_s
    while not store.check([name]):
        if time.monotonic() > deadline:
            raise PeerLost(f"the launcher has replaced nobody within {timeout_s:g} s")
        time.sleep(_LOOK_S)
    os.environ[GENERATION] = str(generation() + 1)
    return [int(rank) for rank in json.loads(store.get(name))]
