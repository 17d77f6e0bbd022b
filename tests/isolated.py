"""Isolated pipelines whose processes start in milliseconds: forked as in ``tests.runner``, with a coordinator here."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

from avgpipe.fault.coordinator import Coordinator
from avgpipe.fault.door import listen
from avgpipe.fault.membership import environment
from avgpipe.fault.roster import Term
from avgpipe.ranks.environment import HOST, SHARES
from tests.patience import Deadline
from tests.runner import Ranks

_TOKEN = "a token"
_END_S = 10.0  # of a process that has closed its connection
_LIMIT_S = 100


class Isolated:
    """Runs ``function(**arguments)`` as ``size`` processes of each of several pipelines, until all have ended.

    A pipeline of which a process fails is ended, and started again as long as ``restarts`` are left. ``joins`` are
    more, which come once all have told ``joins_after`` turns. Those in ``far`` are as on other hosts, each on its own.
    ``shares`` of a batch are equal, so that timing changes no bit, unless a test is about them.

    Attributes:
        said: what the coordinator has said.
        results: of every process that has ended well, by pipeline and rank.
        failures: of those that have not: exit code and output by group and rank.
        why: a group was ended.
    """

    def __init__(
        self,
        pipelines: int,
        size: int,
        function: Callable[..., Any],
        restarts: int = 1,
        joins: Sequence[int] = (),
        joins_after: int = 0,
        far: Collection[int] = (),
        shares: str = "equal",
        **arguments: Any,
    ) -> None:
        self._shares = shares
        self._far = far
        self._joins, self._joins_after = list(joins), joins_after
        self._size, self._function, self._arguments, self._restarts = size, function, arguments, restarts
        self.said: list[str] = []
        self.results: dict[tuple[int, int], Any] = {}
        self.failures: dict[tuple[int, int], tuple[int, str]] = {}
        self.failed: list[int] = []  # pipelines
        self._groups: dict[int, tuple[int, Ranks]] = {}
        self._closed: dict[int, Deadline] = {}  # groups of which a process has closed its connection
        self.why: dict[int, str] = {}
        self._started = 0
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            listening = (listen(("127.0.0.1", 0)), _TOKEN) if far else None
            self.coordinator = Coordinator(
                f"{folder}/coordinator",
                _TOKEN.encode(),
                pipelines,
                self._lose,
                self.said.append,
                listening=listening,
            )
            self._members = self.coordinator.members
            stack.callback(self.coordinator.close)
            for pipeline in range(pipelines):
                self._start(pipeline)
            deadline = Deadline(_LIMIT_S)
            try:
                while self._groups:
                    self.coordinator.serve(0.02)
                    self._look()
                    assert not deadline.has_passed, self._outputs()
            finally:
                for _, ranks in self._groups.values():
                    ranks.kill(*range(size))

    def _start(self, pipeline: int) -> None:
        number, self._started = self._started, self._started + 1
        self.coordinator.started(number)
        place = environment(self.coordinator.address, _TOKEN, number, pipeline)
        if pipeline in self._far:
            address = self.coordinator.far_address
            assert address is not None
            place = {**environment(address, _TOKEN, number, pipeline), HOST: f"host of {pipeline}"}
        place |= {SHARES: self._shares}
        ranks = Ranks(self._size, self._function, environment=place, **self._arguments)
        self._groups[number] = pipeline, ranks

    def _lose(self, number: int, rank: int | None, why: str) -> None:
        if not why:  # a closed connection: the process may end by itself
            self._closed.setdefault(number, Deadline(_END_S))
        elif number in self._groups and number not in self.why:
            self.why[number] = why
            self._groups[number][1].kill(*range(self._size))

    def _look(self) -> None:
        for number, (pipeline, ranks) in list(self._groups.items()):
            codes = [process.exitcode for process in ranks.processes]
            if any(codes) or (number in self._closed and self._closed[number].has_passed):
                self._lose(number, None, "a process has ended")
            if None in codes:
                continue
            del self._groups[number]
            self.coordinator.gone(number)
            if any(codes):
                for rank, end in enumerate(ranks.join()):
                    self.failures[number, rank] = end
                self.failed.append(pipeline)
                if self._restarts and self._members.members:
                    self._restarts -= 1
                    self._start(pipeline)
            else:
                self.results |= {(pipeline, rank): r for rank, r in enumerate(ranks.results())}

        members = self._members
        published = min((group.published() for group in members.groups.values()), default=0)
        while self._joins and members.has_begun and published >= self._joins_after:
            self._start(self._joins.pop())
        cannot_begin = not members.has_begun and len(self._groups) < members.wanted
        if cannot_begin or (members.has_begun and not members.training):
            for number in self._groups.keys() - self._closed.keys():
                self._lose(number, None, "the run is over")

    def __repr__(self) -> str:
        return "\n".join([*self.said, *(f"group {number}: {why}" for number, why in self.why.items())])

    def _outputs(self) -> str:
        texts = [
            f"group {n}, rank {r}: {text[-2000:]}"
            for n, (_, ranks) in self._groups.items()
            for r, text in enumerate(ranks.outputs())
        ]
        return "\n".join([*self.said, *self.why.values(), *texts])

    @property
    def terms(self) -> list[Term]:
        return [term for _, term in sorted(self._members.history.items())]

    def counting(self, turn: int) -> list[int]:
        return sorted(s.pipeline for s in self.terms if s.first <= turn < s.counts_until)

    def members(self, turn: int) -> list[int]:
        return sorted(s.pipeline for s in self.terms if s.first <= turn < s.end)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
