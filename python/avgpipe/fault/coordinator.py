"""The coordinator of isolated pipelines: which of them are members, from which step on. The launcher runs it.

Each process has one connection to the coordinator, which Python's ``multiprocessing.connection``
authenticates by a token, both ways. Messages are JSON of a fixed version; nothing received is unpickled. A
process that ends closes its connection, so its end is known at once, whatever its cause. A process on another
host is represented here by a gate (:mod:`avgpipe.fault.gate`).

A pipeline is a member with all its processes or not at all. When one is lost, or another one wants to join,
the coordinator asks all processes to begin no further step (``freeze``) and to report how many steps they
have begun; the change then takes effect with a step that no process has begun::

    coordinator    freeze ->            <- begun 7, 8, 7            roster: ... from step 8 on ->
    process        begins no step, continues those already begun                begins step 8 by the new roster

In which steps a lost pipeline counts depends on what its processes had published, in memory that this process
holds, when all of them have ended: see :mod:`avgpipe.fault.exchange`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any

from avgpipe.fault.roster import JOIN, OVER, VERSION, JoiningGroup, Process, Roster, Term, encoded, received
from avgpipe.fault.trunk import let_in
from avgpipe.ranks.process import peer_of
from avgpipe_ext.ring import Bell, Memory

_GREET_S = 3  # timeout for a peer to prove that it knows the token; all other peers wait meanwhile
_KNOWN = 1000  # results of ``once`` that are kept


class Coordinator:
    """Serves one run from one thread, which calls :meth:`serve` repeatedly.

    Args:
        address: a path for a Unix socket.
        token: what a process must know.
        wanted: how many pipelines begin the run together.
        lost: called with the number of a group, the rank to blame (None if unknown) and the reason, once one
            of its processes has ended (reason "", as its exit code says more), hangs, or sends an invalid
            message. It must end the other processes, and call :meth:`gone` when all of them have ended.
        say: prints a line for the user.
        recorder: records what processes report about the run, which several may report alike, and answers their
            requests by ``answer(reply, writes, kind, *values)``, now or after a later report; ``writes``:
            whether that process may write files. It raises ValueError for invalid values.
        let_join: called with the connection of another command that wants to start a pipeline, and its
            description of itself; keeps the connection, and returns the reply to that command.

    Attributes:
        groups: by number; one that has ended stays as long as its memory may be read.
        members: pipelines by the number of their group, of the members that have not left.
        history: all terms by number, as far as they are known.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        wanted: int,
        lost: Callable[[int, int | None, str], None],
        say: Callable[[str], None],
        recorder: Any = None,
        let_join: Callable[[Connection, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._listening, self._token = socket.socket(socket.AF_UNIX), token
        self._listening.bind(address)
        self._listening.listen(64)
        self.wanted, self._lost, self._say, self._recorder = wanted, lost, say, recorder
        self.roster, self.history = Roster(), dict[int, Term]()
        self.groups: dict[int, JoiningGroup] = {}
        self.members: dict[int, int] = {}
        self._let_join = let_join
        self._over: set[int] = set()  # groups that have ended
        self._unknown: set[Connection] = set()  # that have not identified themselves
        self._by_connection: dict[Connection, tuple[JoiningGroup, int]] = {}
        self._leaving: list[
            tuple[JoiningGroup, int]
        ] = []  # members that have left or are lost, with the first step that they did not publish
        self._is_frozen = False
        self._begun = 0  # steps, at the last change
        self._clean = 0  # the step by which all lost samples have been trained on
        # By name, number and following step; in _found by the batches before it, for pipelines that join later.
        self._once: dict[tuple[str, int, int], _Once] = {}
        self._found: dict[tuple[str, int, int], Any] = {}
        self._found_at = float("-inf")  # when the newest of them was answered, of the monotonic clock
        self._timeout_s = float("inf")
        self._is_to_stop = False
        self._stop: int | None = None  # the first step that has no batches

    @property
    def has_begun(self) -> bool:
        """Whether the first step has a roster."""
        return self._begun > 0 or bool(self.roster.terms)

    def overdue(self, started: Mapping[int, float]) -> list[int]:
        """Return the groups that keep others waiting for longer than the timeout before the run begins.

        ``started``: the time at which each group was started.
        """
        ready = [group for group in self.groups.values() if group.all_want("enter")]
        waiting_since = min((group.ready_at for group in ready), default=float("inf"))
        if self.has_begun:
            return []
        latest, there = time.monotonic() - self._timeout_s, {group.number for group in ready}
        return [n for n, at in started.items() if n not in there and max(at, waiting_since) < latest]

    @property
    def training(self) -> set[int]:
        """The pipelines that train, or are done and about to exit."""
        groups = self.groups.values()
        return {g.pipeline for g in groups if g.number in self.members or (g.is_done and not g.has_ended)}

    @property
    def address(self) -> str:
        return str(self._listening.getsockname())

    def close(self) -> None:
        for connection in (*self._unknown, *self._by_connection):
            connection.close()
        with suppress(OSError):
            os.unlink(self.address)
        self._listening.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def serve(self, timeout_s: float) -> None:
        """Handle the messages that arrive within ``timeout_s``, and all changes that are due."""
        for one in wait([self._listening, *self._unknown, *self._by_connection], timeout_s):
            if one is self._listening:
                self._accept()
            elif isinstance(one, Connection) and not one.closed:
                self._receive(one)
        self._find_silent()
        self._choose_doers()
        self._find_late()
        self._change()

    def _accept(self) -> None:
        with suppress(
            OSError, EOFError, AuthenticationError
        ):  # the peer has ended, is stopped, or does not know the token
            self._unknown.add(let_in(self._listening.accept()[0], self._token, _GREET_S))

    def _receive(self, connection: Connection) -> None:
        known = self._by_connection.get(connection)
        try:
            message = received(connection)
        except (OSError, EOFError):
            self._closed(connection)
            return
        except ValueError as error:
            self._refuse(connection, error)
            return
        try:
            kind, *values = message
            if known is None:
                self._greet(connection, kind, *values)
            else:
                group, rank = known
                group.processes[rank].heard_at = time.monotonic()
                self._answer(group, rank, kind, *values)
        except (ValueError, TypeError, KeyError) as error:
            self._refuse(connection, error)

    def _refuse(self, connection: Connection, error: Exception) -> None:
        """Drop a peer that sent an invalid message."""
        if connection in self._by_connection:
            group, rank = self._by_connection[connection]
            self._lost(group.number, rank, f"{group.processes[rank].name} sent an invalid message: {error}")
        else:
            self._send(connection, "welcome", {"why": str(error)})
        self._closed(connection)

    def _closed(self, connection: Connection) -> None:
        connection.close()
        self._unknown.discard(connection)
        known = self._by_connection.pop(connection, None)
        if known is not None and known[0].processes[known[1]].wants != "leave":
            self._lost(known[0].number, known[1], "")

    def _find_silent(self) -> None:
        """End processes that send nothing, such as stopped ones: the others would wait for them."""
        latest = time.monotonic() - self._timeout_s
        for group, rank in list(self._by_connection.values()):
            process = group.processes[rank]
            if process.heard_at < latest and process.wants != "leave":
                process.heard_at = float("inf")
                silence = f"{process.name} sent no message for {self._timeout_s:g} s"
                self._lost(group.number, rank, f"{silence}, when it was at {process.doing}")

    # ---- messages of processes ---------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, kind: str, version: int, about: dict[str, Any]) -> None:
        if kind not in ("hello", JOIN) or version != VERSION:
            raise ValueError(f"{kind} {version}: all processes of a run must have one version of avgpipe")
        if kind == JOIN and self._let_join is not None:
            self._unknown.discard(connection)
            self._send(connection, "welcome", self._let_join(connection, about))
            return
        number, rank = int(about["group"]), int(about["rank"])
        if number in self._over:
            raise ValueError(f"the processes started together with {about['name']} have ended")
        if number not in self.groups:
            pipeline, size, places, period = (int(about[n]) for n in ("pipeline", "size", "places", "period"))
            published = Memory.create(places * Bell.BYTES)
            is_far = bool(about.get("is_far"))
            found = self._progress()
            self.groups[number] = JoiningGroup(
                pipeline, number, size, published, places, period, found, is_far=is_far
            )
        group = self.groups[number]
        self._timeout_s = float(about["timeout_s"])
        self._unknown.discard(connection)
        group.processes[rank] = Process(connection, str(about["name"]), peer_of(connection), time.monotonic())
        group.bells[rank] = about["bell"]
        self._by_connection[connection] = group, rank
        self._send(connection, "welcome", {**group.found, "published": place_of(group.published)})

    def _progress(self) -> dict[str, Any]:
        """Return the position of the run, for a pipeline that joins.

        The batches are the fewest that any process has begun: a process that is ahead may be lost before the
        pipeline joins, and the others begin its batches only then.
        """
        begun = (p.batches for g in self._living() for p in g.processes.values() if p.batches is not None)
        return {"has_begun": self.has_begun, "batches": min(begun, default=0)}

    def _answer(self, group: JoiningGroup, rank: int, kind: str, *values: Any) -> None:
        process = group.processes[rank]
        if kind == "alive":
            process.doing, process.batches = str(values[0]), int(values[1])
            if group.given and group.turns_published():
                group.given.clear()
            self._send(process.connection, "heard")
        elif kind == "begun":
            process.begun, process.batches = int(values[0]), int(values[1])
        elif kind == "enter":
            self._let_enter(group, rank, *values)
        elif kind == "leave":
            process.wants = "leave"
        elif kind == "stop":
            self._is_to_stop = True
        elif kind == "memory":
            request, name, size = values
            self._reply(process, request, offer(group.memory, name, size))
        elif kind == "late":
            process.late = int(values[0]), float(values[1])
        elif kind == "once":
            request, what, number, turn, batches = values
            once = self._once.setdefault((what, number, turn), _Once(turn, batches))
            once.ask(group.number, request, partial(self._reply, process))
            while len(self._once) > _KNOWN:  # drop the oldest, whose results all have received long ago
                del self._once[next(iter(self._once))]
        elif kind == "done":
            what, number, turn, value = values
            once = self._once[what, number, turn]
            once.done(value)
            # A pipeline that joins later does not know the batches before the first step of a resumed run.
            self._note_found((what, number, once.batches if turn else 0), value)
            self._found_at = time.monotonic()
        elif kind == "found":
            request, *name = values
            known = {"value": self._found[tuple(name)]} if tuple(name) in self._found else {}
            self._reply(process, request, known)
        elif kind == "hand over":
            self._hand_over(group, *values)
        elif kind == "tell" and self._recorder is not None:
            self._recorder.hear(*values)
        elif kind == "ask" and self._recorder is not None:
            reply = partial(self._reply, process, values[0])
            self._recorder.answer(reply, self._writes(group), *values[1:])
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _writes(self, group: JoiningGroup) -> bool:
        """Whether a group may write files: on this host only, as long as a pipeline here trains."""
        return not (group.is_far and self._trains_here)

    @property
    def _trains_here(self) -> bool:
        """Whether a pipeline on this host trains; one that joined must have published a step."""
        near = (group for group in self._living() if not group.is_far)
        return any(self._term_of(group).donor is None or group.turns_published() > 0 for group in near)

    def _may_ask_here(self, turn: int) -> bool:
        """Whether a pipeline on this host may still request a result that is needed before a step.

        One that joins with the step does not, nor one that has published it.
        """
        if not self.has_begun:
            return True  # the run begins here
        for group in self._living():
            term = self._term_of(group)
            was_there = term.first < turn or term.donor is None
            if not group.is_far and was_there and term.first + group.turns_published() <= turn:
                return True
        return False

    def _choose_doers(self) -> None:
        """Choose a group to compute each requested result; on this host, if one here will request it."""
        far = {group.number for group in self.groups.values() if group.is_far and not group.has_ended}
        for once in self._once.values():
            if once.is_awaited:
                once.choose(far if far and self._may_ask_here(once.turn) else ())

    def _note_found(self, name: tuple[str, int, int], value: Any) -> None:
        """Keep a result for pipelines that join later; one from before the first batch is kept for ever."""
        self._found[name] = value
        if len(self._found) > _KNOWN:
            oldest = next((known for known in self._found if known[-1] > 0), name)
            del self._found[oldest]

    def _reply(self, process: Process, request: int, value: Any) -> None:
        self._send(process.connection, "reply", request, value)

    def _let_enter(self, group: JoiningGroup, rank: int, request: int, digests: list[str]) -> None:
        """Admit a process with the plan and model of the others, and at the start with their weights."""
        for other in self.groups.values():
            theirs = other.digests.get(rank, digests)
            if theirs[0] != digests[0] or (not self.has_begun and theirs != digests):
                what = "plan or model" if theirs[0] != digests[0] else "initial weights"
                why = f"its {what} differs from pipeline {other.pipeline}'s; every rank must build the same"
                self._reply(group.processes[rank], request, {"why": why})
                return
        group.digests[rank] = digests
        group.processes[rank].wants = "enter"
        group.ready_at = time.monotonic()
        self._reply(group.processes[rank], request, {})

    def _hand_over(self, donor: JoiningGroup, number: int, name: str, value: Any) -> None:
        """Pass on the state that a pipeline begins with, once: a donor's successor sends it again."""
        memory, receiver = donor.memory.pop(name, None), self.groups.get(number)
        if receiver is None or name in receiver.given or receiver.turns_published():
            return
        receiver.given[name] = memory
        for process in receiver.processes.values():
            self._send(process.connection, "handed over", name, value)

    def _find_late(self) -> None:
        """Handle processes that timed out waiting for others.

        What one pipeline computes for all has no timeout, and a pipeline that joins may wait for its first
        step meanwhile: the timeout of the others begins when that result is there.
        """
        if any(once.is_under_way for once in self._once.values()):
            return
        for group, rank in list(self._by_connection.values()):
            process = group.processes[rank]
            if process.late is not None and time.monotonic() >= self._found_at + process.late[1]:
                (turn, waited_s), process.late = process.late, None
                self._end_late(group, process, turn, waited_s)

    def _end_late(self, group: JoiningGroup, process: Process, turn: int, waited_s: float) -> None:
        """End the pipelines whose step a process waits for, or its own if all have published it."""
        counting = self.roster.counting(turn)
        if group.pipeline not in counting:
            return
        late = {
            pipeline: self.groups[term.number]
            for pipeline, term in counting.items()
            if term.number in self.members and term.first + self.groups[term.number].turns_published() <= turn
        }
        waited = f"pipeline {group.pipeline} has waited {waited_s:g} s for"
        for pipeline, other in late.items():
            doing = "; ".join(f"{p.name} was at {p.doing}" for _, p in sorted(other.processes.items()))
            self._lost(other.number, None, f"{waited} pipeline {pipeline}'s part of step {turn}; {doing}")
        if not late and process.reported_late == turn:
            why = f"{waited} step {turn}, which every pipeline has published; {process.name} was at "
            self._lost(group.number, None, f"{why}{process.doing}")
        elif not late:
            process.reported_late = turn  # the last publication may still be in flight

    # ---- changes -----------------------------------------------------------------------------------------------------

    def gone(self, number: int) -> None:
        """Note that all processes of a group have ended."""
        self._over.add(number)
        group = self.groups.get(number)
        if group is None:
            return
        group.has_ended = True
        for process in group.processes.values():
            self._by_connection.pop(process.connection, None)
            process.connection.close()
        self._remove(group)
        for once in self._once.values():
            once.gone(number)
        self._change()

    def _remove(self, group: JoiningGroup) -> None:
        if self.members.pop(group.number, None) is not None:
            self._leaving.append((group, self._term_of(group).first + group.turns_published()))

    def _term_of(self, group: JoiningGroup) -> Term:
        return next(term for term in self.roster.present if term.number == group.number)

    def _living(self) -> list[JoiningGroup]:
        return [self.groups[number] for number in self.members]

    def _change(self) -> None:
        """Make the changes that are due, once all processes have reported their steps begun."""
        for group in self._living():
            if group.all_want("leave"):
                group.is_done = True
                self._remove(group)
        joining = [
            g
            for g in self.groups.values()
            if g.number not in self.members and g.all_want("enter") and not g.has_ended
        ]
        if self._stop is not None:
            joining = []  # nothing is left to train on
        stops = self._is_to_stop and self._stop is None
        is_due = bool(self._leaving or ((joining or stops) and self.members))
        if not self.has_begun:
            is_due = len(joining) >= self.wanted
        if not is_due:
            return
        asked = [p for group in self._living() for p in group.processes.values() if p.wants != "leave"]
        if not self._is_frozen:
            self._is_frozen = True
            for process in asked:
                process.begun = None
                self._send(process.connection, "freeze")
        if all(process.begun is not None for process in asked):
            self._is_frozen = False
            published = (turns for _, turns in self._leaving)  # a step that all have published has been begun
            self._begun = max([self._begun, *published, *(process.begun or 0 for process in asked)])
            self._apply(self._begun, joining)

    def _apply(self, begun: int, joining: Sequence[JoiningGroup]) -> None:
        """Change the roster from step ``begun`` on, which no process has begun."""
        begins = not self.has_begun
        for group, published in self._leaving:
            self._apply_leave(group, published, begun)
        self._leaving = []
        if self._is_to_stop and self._stop is None:
            self._stop = begun
        donors = [term.pipeline for term in self.roster.present if term.first < begun]
        for group in sorted(joining, key=lambda group: group.pipeline):
            if not begins and (self._stop is not None or not donors):  # the stop may have been set just above
                break  # no donor is left, or none will be soon
            first = 0 if begins else -(-max(begun, self._clean) // group.period) * group.period
            term = Term(group.pipeline, group.number, first, None if begins else donors[0])
            self.history[group.number] = term
            self.roster.enter(term)
            self.members[group.number] = group.pipeline
            if not begins:
                state = f"with the optimizer's state of pipeline {donors[0]}"
                self._say(f"pipeline {group.pipeline} trains with the others from step {first} on, {state}")
        self._forget(begun)
        self._send_roster()

    def _apply_leave(self, group: JoiningGroup, published: int, begun: int) -> None:
        term = self.history[group.number] = self.roster.leave(group.pipeline, published, begun)
        lost = term.end - term.published
        self._clean = max(self._clean, begun) + lost
        if lost and self.members:
            steps = "step" if lost == 1 else f"{lost} steps"
            self._say(f"pipeline {group.pipeline}: the others train on its samples of its last {steps}")
        for other in self.roster.present:
            has_state = len(self.groups[other.number].given) == self.groups[other.number].places
            has_begun = self.groups[other.number].turns_published() > 0
            if other.donor == group.pipeline and not (has_state or has_begun):
                why = f"pipeline {group.pipeline}, whose state it was to get, has ended"
                self._lost(other.number, None, OVER if group.is_done else why)
            elif lost and term.published < other.first < self._clean:
                why = f"it joined too late to know the lost samples of pipeline {group.pipeline}"
                self._lost(other.number, None, why)

    def _forget(self, begun: int) -> None:
        """Drop steps that no member still needs: all are past a step once all have published the next."""
        published = [term.first + self.groups[term.number].turns_published() for term in self.roster.present]
        self.roster.forget(min(begun, *published, begun) - 2)
        needed = {term.number for term in self.roster.terms}
        self.groups = {n: group for n, group in self.groups.items() if n in needed or not group.has_ended}

    def _send_roster(self) -> None:
        about = {term.number: self.groups[term.number] for term in self.roster.terms}
        facts = {
            number: {
                "published": place_of(group.published),
                "places": group.places,
                "memory": {name: place_of(memory) for name, memory in group.memory.items()},
                "bells": [bell for _, bell in sorted(group.bells.items())],
            }
            for number, group in about.items()
        }
        for group in self._living():
            for process in group.processes.values():
                self._send(process.connection, "roster", self.roster.to_json(), facts, self._stop)

    def _send(self, connection: Connection, *message: Any) -> None:
        with suppress(OSError, ValueError):  # it has ended, which its closed connection will show
            connection.send_bytes(encoded(message))


def place_of(memory: Memory) -> list[Any]:
    """Return where another process opens memory: path and bytes."""
    return [memory.path, memory.bytes]


def offer(memory: dict[str, Memory], name: str, size: int) -> dict[str, Any]:
    """Return the reply to a request for memory, which is made unless there is some of that name and size."""
    try:
        found = memory.get(name)
        if found is None or found.bytes < size:
            found = memory[name] = Memory.create(size)
    except (MemoryError, OSError) as error:
        return {"why": str(error) or "there is not enough"}
    return {"place": place_of(found)}


class _Once:
    """A result that one pipeline computes for all.

    Args:
        turn: the step that follows.
        batches: the number of the loader's batches before it.
    """

    def __init__(self, turn: int, batches: int) -> None:
        self.turn, self.batches = turn, batches
        self._doer: int | None = None  # the number of a group
        self._value: list[Any] = []
        self._waiting: list[tuple[int, int, Callable[[int, Any], None]]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a group is computing it."""
        return self._doer is not None and not self._value

    @property
    def is_awaited(self) -> bool:
        """Whether a process waits for it, and no group is computing it."""
        return bool(self._waiting) and self._doer is None

    def ask(self, number: int, request: int, reply: Callable[[int, Any], None]) -> None:
        """Answer a process of a group: with the value, with the order to compute it, or later."""
        if self._value:
            reply(request, {"value": self._value[0]})
        elif self._doer == number:
            reply(request, {})
        else:
            self._waiting.append((number, request, reply))

    def choose(self, others: Collection[int]) -> None:
        """Have one of the waiting groups compute it, except the ``others``, which go on waiting."""
        self._doer = next((number for number, *_ in self._waiting if number not in others), None)
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            self.ask(*asked)

    def done(self, value: Any) -> None:
        self._value = [value]
        for _, request, reply in self._waiting:
            reply(request, {"value": value})
        self._waiting = []

    def gone(self, number: int) -> None:
        """Forget a group; another one has to compute the result if this one was at it."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != number]
        if self._doer == number and not self._value:
            self._doer = None
