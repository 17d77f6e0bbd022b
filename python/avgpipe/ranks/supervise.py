"""Starting isolated pipelines on this host, each as processes of its own, and starting again those that are lost."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from avgpipe.faults import RESTART
from avgpipe.ranks.coordinator import Coordinator
from avgpipe.ranks.launch import Interrupted, RanksFailed, Started, keeping_handlers, loopback_store, start
from avgpipe.ranks.membership import environment
from avgpipe.ranks.process import WRONG_ARGUMENTS

_POLL_S = 0.02
_ADDRESS = "coordinator"
_OVER = "the run is over"  # why a pipeline is ended that comes too late


@dataclass
class Isolation:
    """How many pipelines there are.

    Attributes:
        pipelines: how many the run begins with, and has while nothing is lost.
        least: with fewer it ends.
        restarts: how often in a row a pipeline that was lost is started again though it has made no step.
    """

    pipelines: int
    least: int = 1
    restarts: int = 3


@dataclass
class _Group:
    pipeline: int
    processes: Started
    resources: ExitStack
    why: str = ""  # it was ended


class Supervisor:
    """Runs a command as the processes of several isolated pipelines, until they have finished.

    Args:
        command: what each process runs.
        size: how many a pipeline has.
        added: variables for all of them.
        say: is told a line for people.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        isolation: Isolation,
        added: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._command, self._size, self._isolation, self._added, self._say = (
            command,
            size,
            isolation,
            added,
            say,
        )
        self._groups: dict[int, _Group] = {}
        self._started = 0  # groups
        self._starts: Counter[int] = Counter()  # of each pipeline
        self._left = dict.fromkeys(range(isolation.pipelines), isolation.restarts)
        self._finished: set[int] = set()  # pipelines
        self._failure: RanksFailed | None = None

    def run(self) -> None:
        """Run to the end.

        Raises:
            RanksFailed: too few pipelines were left; of the last that failed.
            Interrupted: a signal came. No process is left, whatever happens.
        """
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="avgpipe-"))
            self._token = secrets.token_hex(16)
            self._coordinator = Coordinator(
                os.path.join(folder, _ADDRESS),
                self._token.encode(),
                self._isolation.pipelines,
                self._lose,
                self._say,
            )
            stack.callback(self._coordinator.close)
            stack.enter_context(keeping_handlers())
            number = signal.SIGKILL
            try:
                for pipeline in range(self._isolation.pipelines):
                    self._start(pipeline)
                while self._groups:
                    self._coordinator.serve(_POLL_S)
                    self._look()
            except BaseException as error:
                number = getattr(
                    error, "sigval", signal.SIGINT if isinstance(error, KeyboardInterrupt) else number
                )
                if number != signal.SIGKILL:
                    raise Interrupted(number) from error
                raise
            finally:
                for group in self._groups.values():
                    group.processes.close(number)
                    group.resources.close()
        if self._failure is not None and not self._finished:
            raise self._failure

    def _start(self, pipeline: int) -> None:
        number, self._started = self._started, self._started + 1
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="avgpipe-")))
            address = stack.enter_context(loopback_store())
            place = environment(self._coordinator.address, self._token, number, pipeline)
            place[RESTART] = str(self._starts[pipeline])
            self._starts[pipeline] += 1
            processes = start([self._command] * self._size, folder, {**self._added, **address, **place})
            self._groups[number] = _Group(pipeline, processes, stack.pop_all())

    def _lose(self, number: int, why: str) -> None:
        """End a pipeline of which a process is lost: the others cannot go on without it."""
        group = self._groups.get(number)
        if group is not None and not group.why:
            group.why = why
            group.processes.kill()

    def _look(self) -> None:
        """See which pipelines have ended."""
        for number, group in list(self._groups.items()):
            failure = group.processes.poll_or_kill()
            if failure is None:
                continue
            del self._groups[number]
            group.resources.close()
            known = self._coordinator.groups.get(number)
            if known is not None and known.turns_told():
                self._left[group.pipeline] = self._isolation.restarts
            self._coordinator.gone(number)
            if isinstance(failure, RanksFailed):
                self._replace(group, failure)
            else:
                self._finished.add(group.pipeline)
        if self._groups and (self._is_over() or self._failed()):
            self._end(_OVER)
        for number in self._coordinator.overdue(set(self._groups)):
            self._lose(number, "it has not come to its first batch, for which the others have waited")

    def _end(self, why: str) -> None:
        for group in self._groups.values():
            group.why = group.why or why
            group.processes.kill()
        self._left = dict.fromkeys(self._left, 0)

    def _is_over(self) -> bool:
        """Whether those that trained are done, and nobody is left whom a pipeline that comes could join."""
        return bool(self._finished) and not self._coordinator.training

    def _failed(self) -> bool:
        """Whether too few are left."""
        living = self._coordinator.training
        if not self._has_begun:
            living = {group.pipeline for group in self._groups.values()}
        return len(living | self._finished) < self._isolation.least

    @property
    def _has_begun(self) -> bool:
        return self._coordinator.has_begun

    def _replace(self, group: _Group, failure: RanksFailed) -> None:
        """Start a lost pipeline again, if it may be."""
        if group.why == _OVER:
            return
        self._failure = failure
        rank, reason = failure.rank, failure.reason
        self._say(f"pipeline {group.pipeline}: rank {rank} {reason}" + f" ({group.why})" * bool(group.why))
        was_killed = failure.exit_codes[rank] < 0
        is_hopeless = failure.exit_codes[rank] == WRONG_ARGUMENTS or not (self._has_begun or was_killed)
        if self._left[group.pipeline] > 0 and not is_hopeless:
            self._left[group.pipeline] -= 1
            self._start(group.pipeline)
        elif not self._has_begun:  # it would do so again, and the others wait for it
            self._end(f"pipeline {group.pipeline} cannot begin")
