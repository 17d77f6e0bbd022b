"""Who is there, and from which turn on: what the launcher of isolated pipelines settles with their processes.

Each process has one connection to it, which Python's ``multiprocessing.connection`` authenticates by a token, both
ways. Messages are JSON of a fixed version: nothing that comes is unpickled. A process that ends closes its connection,
so its end is known at once, however it came about. For one on another host somebody here stands
(:mod:`avgpipe.fault.gate`).

A pipeline is whole or gone. When one is lost, or another one wants to come, the coordinator has all processes begin no
turn (``freeze``) and say how many they have begun; the change then takes effect with a turn that nobody has begun::

    coordinator    freeze ->            <- begun 7, 8, 7            roster: ... from turn 8 on ->
    process        begins no turn, goes on with those that it has begun            begins turn 8 by the new roster

In which turns a lost pipeline counts is decided by what its processes had told the others, in memory that this process
holds, once all of them are dead: see :mod:`avgpipe.fault.exchange`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from avgpipe.fault.roster import Roster, Term
from avgpipe.fault.trunk import let_in
from avgpipe.ranks.process import peer_of
from avgpipe_ext.ring import Bell, Memory

VERSION = 1
OVER = "the run is over"  # why a pipeline is ended that comes too late
JOIN = "join"  # what another command says first that wants to start a pipeline
ENDED = "ended"  # and what it says at last
_MOST_BYTES = 2**20  # of a message
_GREET_S = 3  # in which who connects must have shown that it knows the token; the others wait meanwhile
_KNOWN = 1000  # things that one has found and all may ask for


def encoded(message: Sequence[Any]) -> bytes:
    return json.dumps(message).encode()


def received(connection: Connection) -> list[Any]:
    """Read a message; OSError or EOFError for a closed connection, ValueError for what is none."""
    message = json.loads(connection.recv_bytes(_MOST_BYTES))
    if not isinstance(message, list) or not message:
        raise ValueError(f"not a message: {message!r}")
    return message


class Recorder(Protocol):
    """What the launcher does with what processes tell it beside all this."""

    def hear(self, kind: str, *values: Any) -> None:
        """Take in what one process tells; others may tell the same. ValueError for what makes no sense."""

    def answer(self, reply: Callable[[Any], None], writes: bool, kind: str, *values: Any) -> None:
        """Answer a question, now or when something else has been heard; ``writes``: who asks may write files."""


@dataclass
class Process:
    """One process of a pipeline, as far as it has told.

    Attributes:
        name: of it, in words.
        pid: its process id, as the kernel says.
        heard_at: when it last said something, of the monotonic clock.
        doing: what it was at then.
        batches: of the loader, that it has begun; None until it has said so.
        begun: turns, as the answer to the newest freeze.
        wants: "enter", or "leave" once it is done.
        late: the turn for which it has waited for as long as it may, and how long, until that is seen to.
        complained: of this turn, though all had told it.
    """

    connection: Connection
    name: str
    pid: int
    heard_at: float
    doing: str = "its start"
    batches: int | None = None
    begun: int | None = None
    wants: str = ""
    late: tuple[int, float] | None = None
    reported_late: int = -1


@dataclass
class Group:
    """The processes of a pipeline that were started together.

    Attributes:
        number: over the life of the run.
        size: how many they are.
        told: of each of its stage replicas (``places``), how many turns it has told since the pipeline entered.
        period: the turns between two that tell an update.
        found: what the run had come to when the first of them came, which all are told.
        bells: by rank, what others ring for it.
        digests: by rank, of what all pipelines must have alike, and of the initial weights.
        memory: by name, what its processes have asked for.
        given: by name, what others have handed over to it, until it has begun with that.
        is_far: whether its processes are on another host.
        ready_at: when its processes wanted to enter, of the monotonic clock.
        is_done: whether it has left the run as it should.
        has_ended: whether none of them is there any more.
    """

    pipeline: int
    number: int
    size: int
    published: Memory
    places: int
    period: int
    found: Mapping[str, Any]
    bells: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, list[str]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    given: dict[str, Memory | None] = field(default_factory=dict)
    is_far: bool = False
    ready_at: float = float("inf")
    is_done: bool = False
    has_ended: bool = False

    def all_want(self, what: str) -> bool:
        return len(self.processes) == self.size and all(p.wants == what for p in self.processes.values())

    def turns_published(self) -> int:
        """Return how many turns all of it have told."""
        return min(Bell(self.published, n * Bell.BYTES).count() for n in range(self.places))


class Coordinator:
    """Serves one run from one thread, which calls :meth:`serve` again and again.

    Args:
        address: a path for a Unix socket.
        token: what a process must know.
        wanted: how many pipelines begin the run together.
        lost: is told the number of a group, the rank to blame if it is one, and why, once a process of it is gone
            ("", as its end says more), hangs, or speaks nonsense. It shall end the others, and call :meth:`gone` when
            all of them have ended.
        say: is told a line for people.
        recorder: hears what processes tell.
        let_join: is told of another command that wants to start a pipeline, and what it says of itself, and keeps its
            connection; returns what that command is told.

    Attributes:
        groups: by number; those that have ended as long as somebody may read their memory.
        members: pipelines by the number of their group, of those that live.
        history: all stays by number, as they are known.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        wanted: int,
        lost: Callable[[int, int | None, str], None],
        say: Callable[[str], None],
        recorder: Recorder | None = None,
        let_join: Callable[[Connection, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._listening, self._token = socket.socket(socket.AF_UNIX), token
        self._listening.bind(address)
        self._listening.listen(64)
        self.wanted, self._lost, self._say, self._recorder = wanted, lost, say, recorder
        self.roster, self.history = Roster(), dict[int, Term]()
        self.groups: dict[int, Group] = {}
        self.members: dict[int, int] = {}
        self._let_join = let_join
        self._over: set[int] = set()  # groups that have ended
        self._unknown: set[Connection] = set()  # that have not said who they are
        self._by_connection: dict[Connection, tuple[Group, int]] = {}
        self._leaving: list[
            tuple[Group, int]
        ] = []  # members that are gone, with the first turn that they lack
        self._is_frozen = False
        self._begun = 0  # turns, at the last change
        self._clean = 0  # the turn by which what was lost has been trained on
        # By what it is, its number, and the turn after it; or, for those that come later, the batches before it.
        self._once: dict[tuple[str, int, int], _Once] = {}
        self._found: dict[tuple[str, int, int], Any] = {}
        self._found_at = float("-inf")  # when the newest of them was answered, of the monotonic clock
        self._timeout_s = float("inf")
        self._is_to_stop = False
        self._stop: int | None = None  # the first turn that has no batches any more

    @property
    def has_begun(self) -> bool:
        """Whether pipelines train, or have."""
        return self._begun > 0 or bool(self.roster.terms)

    def overdue(self, started: Mapping[int, float]) -> list[int]:
        """Return for which groups another has waited for too long to begin the run; ``started``: when each was."""
        ready = [group for group in self.groups.values() if group.all_want("enter")]
        waiting_since = min((group.ready_at for group in ready), default=float("inf"))
        if self.has_begun:
            return []
        latest, there = time.monotonic() - self._timeout_s, {group.number for group in ready}
        return [n for n, at in started.items() if n not in there and max(at, waiting_since) < latest]

    @property
    def training(self) -> set[int]:
        """The pipelines that train, or are done and about to end."""
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
        """Hear what has come, and wait for it at most ``timeout_s``."""
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
        ):  # gone again, stands still, or does not know the token
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
        """Have no more to do with who speaks nonsense."""
        if connection in self._by_connection:
            group, rank = self._by_connection[connection]
            self._lost(
                group.number, rank, f"{group.processes[rank].name} has said what makes no sense: {error}"
            )
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
        """A process that stands still says nothing, and would keep the others waiting."""
        latest = time.monotonic() - self._timeout_s
        for group, rank in list(self._by_connection.values()):
            process = group.processes[rank]
            if process.heard_at < latest and process.wants != "leave":
                process.heard_at = float("inf")
                silence = f"{process.name} has said nothing for {self._timeout_s:g} s"
                self._lost(group.number, rank, f"{silence}, when it was at {process.doing}")

    # ---- what processes say ------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, kind: str, version: int, about: dict[str, Any]) -> None:
        if kind not in ("hello", JOIN) or version != VERSION:
            raise ValueError(f"{kind} {version}: all processes of a run must have one version of avgpipe")
        if kind == JOIN and self._let_join is not None:
            self._unknown.discard(connection)
            self._send(connection, "welcome", self._let_join(connection, about))
            return
        number, rank = int(about["group"]), int(about["rank"])
        if number in self._over:
            raise ValueError(f"what was started together with {about['name']} has ended")
        if number not in self.groups:
            pipeline, size, places, period = (int(about[n]) for n in ("pipeline", "size", "places", "period"))
            published = Memory.create(places * Bell.BYTES)
            is_far = bool(about.get("is_far"))
            found = self._progress()
            self.groups[number] = Group(
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
        """Return what a pipeline that comes finds.

        Who is ahead may be gone before it enters, and what that had is begun by the others only then.
        """
        begun = (p.batches for g in self._living() for p in g.processes.values() if p.batches is not None)
        return {"has_begun": self.has_begun, "batches": min(begun, default=0)}

    def _answer(self, group: Group, rank: int, kind: str, *values: Any) -> None:
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
            self._give_memory(group, process, *values)
        elif kind == "late":
            process.late = int(values[0]), float(values[1])
        elif kind == "once":
            request, what, number, turn, batches = values
            once = self._once.setdefault((what, number, turn), _Once(turn, batches))
            once.ask(group.number, request, partial(self._reply, process))
            while len(self._once) > _KNOWN:  # the oldest, which all have heard of long ago
                del self._once[next(iter(self._once))]
        elif kind == "done":
            what, number, turn, value = values
            once = self._once[what, number, turn]
            once.done(value)
            # Who comes later does not know how many there were before the first turn of a run that goes on.
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

    def _writes(self, group: Group) -> bool:
        """Whether it may do something to files: they are to be found on this host, as long as one here trains."""
        return not (group.is_far and self._trains_here)

    @property
    def _trains_here(self) -> bool:
        """Whether a pipeline on this host trains, and has not only just come."""
        near = (group for group in self._living() if not group.is_far)
        return any(self._term_of(group).donor is None or group.turns_published() > 0 for group in near)

    def _may_ask_here(self, turn: int) -> bool:
        """Whether a pipeline on this host may still ask for something that is done before a turn.

        One that comes with the turn does not, nor one that has told it.
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
        """Have somebody do what is asked for; on this host, if a pipeline here is to ask for it, too."""
        far = {group.number for group in self.groups.values() if group.is_far and not group.has_ended}
        for once in self._once.values():
            if once.is_awaited:
                once.choose(far if far and self._may_ask_here(once.turn) else ())

    def _note_found(self, name: tuple[str, int, int], value: Any) -> None:
        """Keep what was found for those that come later; what was before the first batch, always."""
        self._found[name] = value
        if len(self._found) > _KNOWN:
            oldest = next((known for known in self._found if known[-1] > 0), name)
            del self._found[oldest]

    def _reply(self, process: Process, request: int, value: Any) -> None:
        self._send(process.connection, "reply", request, value)

    def _let_enter(self, group: Group, rank: int, request: int, digests: list[str]) -> None:
        """All pipelines must be made alike, and those that begin together start at the same weights."""
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

    def _give_memory(self, group: Group, process: Process, request: int, name: str, size: int) -> None:
        try:
            memory = group.memory.get(name)
            if memory is None or memory.bytes < size:
                memory = group.memory[name] = Memory.create(size)
        except (MemoryError, OSError) as error:
            self._reply(process, request, {"why": str(error) or "there is not as much"})
        else:
            self._reply(process, request, {"place": place_of(memory)})

    def _hand_over(self, donor: Group, number: int, name: str, value: Any) -> None:
        """Pass on what a pipeline begins with, once: who stands in for a giver that is lost gives all of it again."""
        memory, receiver = donor.memory.pop(name, None), self.groups.get(number)
        if receiver is None or name in receiver.given or receiver.turns_published():
            return
        receiver.given[name] = memory
        for process in receiver.processes.values():
            self._send(process.connection, "handed over", name, value)

    def _find_late(self) -> None:
        """See to processes that have waited for others for as long as they may.

        What one does for all has no limit of time, and a pipeline that comes may wait for its turn meanwhile: then the
        time of the others begins with the end of that.
        """
        if any(once.is_under_way for once in self._once.values()):
            return
        for group, rank in list(self._by_connection.values()):
            process = group.processes[rank]
            if process.late is not None and time.monotonic() >= self._found_at + process.late[1]:
                (turn, waited_s), process.late = process.late, None
                self._end_late(group, process, turn, waited_s)

    def _end_late(self, group: Group, process: Process, turn: int, waited_s: float) -> None:
        """End whom a process has waited for in a turn."""
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
            why = f"{waited} step {turn}, which all have told; {process.name} was at {process.doing}"
            self._lost(group.number, None, why)
        elif not late:
            process.reported_late = turn  # the last of it may just be on its way

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

    def _remove(self, group: Group) -> None:
        if self.members.pop(group.number, None) is not None:
            self._leaving.append((group, self._term_of(group).first + group.turns_published()))

    def _term_of(self, group: Group) -> Term:
        return next(term for term in self.roster.present if term.number == group.number)

    def _living(self) -> list[Group]:
        return [self.groups[number] for number in self.members]

    def _change(self) -> None:
        """Do what is due, as soon as all have said how many turns they have begun."""
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
            joining = []  # who comes now has nothing to train on
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
            published = (turns for _, turns in self._leaving)  # none that all have told is begun by nobody
            self._begun = max([self._begun, *published, *(process.begun or 0 for process in asked)])
            self._apply(self._begun, joining)

    def _apply(self, begun: int, joining: Sequence[Group]) -> None:
        """Change the roster from the next turn on; nobody has begun turn ``begun``."""
        begins = not self.has_begun
        for group, published in self._leaving:
            self._apply_leave(group, published, begun)
        self._leaving = []
        if self._is_to_stop and self._stop is None:
            self._stop = begun
        donors = [term.pipeline for term in self.roster.present if term.first < begun]
        for group in sorted(joining, key=lambda group: group.pipeline):
            if not begins and (self._stop is not None or not donors):  # it may just have been settled
                break  # nobody is left whose state it could have, or soon
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

    def _apply_leave(self, group: Group, published: int, begun: int) -> None:
        term = self.history[group.number] = self.roster.leave(group.pipeline, published, begun)
        lost = term.end - term.published
        self._clean = max(self._clean, begun) + lost
        if lost and self.members:
            steps = "step" if lost == 1 else f"{lost} steps"
            self._say(f"pipeline {group.pipeline}: the others train on what it had of its last {steps}")
        for other in self.roster.present:
            has_state = len(self.groups[other.number].given) == self.groups[other.number].places
            has_begun = self.groups[other.number].turns_published() > 0
            if other.donor == group.pipeline and not (has_state or has_begun):
                why = f"pipeline {group.pipeline}, whose state it was to have, is gone"
                self._lost(other.number, None, OVER if group.is_done else why)
            elif lost and term.published < other.first < self._clean:
                why = f"it came too late to know what pipeline {group.pipeline} had, which is gone"
                self._lost(other.number, None, why)

    def _forget(self, begun: int) -> None:
        """Give up what nobody can ask for any more: all have gone on from a turn once all have told the next one."""
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
        with suppress(OSError, ValueError):  # it is gone, as its end will tell
            connection.send_bytes(encoded(message))


def place_of(memory: Memory) -> list[Any]:
    """Return where another process opens memory: path and bytes."""
    return [memory.path, memory.bytes]


class _Once:
    """Something that one pipeline does, and all want to know.

    Args:
        turn: the one after it.
        batches: of the loader, before it.
    """

    def __init__(self, turn: int, batches: int) -> None:
        self.turn, self.batches = turn, batches
        self._doer: int | None = None  # the number of a group
        self._value: list[Any] = []
        self._waiting: list[tuple[int, int, Callable[[int, Any], None]]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether somebody is at it."""
        return self._doer is not None and not self._value

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for it, and nobody is at it."""
        return bool(self._waiting) and self._doer is None

    def ask(self, number: int, request: int, reply: Callable[[int, Any], None]) -> None:
        """A process of a group asks: it is told, or to do it as others of its group, or waits."""
        if self._value:
            reply(request, {"value": self._value[0]})
        elif self._doer == number:
            reply(request, {})
        else:
            self._waiting.append((number, request, reply))

    def choose(self, others: Collection[int]) -> None:
        """Have one that waits do it, but for the ``others``, which go on waiting."""
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
        """Forget a group; another one has to do it, if that was at it."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != number]
        if self._doer == number and not self._value:
            self._doer = None
