"""Putting a new process in the place of a rank that was killed, while the others wait for it instead of ending.

The launcher announces the next generation, and gives the rank to a spare process, which has come as far as its Pipeline
and waits there to be told who it is, or else to a new process.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from avgpipe.faults import RESTART
from avgpipe.ranks.generation import GENERATION, SPARE, announcement, pipe_of, tell_place
from avgpipe.ranks.launch import (
    Interrupted,
    RanksFailed,
    Started,
    keeping_handlers,
    pass_on_questions,
    rank_environment,
    start,
)
from avgpipe.ranks.process import STORE_FILE

_POLL_S = 0.02
_MOST = 1000  # replacements of a run


class Replacing:
    """Runs a command on each rank; ranks that are killed are replaced.

    Args:
        command: what each rank runs.
        size: how many ranks there are.
        spares: how many processes wait to replace one.
        added: variables for all of them.
        say: is told a line for people.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        spares: int,
        added: Mapping[str, str],
        say: Callable[[str], None],
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        self._command, self._size, self._added, self._say = command, size, added, say
        self._prefixes = prefixes or [()] * size
        self._wanted = spares
        self._ranks: dict[int, Started] = {}
        self._spares: list[tuple[Started, Path]] = []
        self._made = self._generation = 0
        self._replaced: Counter[int] = Counter()  # of each rank

    def run(self) -> None:
        """Run to the end.

        Raises:
            RanksFailed: a rank failed of itself.
            Interrupted: a signal came. No process is left, whatever happens.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="avgpipe-")))
            self._store = FileStore(str(self._folder / "store"))
            stack.enter_context(keeping_handlers())
            pass_on_questions(lambda: [*self._ranks.values(), *(spare for spare, _ in self._spares)])
            number = signal.SIGKILL
            try:
                for rank in range(self._size):
                    self._ranks[rank] = self._start(rank)
                while len(self._spares) < self._wanted:
                    self._make_spare()
                while self._ranks:
                    self._look()
                    time.sleep(_POLL_S)
            except BaseException as error:
                number = getattr(
                    error, "sigval", signal.SIGINT if isinstance(error, KeyboardInterrupt) else number
                )
                if number != signal.SIGKILL:
                    raise Interrupted(number) from error
                raise
            finally:
                for one in (*self._ranks.values(), *(spare for spare, _ in self._spares)):
                    one.close(number)

    def _start(self, rank: int, **others: str) -> Started:
        self._made += 1
        folder = self._folder / f"process-{self._made}"
        folder.mkdir()
        place = {**self._place(rank), STORE_FILE: str(self._folder / "store")}
        return start(
            [[*self._prefixes[max(0, rank)], *self._command]], folder, {**self._added, **place, **others}
        )

    def _place(self, rank: int) -> dict[str, str]:
        counts = {GENERATION: str(self._generation), RESTART: str(self._replaced[rank])}
        return {**rank_environment(rank, self._size), **counts}

    def _make_spare(self) -> None:
        folder = self._folder / f"spare-{self._made}"
        folder.mkdir()
        self._spares.append((self._start(-1, **{SPARE: str(folder)}), pipe_of(folder, -1)))

    def _look(self) -> None:
        for rank, one in list(self._ranks.items()):
            end = one.poll()
            if end is None:
                continue
            del self._ranks[rank]
            if isinstance(end, RanksFailed):
                code = end.exit_codes[0]
                failed = RanksFailed([code if r == rank else 0 for r in range(self._size)], rank)
                if code >= 0 or self._generation >= _MOST or not self._ranks:
                    raise failed
                self._replace(rank, failed.reason)

    def _replace(self, rank: int, why: str) -> None:
        self._generation += 1
        self._replaced[rank] += 1
        place = self._place(rank)
        how = "a new process"
        self._spares = [one for one in self._spares if one[0].poll() is None]
        ready = (one for one in self._spares if tell_place([one[1]], place))
        if (chosen := next(ready, None)) is not None:
            self._spares.remove(chosen)
            self._ranks[rank], how = chosen[0], "a spare process"
        else:  # those that have not come so far stay spares
            self._ranks[rank] = self._start(rank)
        self._store.set(announcement(self._generation), json.dumps([rank]))
        self._say(f"rank {rank} {why}; {how} takes its place")
        if len(self._spares) < self._wanted:
            self._make_spare()
