"""Turns: groups of processes that measure one after the other, over and over, so that a machine's moods meet all alike.

A shared machine is quicker in one second than in another, by a third and more. What is to be compared is therefore
measured in slices of about a second, in turn: the first group, the second, ..., the first again.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class Turns:
    """A rank's place. ``sizes``: ranks of each group; ``place``: number of this rank's group."""

    def __init__(self, folder: str, place: int, sizes: Sequence[int], timeout_s: float) -> None:
        self._sizes, self._next = sizes, (place + 1) % len(sizes)
        self._folder, self._timeout_s = Path(folder), timeout_s
        self._rank = int(os.environ["RANK"])
        self._own = os.open(self._folder / f"{place}-{self._rank}", os.O_RDWR)

    @contextmanager
    def own(self, barrier: Callable[[], object]) -> Iterator[None]:
        """Inside it is this group's turn; ``barrier`` waits for all of its ranks."""
        if not select.select([self._own], [], [], self._timeout_s)[0]:
            raise TimeoutError(f"no turn in {self._timeout_s:.0f} s")
        os.read(self._own, 1)
        barrier()
        yield
        barrier()
        if self._rank == 0:
            give(self._folder, self._next, self._sizes[self._next])


def give(folder: Path, place: int, ranks: int) -> None:
    """The turn to a group."""
    for rank in range(ranks):
        pipe = os.open(folder / f"{place}-{rank}", os.O_RDWR)
        os.write(pipe, b".")
        os.close(pipe)


def in_turn(groups: Sequence[tuple[str, int, dict[str, Any]]], timeout_s: float) -> list[list[Any]]:
    """What the ranks of each group returned: target, number of ranks, and arguments but for those of ``Turns``."""
    from avgpipe.ranks.launch import run_on_ranks

    sizes = [ranks for _, ranks, _ in groups]
    with TemporaryDirectory() as name, ThreadPoolExecutor(len(groups)) as pool:
        folder = Path(name)
        pipes = [folder / f"{place}-{rank}" for place, ranks in enumerate(sizes) for rank in range(ranks)]
        for path in pipes:
            os.mkfifo(path)
        kept = [os.open(path, os.O_RDWR) for path in pipes]  # one that nobody has open forgets
        runs = []
        for place, (target, ranks, arguments) in enumerate(groups):
            turns = {"folder": name, "place": place, "sizes": sizes, "timeout_s": timeout_s}
            asked = {**arguments, "turns": turns}
            runs.append(pool.submit(run_on_ranks, target, ranks, asked, timeout_s=timeout_s))
        give(folder, 0, sizes[0])
        try:
            return [run.result() for run in runs]
        finally:
            for pipe in kept:
                os.close(pipe)
