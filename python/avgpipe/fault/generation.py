"""Ranks of which one may be replaced: they meet anew each time, as another *generation*; and spare processes.

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
from avgpipe.ranks.process import GENERATION, SPARE, ask_for_losses, generation

_LOOK_S = 0.01


def announcement(number: int) -> str:
    """The name under which the launcher says which ranks a generation has anew, once they are at their Pipeline."""
    return f"generation/{number}"


def prospect(number: int) -> str:
    """The name under which it says before that a generation will come."""
    return f"generation/{number}/awaited"


def given_up(number: int) -> str:
    """The name under which the launcher says that no generation will come, or a rank that it waits for it no more."""
    return f"generation/{number}/given up"


def restored(number: int) -> str:
    """The name under which the ranks of a generation say that they have the state from which they go on."""
    return f"generation/{number}/restored"


def waited_for(number: int) -> str:
    """The name under which ranks of a generation say that one has not answered for as long as they wait."""
    return f"generation/{number}/waited"


class Spares:
    """What the ranks of a generation say to the launcher, which may have spare processes."""

    def __init__(self) -> None:
        from avgpipe.ranks.rendezvous import private_store  # which imports torch; launchers do without

        self._store: Callable[[], Any] = private_store

    def give_up(self) -> None:
        """Say that nobody is to be replaced, as this one fails of itself."""
        self._store().set(given_up(generation() + 1), "")

    def note_wait(self) -> None:
        """Say that a rank has not answered for as long as this one waits: the launcher then ends who stands still."""
        self._store().set(waited_for(generation()), "")

    def are_coming(self) -> bool:
        """Whether another generation will come."""
        return bool(self._store().check([prospect(generation() + 1)]))


def pipe_of(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return where a process that waits is told its place; it is there once the process is ready."""
    return Path(folder) / f"place-of-{rank}"


def become_a_rank(first: Callable[[], None]) -> None:
    """Wait, in a spare or new process, until the launcher says whose place it takes; elsewhere return at once.

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
    new.rename(pipe)  # where it is found, somebody reads it
    select.select([descriptor], [], [])
    with open(descriptor) as file:
        line = file.readline()
    if not line:
        sys.exit(0)  # no rank needs it: the run is over
    os.environ.update(json.loads(line))


def assign_place(pipes: Sequence[Path], place: Mapping[str, str]) -> bool:
    """Tell processes that wait their place; False if they have not come so far all, and are no help."""
    if not all(pipe.exists() for pipe in pipes):
        return False
    try:
        for pipe in pipes:
            with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as file:
                file.write(json.dumps(place) + "\n")
    except OSError:  # nobody reads
        return False
    return True


def next_generation(store: Any, timeout_s: float) -> list[int]:
    """Be of the next generation, once the launcher has announced it; return the ranks that are new in it.

    PeerLost if it says that there will be none, as it has lost nobody; or has not said after ``timeout_s`` that there
    will be one; or another rank has waited for as long. Once it has, it limits itself how long new processes may take
    to start, and ends this one with the run.
    """
    number, deadline = generation() + 1, time.monotonic() + timeout_s
    name = announcement(number)
    ask_for_losses(number)
    while not store.check([name]):
        is_late, is_over = time.monotonic() > deadline, store.check([given_up(number)])
        if (is_late or is_over) and not store.check([prospect(number)]):
            store.set(given_up(number), "")
            raise PeerLost("nobody is replaced" + ("" if is_over else f" within {timeout_s:g} s"))
        time.sleep(_LOOK_S)
    os.environ[GENERATION] = str(number)
    return [int(rank) for rank in json.loads(store.get(name))]
