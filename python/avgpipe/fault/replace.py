"""Replaces a rank that was killed by a new process, while the others wait for it instead of ending.

A rank that a signal has stopped is killed, once the others have timed out waiting for it. Where others miss a
peer and no rank is lost, they get that answer and end: a connection is broken, or a rank hangs.

A spare process has started up to its Pipeline, and waits there for its rank. Where there is no spare, a new
process starts and comes to the same place, within a limit. Then the launcher announces the next generation::

    rank r is killed     prospect of generation g+1     all at their Pipelines    generation g+1: new ranks
    the others           ... wait ................................................. meet within a timeout
    a spare process      gets its rank -----------------^
    a new process        starts ........ Pipeline, rank ^
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from avgpipe.errors import PipelineError, reason
from avgpipe.fault import generation
from avgpipe.ranks.environment import GENERATION, RESTART, SPARE, STORE_FILE
from avgpipe.ranks.launch import (
    NOT_READY,
    STOPPED,
    RanksFailed,
    Started,
    StoppedTimer,
    rank_environment,
    start,
)
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import (
    ARGUMENTS,
    PEER_LOST,
    forget_ready,
    has_missed,
    is_asked,
    run_folder,
    unready,
)
from avgpipe.ranks.supervisor import LaunchPolicy, raising_on_signals, watch

_MOST = 1000  # generations of a run


class Replacing(LaunchPolicy):
    """Runs a command on each rank, and replaces ranks that are killed.

    Args:
        command: what each rank runs.
        size: how many ranks there are.
        spares: how many processes wait to replace one.
        added: variables for all of them.
        say: prints a line for the user.
        arguments: of the function that the command names instead of a program, see ``ranks.process``.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        spares: int,
        added: Mapping[str, str],
        say: Callable[[str], None],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._arguments = arguments
        self._command, self._size, self._added, self._say = command, size, added, say
        self._wanted = spares
        self._ranks: dict[int, Started] = {}
        self._spares: list[_WaitingRank] = []
        self._starting: dict[int, _WaitingRank] = {}  # new processes that do not have their ranks yet
        self._returning = set[int]()  # ranks that have new processes, until all have restored their state
        self._stopped_timer = StoppedTimer()  # of all ranks, where none is left to wait for another
        self._killed_stopped: set[int] = set()  # ranks that were killed because they were stopped
        self._failed: RanksFailed | None = None  # the last that was killed
        # Ranks that ended because they missed another one, which is to blame if it ends by the deadline.
        self._missed: list[tuple[int, RanksFailed]] = []
        self._blame_by = float("inf")  # on the monotonic clock
        self._left: list[int] = []  # ranks that ended without an error
        self._silent_since = float("inf")  # the ranks' store; on the monotonic clock
        self._answer_at: float | None = None  # on the monotonic clock, to ranks that ask for losses
        self._made = self._generation = 0
        self._replaced: Counter[int] = Counter()  # of each rank

    def run(self, preemption_s: float | None = None) -> bool:
        """Run to the end; return whether the ranks were notified of a preemption, after a SIGTERM.

        Args:
            preemption_s: the time limit for their end then, in seconds. None: SIGTERM ends them.

        Raises:
            RanksFailed: a rank failed by itself.
            Interrupted: a signal arrived. In any case no process is left.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from avgpipe.ranks.rendezvous import Board

        with raising_on_signals(), ExitStack() as stack:
            self._folder = stack.enter_context(run_folder())
            self._board = Board(FileStore(str(self._folder / "store")))
            if self._arguments is not None:
                (self._folder / ARGUMENTS).write_text(json.dumps(dict(self._arguments)))
            return watch(self, preemption_s, poll_s=LIMITS.look_s)

    def begin(self) -> None:
        for rank in range(self._size):
            self._ranks[rank] = self._start(rank)
        self._spares += [self._start_waiting(-1) for _ in range(self._wanted)]

    def look(self) -> bool:
        self._look()
        self._look_for_new()
        self._look_for_spares()
        return bool(self._ranks)

    def close(self, number: int) -> None:
        for one in self.all_started():
            one.close(number)

    def all_started(self) -> list[Started]:
        waiting = [one.process for one in (*self._starting.values(), *self._spares)]
        return [*self._ranks.values(), *waiting]

    def _start(self, rank: int, waits: bool = False) -> Started:
        self._made += 1
        folder = self._folder / f"process-{self._made}"
        folder.mkdir()
        place = {**self._added, **self._place(rank), STORE_FILE: str(self._folder / "store")}
        return start(
            [self._command], folder, place | ({SPARE: str(folder)} if waits else {}), size=self._size
        )

    def _place(self, rank: int) -> dict[str, str]:
        counts = {GENERATION: str(self._generation), RESTART: str(self._replaced[rank])}
        return {**rank_environment(rank, self._size), **counts}

    def _start_waiting(self, rank: int, deadline: float = float("inf")) -> _WaitingRank:
        """Start a process that waits at its Pipeline; -1: a spare. ``deadline``: of its predecessor."""
        process = self._start(rank, waits=True)
        deadline = min(deadline, time.monotonic() + LIMITS.start_s)
        return _WaitingRank(process, generation.pipe_of(process.folder, rank), deadline, StoppedTimer())

    # ---- while it runs -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find the ranks that have ended; kill stopped ones that keep the others waiting."""
        stopped = [rank for rank, one in self._ranks.items() if one.stopped()]
        is_over = self._stopped_timer.expired(bool(stopped)) and len(stopped) == len(self._ranks)
        # A rank that is stopped while it reads or writes the report that one waits blocks the store for all.
        if stopped and (is_over or self._is_there(generation.waited_for(self._generation), silent=True)):
            self._kill(stopped)
            # They may take long to end; until then no rank may get the answer that none is lost.
            self._put(generation.prospect(self._generation + 1), json.dumps(stopped))
        for rank, one in list(self._ranks.items()):
            end = one.poll()
            if end is None:
                continue
            del self._ranks[rank]
            if not isinstance(end, RanksFailed):
                self._left.append(rank)
                continue
            missed = end.exit_codes[0] == PEER_LOST or has_missed(self._folder, rank)
            if end.exit_codes[0] > 0 and missed and not self._is_blame_known():
                self._missed.append((rank, end))
                self._blame_by = min(self._blame_by, time.monotonic() + LIMITS.blame_s)
            else:
                self._lose(rank, end)
        if self._missed and (not self._ranks or time.monotonic() > self._blame_by):
            if self._left:
                raise self._failure(self._left[0], 0)
            for rank in unready(self._folder, self._ranks):
                raise self._failure(rank, 0, NOT_READY)
            self._lose(*self._missed[0])
        if self._left and self._failed is not None and not self._is_whole():
            why = f"{self._failed.reason}, and rank {self._left[0]} has ended, so that no process can replace it"
            raise self._failure(self._failed.rank, self._failed.exit_codes[self._failed.rank], why)
        self._answer()

    def _answer(self) -> None:
        """Answer ranks that ask for losses: none, once that is sure; else they get a new generation."""
        is_lost = bool(self._starting) or any(one.stopped() for one in self._ranks.values())
        if is_lost or not is_asked(self._folder, self._generation + 1):
            self._answer_at = None
        elif self._answer_at is None:
            self._answer_at = time.monotonic() + LIMITS.sure_s
        elif time.monotonic() > self._answer_at:
            self._put(generation.given_up(self._generation + 1), "")
            self._answer_at = float("inf")

    def _kill(self, stopped: Sequence[int]) -> None:
        self._killed_stopped.update(stopped)
        for rank in stopped:
            self._ranks[rank].kill()

    def _put(self, name: str, text: str) -> None:
        """Put a text where the ranks find it; kill ranks that were stopped while they held the store."""
        from avgpipe.ranks.rendezvous import Silence

        deadline = time.monotonic() + LIMITS.store_s
        while True:
            try:
                self._board.put(name, text)
                return
            except Silence as silence:
                if time.monotonic() > deadline:
                    raise self._unreadable() from silence
                self._kill([rank for rank, one in self._ranks.items() if one.stopped()])
                time.sleep(LIMITS.look_s)

    def _is_blame_known(self) -> bool:
        """Whether a rank is stopped, or was killed and the others have not continued since."""
        is_back = self._failed is None or self._is_restored()
        return not is_back or any(one.stopped() for one in self._ranks.values())

    def _lose(self, rank: int, end: RanksFailed, deadline: float = float("inf")) -> None:
        """Replace a rank that was killed. ``deadline``: of a new process that was to replace it."""
        code = end.exit_codes[0]
        stopped = [other for other, one in self._ranks.items() if one.stopped()]
        if code >= 0 and stopped:
            raise self._failure(stopped[0], -signal.SIGKILL, STOPPED)
        failure = self._failure(rank, code, STOPPED if rank in self._killed_stopped else None)
        self._killed_stopped.discard(rank)
        if code >= 0 and self._failed is not None and not self._is_restored():
            lost, why = self._failed, f"{self._failed.reason}, and the others cannot go on from a copy"
            raise self._failure(
                lost.rank, lost.exit_codes[lost.rank], f"{why}: {end.said or f'rank {rank} {failure.reason}'}"
            )
        if code >= 0 or self._generation >= _MOST or not self._ranks or self._left:
            raise failure  # a rank that has ended meets no other
        self._failed = failure
        forget_ready(self._folder, rank)
        self._put(generation.prospect(self._generation + 1), json.dumps([rank]))
        self._replaced[rank] += 1
        how = "a spare process"
        self._spares = [one for one in self._spares if one.process.poll() is None]
        ready = (one for one in self._spares if one.is_there and not one.process.stopped())
        if (spare := next(ready, None)) is not None:
            self._spares.remove(spare)
            self._starting[rank] = spare._replace(deadline=float("inf"))  # it is there already
        else:  # spares that are not ready yet stay spares
            how = "a new process"
            try:
                self._starting[rank] = self._start_waiting(rank, deadline)
            except OSError as error:  # no room, or no more processes
                why = f"{failure.reason}, and no new process can be started: {reason(error)}"
                raise self._failure(rank, code, why) from None
        self._say(f"rank {rank} {failure.reason}; {how} takes its place")

    def _look_for_new(self) -> None:
        """Begin the next generation once every lost rank has a new process that waits at its Pipeline."""
        for rank, one in list(self._starting.items()):
            if one.stopped_timer.expired(bool(one.process.stopped())):
                self._killed_stopped.add(rank)
                one.process.kill()
            end = one.process.poll()
            if isinstance(end, RanksFailed):
                del self._starting[rank]
                self._lose(rank, end, one.deadline)
            elif end is not None or (not one.is_there and time.monotonic() > one.deadline):
                late = f"within {LIMITS.start_s:.0f} s" if end is None else "before its end"
                raise self._failure(rank, 0, f"has not reached its Pipeline {late}, in its new process")
        if not self._starting or not all(one.is_there for one in self._starting.values()):
            return
        self._generation += 1
        for rank, one in self._starting.items():
            generation.assign_place([one.pipe], self._place(rank))  # if it was killed since, _look finds out
            self._ranks[rank] = one.process
        self._put(generation.announcement(self._generation), json.dumps(list(self._starting)))
        self._returning |= set(self._starting)
        self._starting = {}

    def _look_for_spares(self) -> None:
        """Start a spare process for a used one, but not while the others need the processors to recover."""
        if self._returning and not self._starting and self._is_restored():
            for rank in sorted(self._returning):
                self._say(f"rank {rank} is back; training continues")
            self._returning = set()
        if len(self._spares) < self._wanted and not self._starting and not self._returning:
            try:
                self._spares.append(self._start_waiting(-1))
            except OSError as error:
                self._wanted = len(self._spares)
                self._say(f"no spare process can be started any more: {reason(error)}")

    def _is_whole(self) -> bool:
        """Whether no rank is being replaced, or all have restored their state since."""
        is_back = not self._returning or self._is_there(generation.restored(self._generation), silent=True)
        return is_back and not self._starting

    def _is_restored(self) -> bool:
        return self._is_there(generation.restored(self._generation), silent=False)

    def _is_there(self, name: str, silent: bool) -> bool:
        """Whether a text is in the store; ``silent`` where the store does not answer."""
        from avgpipe.ranks.rendezvous import Silence

        try:
            is_there = self._board.get(name) is not None
        except Silence as silence:
            is_held = any(one.stopped() for one in self._ranks.values())  # by a stopped rank
            self._silent_since = float("inf") if is_held else min(self._silent_since, time.monotonic())
            if time.monotonic() > self._silent_since + LIMITS.store_s:
                raise self._unreadable() from silence
            return silent
        self._silent_since = float("inf")
        return is_there

    def _unreadable(self) -> PipelineError:
        """Return the error of a store that does not answer: a write without room may have left half a record."""
        return PipelineError(
            f"the ranks cannot meet any more, as {self._folder}/store cannot be read: see whether its disk is full"
        )

    def _failure(self, rank: int, code: int, reason: str | None = None) -> RanksFailed:
        return RanksFailed([code if r == rank else 0 for r in range(self._size)], rank, reason=reason)


class _WaitingRank(NamedTuple):
    """A process that waits at its Pipeline, or is still starting.

    Attributes:
        pipe: the pipe in which it gets its rank; it exists once the process is ready.
        deadline: for reaching its Pipeline, on the monotonic clock.
        stopped_timer: as no other process reports that a signal has stopped it.
    """

    process: Started
    pipe: Path
    deadline: float
    stopped_timer: StoppedTimer

    @property
    def is_there(self) -> bool:
        return self.pipe.exists()
