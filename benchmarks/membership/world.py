"""A world of isolated pipelines without processes, sockets and clocks, around the true state machine.

Each process is a value that follows the rules of :mod:`avgpipe.fault.exchange` and
:mod:`avgpipe.fault.turn_feed`: it begins, publishes and ends steps, speaks for its host, answers freezes. Batches are
sets of samples, cut for the members of a step; what a process has trained on is a list of such sets. The
driver decides which process moves next, which message arrives, who dies, who joins.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from avgpipe.fault.group import OVER, Command, Kill, Say, Send
from avgpipe.fault.members import Members
from avgpipe.fault.roster import Roster, Term

SAMPLES = 12  # of a batch
IN_FLIGHT = 2


def shares(samples: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut samples into ``count`` parts; the last ones are empty where there are fewer."""
    sizes = [len(samples) // count + (n < len(samples) % count) for n in range(count)]
    ends = [sum(sizes[:n]) for n in range(count + 1)]
    return [tuple(samples[a:b]) for a, b in pairwise(ends)]


@dataclass
class State:
    """What a pipeline that joins begins with: the batches begun before a step, and what was trained on."""

    batches: int
    trained: list[int]


@dataclass(repr=False, eq=False)
class Process:
    """One process; others on its host may read ``published``, ``sums`` and ``summed`` after its death."""

    world: World
    group: int
    rank: int
    host: str
    pipeline: int
    alive: bool = True
    phase: str = "new"  # then: connected, entering, member, leaving, done
    roster: Roster = field(default_factory=Roster)
    epoch: int = 0
    resume: int = 0
    owed: Any = None
    frozen: bool = False
    is_broken: bool = False
    first: int = 0
    begun: int = 0
    ended: int = 0
    published: int = 0
    sums: dict[int, int] = field(default_factory=dict)
    summed: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the pipelines in these sums
    caps: dict[int, int] = field(default_factory=dict)
    capped: dict[int, int] = field(default_factory=dict)
    valid_from: list[tuple[int, int]] = field(default_factory=list)
    speaks_from: int | None = None  # the next step of its speaker; None: halted
    has_state: bool = True
    batches: int = 0
    parts: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    lost: deque[tuple[int, ...]] = field(default_factory=deque)
    queued: set[int] = field(default_factory=set)
    trained: list[int] = field(default_factory=list)
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"process {self.group}/{self.rank} of pipeline {self.pipeline} on {self.host}"

    # ---- moves -------------------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[str]:
        """The moves that it may make now."""
        if not self.alive:
            return
        if self.phase == "new":
            yield "connect"
        elif self.phase == "connected":
            yield "enter"
        elif self.phase == "member":
            if not self.has_state:
                if self._donor_state() is not None:
                    yield "receive"
                return
            if self._may_begin():
                yield "begin"
            if self._may_publish():
                yield "publish"
            if self.ended < self.begun and self._has_ended(self.ended):
                yield "end"
            if self.ended == self.begun and not self.frozen and not self._has_work():
                yield "leave"
        if self.phase in ("member", "leaving") and self.speaks_from is not None and self._may_speak():
            yield "speak"

    def move(self, name: str) -> None:
        getattr(self, f"_{name}")()

    def _connect(self) -> None:
        self.phase = "connected"
        about = {"name": f"rank {self.rank}", "pipeline": self.pipeline, "size": self.world.size}
        about |= {"period": 1, "host": self.host, "timeout_s": self.world.timeout_s}
        try:
            self.world.members.hello(self.group, self.rank, about, self.world.now)
        except ValueError:
            self.world.end(self)

    def _enter(self) -> None:
        self.phase = "entering"
        self.say("enter", 1, {"plan": "a"}, {"rank": self.rank})

    def _may_begin(self) -> bool:
        return not self.frozen and self.begun - self.ended < IN_FLIGHT and self._has_work()

    def _has_work(self) -> bool:
        lost = self.lost or any(turn < self.ended for turn in self.parts)
        if lost:
            return True
        return self.batches < self.world.batches

    def _begin(self) -> None:
        turn = self.begun
        self.begun += 1
        for term in self.roster.terms:
            if term.end <= turn and term.number not in self.queued:
                for one in range(term.published, term.end):
                    if part := self.parts.get(one, {}).pop(term.pipeline, ()):
                        self.lost.append(part)
            if term.cut_from == turn:
                for one in range(term.cut, term.published):
                    if part := self.parts.get(one, {}).pop(term.pipeline, ()):
                        self.lost.append(part)
        self.queued = {term.number for term in self.roster.terms if term.end <= turn}
        self.parts = {t: parts for t, parts in self.parts.items() if parts or t >= self.ended}
        members = self.roster.members(turn)
        self.before[turn] = self.batches
        if self.lost:
            whole = self.lost.popleft()
        elif self.batches < self.world.batches:
            whole = tuple(range(self.batches * SAMPLES, (self.batches + 1) * SAMPLES))
            self.batches += 1
        else:
            whole = ()
        self.parts[turn] = dict(zip(members, shares(whole, len(members))))

    def _may_publish(self) -> bool:
        """Whether the step before is made, which waits for the one before that, and a slot is free."""
        turn = self.first + self.published
        return turn < self.begun and self.ended >= turn - 1 and self._is_free(turn)

    def _is_free(self, turn: int) -> bool:
        """Whether all here have applied the step two before one, whose slot it gets."""
        near = [term for term in self.roster.present if term.host == self.host]
        mates = [(term.first, self.world.processes[term.number, self.rank]) for term in near]
        return all(first + one.applied >= turn - 1 for first, one in mates)

    @property
    def applied(self) -> int:
        return self.ended - self.first

    def _publish(self) -> None:
        self.published += 1

    def _check_slots(self, turn: int) -> None:
        """Fail where a slot that is read has another step by now."""
        for term in self._near(turn):
            newest = term.first + self.world.processes[term.number, self.rank].published
            assert newest <= turn + 2, f"{self} reads step {turn} of {term}, overwritten by {newest - 1}"

    def _is_whole(self, turn: int) -> bool:
        """Whether its host has what counts in a step, for its rank."""
        return self._has_sums(turn, self.rank)

    def _has_sums(self, turn: int, rank: int) -> bool:
        """Whether its host has what counts in a step, for some rank."""
        if self._is_alone(turn):
            return self._all_near_published(turn)
        return self._whole_here(turn, rank) is not None

    def _has_ended(self, turn: int) -> bool:
        if self._is_alone(turn):
            return self._all_near_published(turn)
        # A sum of the next epoch must not complete one of this epoch.
        return not self.is_broken and all(self._has_sums(turn, r) for r in range(self.world.size))

    def _end(self) -> None:
        turn = self.ended
        if self._is_alone(turn):
            self._check_slots(turn)
            counting = tuple(term.pipeline for term in self._near(turn))
        else:
            memory = self._whole_here(turn, self.rank)
            assert memory is not None
            counting = memory.summed[turn]
        parts = self.parts[turn]
        for i in counting:
            self.trained += parts.pop(i, ())
        if not any(parts.values()):
            del self.parts[turn]
        self.counted[turn] = counting
        self.ended += 1
        self.before = {t: batches for t, batches in self.before.items() if t >= self.ended}

    def _leave(self) -> None:
        self.phase = "leaving"
        self.say("leave", self.begun, self.published)

    def _donor_state(self) -> State | None:
        own = next(t for t in self.roster.terms if t.number == self.group)
        for term in self.roster.present:
            if term.pipeline == own.donor and term.first < own.first:
                donor = self.world.processes.get((term.number, self.rank))
                if donor is not None and donor.alive and donor.ended == own.first and donor.begun > own.first:
                    return State(donor.before[own.first], list(donor.trained))
        return None

    def _receive(self) -> None:
        state = self._donor_state()
        assert state is not None
        self.batches, self.trained = state.batches, list(state.trained)
        self.has_state = True
        self.say("has state")

    # ---- its host ----------------------------------------------------------------------------------------------------

    def _near(self, turn: int) -> list[Term]:
        return [term for term in self.roster.counting(turn).values() if term.host == self.host]

    def _published_by(self, number: int) -> int:
        ranks = [self.world.processes[number, rank].published for rank in range(self.world.size)]
        return min([*ranks, self.caps.get(number, min(ranks))])

    def _all_near_published(self, turn: int) -> bool:
        return all(turn < term.first + self._published_by(term.number) for term in self._near(turn))

    def _is_alone(self, turn: int) -> bool:
        return len({term.host for term in self.roster.counting(turn).values()}) <= 1

    def _whole_here(self, turn: int, rank: int) -> Process | None:
        """Return a process whose memory has the sums of a step whole."""
        valid = max((epoch for first, epoch in self.valid_from if first <= turn), default=0)
        for (number, its), one in self.world.processes.items():
            is_here = its == rank and one.host == self.host
            if is_here and turn < self.capped.get(number, turn + 1) and one.sums.get(turn, -1) >= valid:
                return one
        return None

    # ---- sums over hosts ---------------------------------------------------------------------------------------------

    def _speakers(self, turn: int) -> dict[str, Term] | None:
        speakers = self.roster.speakers(turn)
        own = speakers.get(self.host)
        return speakers if own is not None and own.number == self.group and len(speakers) > 1 else None

    def _may_speak(self) -> bool:
        turn = self.speaks_from
        assert turn is not None
        if self.owed is not None and self.host in self.owed[1]:
            source = [one for one in self.world.on(self.owed[0], self.rank) if one.epoch == self.epoch]
            return bool(source)
        if not (turn < self.first + self.published and self._all_near_published(turn)):
            return False
        whole = turn <= self.ended or all(self._has_sums(turn - 1, r) for r in range(self.world.size))
        if not whole or not self._is_free(turn):
            return False
        speakers = self._speakers(turn)
        if speakers is None:
            return True
        key = turn, self.epoch, tuple((host, term.number) for host, term in speakers.items())
        self.world.arrived.setdefault((self.rank, key), set()).add(self.host)
        return self.world.arrived[self.rank, key] == set(speakers)

    def _speak(self) -> None:
        turn = self.speaks_from
        assert turn is not None
        if self.owed is not None and self.host in self.owed[1]:
            donors = (one for one in self.world.on(self.owed[0], self.rank) if one.epoch == self.epoch)
            holder = next(donors)._whole_here(self.resume - 1, self.rank)  # perhaps a lost one's memory
            assert holder is not None, f"{self} is owed step {self.resume - 1}, which {self.owed[0]} lacks"
            given = holder.summed[self.resume - 1]
            self.sums[self.resume - 1], self.summed[self.resume - 1] = self.epoch, given
            self.owed = None
            return
        if self._speakers(turn) is not None:
            self._check_slots(turn)
            self.sums[turn], self.summed[turn] = self.epoch, tuple(self.roster.counting(turn))
            self.sums.pop(turn - 2, None)
        self.speaks_from = turn + 1

    # ---- messages ----------------------------------------------------------------------------------------------------

    def say(self, kind: str, *values: Any) -> None:
        self.world.up[self.group, self.rank].append(json.loads(json.dumps([kind, *values])))

    def report(self) -> None:
        if self.alive and self.phase not in ("new", "done"):
            self.say("alive", self.phase, self.batches, self.begun, self.ended, self.published)

    def hear(self, kind: str, *values: Any) -> None:
        if kind == "freeze":
            self._freeze(*values)
        elif kind == "roster":
            self._take(*values)
        elif kind == "report":
            self.report()
        elif kind == "released":
            self.phase = "done"
            self.world.finish(self)

    def _freeze(self, number: int, lost: Sequence[int], breaks: bool) -> None:
        self.frozen = True
        if breaks:
            self.speaks_from, self.is_broken = None, True
        near = {n for (n, _), one in self.world.processes.items() if one.host == self.host}
        for other in lost:
            if other in near and other not in self.caps:
                turn = self.ended
                one = self.world.processes[other, self.rank]
                while one.sums.get(turn, -1) >= max((e for f, e in self.valid_from if f <= turn), default=0):
                    turn += 1
                self.capped[other] = turn
                self.caps[other] = self._published_by(other)
        whole = self.ended
        while self._is_whole(whole):
            whole += 1
        seen = {n: self.caps[n] for n in lost if n in self.caps}
        self.say("begun", number, self.begun, self.batches, whole, seen)

    def _take(
        self,
        terms: Any,
        facts: Any,
        since: int,
        epoch: int,
        resume: int,
        owed: Mapping[str, Any],
        stop: int | None,
    ) -> None:
        was_member = any(term.number == self.group for term in self.roster.terms)
        self.roster = self.roster.changed(terms, since)
        self.frozen = self.is_broken = False
        own = next((term for term in self.roster.terms if term.number == self.group), None)
        if own is not None and not was_member:
            self.phase, self.first = "member", own.first
            self.begun = self.ended = own.first
            self.has_state = own.donor is None
            self.queued = {term.number for term in self.roster.terms if term.end <= own.first}
        if epoch != self.epoch or not was_member:
            self.epoch, self.resume = epoch, resume
            self.valid_from.append((resume, epoch))
            self.owed = owed.get(str(self.rank))
            self.speaks_from = None
        ended = {term.number for term in self.roster.terms if term.has_ended}
        for caps in (self.caps, self.capped):
            for number in caps.keys() & ended:
                del caps[number]
        if self.speaks_from is None and len({t.host for t in self.roster.terms if not t.was_lost}) > 1:
            speakers = self._speakers(self.resume)
            if speakers is None or self.owed is None:
                self.owed = None
            self.speaks_from = max(self.resume, self.first, self.ended)


class World:
    """Pipelines of ``size`` ranks that train on ``batches`` batches.

    Attributes:
        arrived: by rank and sum, the hosts that have come to it.
    """

    def __init__(self, wanted: int, size: int, batches: int, timeout_s: float = 10.0) -> None:
        self.members = Members(wanted, "host 0")
        self.size, self.batches, self.timeout_s = size, batches, timeout_s
        self.now = 0.0
        self.processes: dict[tuple[int, int], Process] = {}
        self.up: dict[tuple[int, int], deque[Any]] = {}
        self.down: dict[tuple[int, int], deque[Any]] = {}
        self.arrived: dict[Any, set[str]] = {}
        self.kills: list[Kill] = []
        self.said: list[str] = []
        self.messages = 0
        self._started = 0
        self._ending: set[int] = set()  # groups whose processes have all ended, not reported yet

    def start(self, pipeline: int, host: str) -> int:
        number, self._started = self._started, self._started + 1
        self.members.started(number, self.now)
        for rank in range(self.size):
            place = number, rank
            self.processes[place] = Process(self, number, rank, host, pipeline)
            self.up[place], self.down[place] = deque(), deque()
        return number

    def on(self, host: str, rank: int) -> list[Process]:
        return [
            one for (_, its), one in self.processes.items() if its == rank and one.host == host and one.alive
        ]

    def living(self) -> set[int]:
        return {number for (number, _), one in self.processes.items() if one.alive}

    # ---- events ------------------------------------------------------------------------------------------------------

    def arrives(self, place: tuple[int, int]) -> None:
        """The next message of a process reaches the state machine."""
        kind, *values = self.up[place].popleft()
        self.messages += 1
        if kind == "closed":
            self.do(self.members.closed(*place, self.now))
        elif place[0] in self.members.groups:
            self.do(self.members.receive(*place, kind, values, self.now))

    def hears(self, place: tuple[int, int]) -> None:
        """The next message of the state machine reaches a process."""
        message = self.down[place].popleft()
        self.messages += 1
        if self.processes[place].alive:
            self.processes[place].hear(*json.loads(json.dumps(message)))

    def tick(self) -> None:
        self.do(self.members.tick(self.now))

    def end(self, process: Process) -> None:
        """A process dies; what it had sent arrives before that is known."""
        process.alive = False
        self.up[process.group, process.rank].append(["closed"])
        self._note_gone(process.group)

    def finish(self, process: Process) -> None:
        process.alive = False
        self._note_gone(process.group)

    def _note_gone(self, number: int) -> None:
        if number not in self.living():
            self._ending.add(number)

    def notice(self) -> None:
        """The launcher notes which groups have ended; it starts them again before the run begins, and ends it."""
        broken = {one.group for one in self.processes.values() if not one.alive and one.phase != "done"}
        for number in broken & self.living():  # it ends what was started together
            self.do(self.members.lose(number, None, "a process has ended", self.now))
        ending, self._ending = sorted(self._ending), set()
        for number in ending:
            self.do(self.members.gone(number, self.now))
            first = self.processes[number, 0]
            there = {one.pipeline for one in self.processes.values() if one.alive}
            if not self.members.has_begun and first.phase != "done" and first.pipeline not in there:
                self.start(first.pipeline, first.host)
        if self.members.has_begun and not self.members.training:
            for number in self.living():
                self.do(self.members.lose(number, None, OVER, self.now))

    def do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self.down[command.group, command.rank].append(command.message)
            elif isinstance(command, Say):
                self.said.append(command.line)
            else:
                self.kills.append(command)
                for rank in range(self.size):
                    self.processes[command.group, rank].alive = False
                self._note_gone(command.group)

    # ---- a fair end --------------------------------------------------------------------------------------------------

    def run_on(self, limit: int = 100_000) -> None:
        """Let all that can happen happen, in turn, until nothing does any more; time passes when nothing else can."""
        idle = 0
        for _ in range(limit):
            self.notice()
            if not self.living() or idle > 40:
                return
            happened = False
            for place in list(self.processes):
                while self.up[place]:
                    self.arrives(place)
                    happened = True
                while self.down[place]:
                    self.hears(place)
                    happened = True
            for process in list(self.processes.values()):
                for name in list(process.moves()):
                    if name in process.moves():
                        process.move(name)
                        happened = True
            self.tick()
            idle = 0 if happened else idle + 1
            if not happened:
                self.now += 1.0
                for process in self.processes.values():
                    process.report()
