"""Ranks that may be replaced: after each loss they meet again as another *generation*; and spare processes.

Each generation meets under names of its own in the launcher's store, where the launcher announces it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from avgpipe.errors import PeerLost
from avgpipe.ranks.environment import GENERATION, SPARE, generation
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import ask_for_losses


def announcement(number: int) -> str:
    """Name of the text that lists a generation's new ranks, once they are at their Pipeline."""
    return f"generation/{number}"


def prospect(number: int) -> str:
    """Name of the text by which the launcher announces beforehand that a generation will follow."""
    return f"generation/{number}/awaited"


def given_up(number: int) -> str:
    """Name of the text by which the launcher or a rank says that no generation follows."""
    return f"generation/{number}/given up"


def restored(number: int) -> str:
    """Name of the text by which a generation's ranks report that they have restored their state."""
    return f"generation/{number}/restored"


def waited_for(number: int) -> str:
    """Name of the text by which a generation's ranks report that they timed out waiting for another one."""
    return f"generation/{number}/waited"


class Spares:
    """Reports of a generation's ranks to the launcher, which may have spare processes."""

    def __init__(self) -> None:
        from avgpipe.ranks.rendezvous import private_store  # which imports torch; launchers do without

        self._store: Callable[[], Any] = private_store

    def give_up(self) -> None:
        """Report that no rank is to be replaced, because this one fails by itself."""
        self._store().set(given_up(generation() + 1), "")

    def note_wait(self) -> None:
        """Report a timeout of this rank; the launcher then ends ranks that are stopped."""
        self._store().set(waited_for(generation()), "")

    def are_coming(self) -> bool:
        """Whether another generation will follow."""
        return bool(self._store().check([prospect(generation() + 1)]))


def pipe_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the pipe in which a waiting process gets its place; it exists once the process is ready."""
    return Path(folder) / f"place-of-{rank}"


def become_a_rank(first: Callable[[], None]) -> None:
    """Wait, in a spare or new process, for the rank that the launcher assigns; elsewhere return at once.

    ``first``: what it does before it waits.
    """
    folder = os.environ.pop(SPARE, None)
    if folder is None:
        return
    first()
    pipe = pipe_of(folder, int(os.environ["RANK"]))
    new = pipe.with_suffix(".new")
    os.mkfifo(new)
    descriptor = os.open(new, os.O_RDONLY | os.O_NONBLOCK)
    new.rename(pipe)  # once the name exists, it has a reader
    select.select([descriptor], [], [])
    with open(descriptor) as file:
        line = file.readline()
    if not line:
        sys.exit(0)  # no rank needs it: the run is over
    os.environ.update(json.loads(line))


def refuse_without_copies() -> None:
    """Refuse the first Pipeline of a process that may be replaced, as it has no Copies.

    A later one has none if only the first is to survive a loss. ValueError.
    """
    if "avgpipe.fault.recovery" not in sys.modules:  # which only Copies import
        raise ValueError(
            "this run has --spares, and the Pipeline has no avgpipe.Copies, without which no process can be replaced: "
            "add extensions=[avgpipe.Copies(every_s=10)], or leave --spares out"
        )


def assign_place(pipes: Sequence[Path], place: Mapping[str, str]) -> bool:
    """Send waiting processes their place; False if not all of them are ready, and none can be used."""
    if not all(pipe.exists() for pipe in pipes):
        return False
    try:
        for pipe in pipes:
            with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as file:
                file.write(json.dumps(place) + "\n")
    except OSError:  # no reader
        return False
    return True


def next_generation(store: Any, timeout_s: float) -> list[int]:
    """Join the next generation, once the launcher has announced it; return the ranks that are new in it.

    PeerLost if the launcher answers that there is none, as no rank is lost; if it announces none within
    ``timeout_s``; or if another rank has waited as long. Once it has announced one, the launcher itself
    limits how long new processes may take to start, and ends this one with the run.
    """
    number, deadline = generation() + 1, time.monotonic() + timeout_s
    name = announcement(number)
    ask_for_losses(number)
    while not store.check([name]):
        is_late, is_over = time.monotonic() > deadline, store.check([given_up(number)])
        if (is_late or is_over) and not store.check([prospect(number)]):
            store.set(given_up(number), "")
            raise PeerLost("no rank is replaced" + ("" if is_over else f" within {timeout_s:g} s"))
        time.sleep(LIMITS.generation_look_s)
    os.environ[GENERATION] = str(number)
    return [int(rank) for rank in json.loads(store.get(name))]
