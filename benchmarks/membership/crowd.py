"""A thousand hosts around the true state machine of membership, in simulated seconds.

`world.py` follows every move of a few processes; here the steps of all hosts are one clock, as no step ends before the
sums of all hosts are whole. A host is one pipeline of one process. It computes a step for one ``step_s``, one step
ahead of the sums; messages take drawn times, in order; the sum of a step reaches each host after a time of its own.
Hosts are killed, stopped, or cut off, several together, and start again. What must hold is checked all the way, by
`Broken`.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from avgpipe.fault.door import encoded
from avgpipe.fault.group import Command, Kill, Send
from avgpipe.fault.members import Members
from avgpipe.fault.roster import Roster
from benchmarks.membership.served import FACTS

IN_FLIGHT = 2
_SLOTS = 16  # a second, in which hosts report one after the other
_SUM = 0.2  # of a step, in which its sum goes from host to host
_LAG_S = 0.05  # at most, from the first to the last host that has a sum


class Broken(AssertionError):
    """A promise of the membership was broken."""


@dataclass(frozen=True)
class Setting:
    """What is drawn; seconds.

    Attributes:
        fault_s: the mean time between two faults.
        again_s: from the end of a host's process to the next one's start, at least and at most.
        alive_s: between two reports of a host.
        latency_s: of a message, the median; one in a thousand takes a hundred times as long.
        cut_s: the mean time for which hosts are cut off.
        cut_hosts: how many of them at most.
    """

    hosts: int
    minutes: float
    step_s: float = 1.0
    timeout_s: float = 30.0
    fault_s: float = 60.0
    again_s: tuple[float, float] = (10.0, 110.0)
    alive_s: float = 1.0
    latency_s: float = 0.001
    cut_s: float = 20.0
    cut_hosts: int = 8
    seed: int = 0


@dataclass(slots=True, eq=False)
class Host:
    """A host and its pipeline; ``begun`` and ``ended`` as far as they were looked at.

    Attributes:
        lag_s: after which a sum is here, from the first host that has it.
        ahead: in which part of a step it is faster than the slowest.
        missed: the step whose sum others have, and this one has not got because it broke.
        said_at, heard_at: when its last message arrives, and the last one to it.
    """

    pipeline: int
    name: str
    lag_s: float
    ahead: float
    group: int = -1
    phase: str = "off"  # then: starting, entering, member, leaving, off
    first: int = 0
    begun: int = 0
    ended: int = 0
    published: int = 0
    is_frozen: bool = False
    is_halted: bool = False
    has_state: bool = True
    is_stopped: bool = False
    hangs: bool = False
    cut_until: float = 0.0
    missed: int = -1
    said_at: float = 0.0
    heard_at: float = 0.0
    answered: int = 0
    version: int = -1
    lost_at: float | None = None
    lost_by: str = ""

    @property
    def runs(self) -> bool:
        return self.phase != "off" and not self.is_stopped

    @property
    def trains(self) -> bool:
        return self.phase == "member" and not self.is_stopped


@dataclass
class Seen:
    """What was counted, and seconds from a fault to the roster without the lost ones, by its kind.

    Attributes:
        events: of the state machine.
        retrained: shares of steps that others trained on.
        innocent: pipelines that were ended although they ran.
        waits: the most steps for which one that joined waited for its first.
        pauses_s: seconds between two steps, where they are twice the usual.
    """

    events: int = 0
    rosters: int = 0
    joins: int = 0
    steps: int = 0
    retrained: int = 0
    innocent: int = 0
    waits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    roster_s: dict[str, list[float]] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    message_bytes: Counter[str] = field(default_factory=Counter)


class Crowd:
    """Runs `Setting`; ``tape``, if given, gets all events of the state machine as its methods and arguments."""

    def __init__(self, setting: Setting, tape: list[Any] | None = None) -> None:
        self.setting, self.random, self.tape = setting, random.Random(setting.seed), tape
        draw = self.random.uniform
        self.members = Members(setting.hosts, "host 0")
        self.hosts = [Host(i, f"host {i}", draw(0, _LAG_S), draw(0, 0.3)) for i in range(setting.hosts)]
        self.at: dict[int, Host] = {}  # by group
        self.seen = Seen()
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._started = 0
        self._sizes: dict[str, int] = {}
        # Steps: whole at all hosts or about to be, when the last of them was; to be trained on.
        self.done, self._done_at, self._plan, self._planned = 0, 0.0, 0, -1
        self._counted = 0  # of them, those whose samples were counted
        # Of the last step that was counted, how many shares were lost; as of the others, until the next of these.
        self._lost: int | None = None
        self._changes = set[int]()
        self.left = round(setting.minutes * 60 / setting.step_s)
        self._next_at = 0.0  # when the next step ends, if all goes well
        self._freezes = 0
        self._is_over = False
        self.roster, self.version, self._epoch = Roster(), 0, 0
        self._halted: set[Host] = set()
        self._frozen: set[Host] = set()
        self._faults_end = setting.minutes * 60 - 5 * setting.timeout_s
        self._ends_well: list[int] = []

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Seen:
        """Run to the end of the run."""
        for host in self.hosts:
            self._start(host)
        self._in(self.random.expovariate(1 / self.setting.fault_s) + 60, self._fault)
        for slot in range(round(_SLOTS * self.setting.alive_s)):
            self._in(slot / _SLOTS, self._report, slot)
        limit = self.setting.minutes * 60 * 3 + 3600
        while not self._is_over:
            self.now, _, event, values = heapq.heappop(self._queue)
            if self.now > limit:
                raise Broken(
                    f"the run has not ended after {self.now:.0f} s; {self.done} steps, {self.left} left"
                )
            event(*values)
        self._count(self.done)
        self._check(
            self.left == 0 and bool(self._ends_well),
            "a run has ended, and samples are left",
            self.left,
        )
        for number in self._ends_well:
            self._check(
                self.members.is_done(number) is True, "one that has trained to the end is not done", number
            )
        return self.seen

    def _in(self, seconds: float, event: Callable[..., None], *values: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), event, values))

    def _latency(self) -> float:
        seconds = self.setting.latency_s * self.random.lognormvariate(0, 0.5)
        return seconds * 100 if self.random.random() < 0.001 else seconds

    def _check(self, holds: bool, promise: str, *facts: Any) -> None:
        if not holds:
            raise Broken(f"at {self.now:.3f} s: {promise}: {', '.join(map(str, facts))}")

    # ---- between hosts and the state machine -------------------------------------------------------------------------

    def _tell(self, method: str, *values: Any) -> None:
        """Pass an event to the state machine, and carry out its commands."""
        self.seen.events += 1
        if self.tape is not None:
            self.tape.append((method, values, self.now))
        commands = getattr(self.members, method)(*values, self.now)
        if commands:
            self._do(commands)

    def _say(self, host: Host, kind: str, *values: Any) -> None:
        """A host sends a message."""
        if host.is_stopped:
            return
        arrives = max(self.now, host.cut_until) + self._latency()
        host.said_at = max(host.said_at, arrives)
        self._in(host.said_at - self.now, self._arrives, host.group, kind, values)

    def _arrives(self, number: int, kind: str, values: Sequence[Any]) -> None:
        if number in self.members.groups and number in self.at:
            self._note_message("in", [kind, *values])
            self._tell("receive", number, 0, kind, values)

    def _note_message(self, way: str, message: Sequence[Any]) -> None:
        """Count a message; of small ones of a kind, the first one is measured."""
        kind = message[0]
        size = self._sizes.get(kind)
        if size is None:
            size = self._sizes[kind] = len(encoded(message)) + 4
        self.seen.messages[way] += 1
        self.seen.message_bytes[way] += size

    def _do(self, commands: Sequence[Command]) -> None:
        last = None
        for command in commands:
            if isinstance(command, Send):
                if command.message is not last and command.message[0] != "heard":
                    last = command.message
                    self._sizes[last[0]] = len(encoded(last)) + 4
                    if last[0] == "roster":
                        self._note_roster(last)
                    elif last[0] == "freeze":
                        self._freezes = last[1]
                self._note_message("out", command.message)
                if command.message[0] != "heard":
                    self._send(self.at[command.group], command.message)
            elif isinstance(command, Kill):
                self._kill(command)

    def _send(self, host: Host, message: Sequence[Any]) -> None:
        if host.is_stopped or host.phase == "off":
            return
        host.heard_at = max(host.heard_at, max(self.now, host.cut_until) + self._latency())
        self._in(host.heard_at - self.now, self._hears, host, host.group, message, self.version)

    def _hears(self, host: Host, number: int, message: Sequence[Any], version: int) -> None:
        if host.group != number or not host.runs:
            return
        kind, *values = message
        if kind == "freeze":
            self._freeze(host, *values)
        elif kind == "roster":
            self._take(host, version, *values)
        elif kind == "report" and host.phase == "member":
            self._say(host, "alive", *self._position(host))
        elif kind == "released":
            self._ends_well.append(number)
            self._end(host, again=False)

    def _report(self, slot: int) -> None:
        """The hosts of a slot report, and the state machine looks at the time."""
        receive, now, n = self.members.receive, self.now, 0
        for host in self.hosts[slot :: round(_SLOTS * self.setting.alive_s)]:
            if host.phase in ("off", "starting") or host.is_stopped:
                continue
            position = self._position(host)
            if host.said_at > now or host.cut_until > now:
                self._say(host, "alive", *position)
            elif self.tape is not None:
                self._arrives(host.group, "alive", position)
            elif host.group in self.members.groups:
                n += 1
                commands = receive(host.group, 0, "alive", position, now)
                if len(commands) > 1:  # beside the answer
                    self._do(commands[1:])
        self.seen.events += n
        self.seen.messages["alive"] += n
        self._tell("tick")
        self._in(self.setting.alive_s, self._report, slot)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _position(self, host: Host) -> tuple[str, int, int, int, int]:
        """Look at the steps of a host: what it does, batches, begun, ended, published since it joined."""
        if host.phase == "member" and host.has_state and not host.is_halted:
            passed = self.now - self._done_at
            has_last = passed >= host.lag_s and host.missed != self.done
            host.ended = max(host.ended, self.done if has_last else self.done - 1)
            steps = passed / self.setting.step_s + host.ahead + _SUM
            published = self.done + (int(steps >= 1) + int(steps >= 2) if has_last else 0)
            if host.hangs:
                published = host.published
            most = self.done + self.left - (self.done - self._counted)
            begun = min(published + 1, host.ended + IN_FLIGHT, most)
            if not host.is_frozen and not host.hangs:
                host.begun = max(host.begun, begun)
            host.published = max(host.published, min(published, host.begun))
        return "a batch", host.begun, host.begun, host.ended, max(host.published - host.first, 0)

    def _members_of(self, step: int) -> list[Host]:
        return [self.hosts[i] for i in self.roster.counting(step)]

    def _look_ahead(self) -> None:
        """Plan the end of the next step, where all take part in it."""
        self._plan += 1
        most = self.done + self.left - (self.done - self._counted)
        if self.done >= most or self._halted or any(h.begun <= self.done for h in self._frozen):
            return
        for term in self.roster.terms:
            if term.first <= self.done < term.published and not term.was_lost:
                host = self.hosts[term.pipeline]
                takes_part = (
                    host.group == term.number and host.runs and host.has_state and host.phase == "member"
                )
                hangs = host.hangs and host.published <= self.done
                if not takes_part or hangs or host.cut_until > self.now:
                    return
        step_s = self.setting.step_s * self.random.uniform(0.95, 1.1)
        self._planned = self._plan
        self._next_at = at = max(self._done_at + step_s, self.now + _SUM * step_s)
        self._in(at - self.now, self._end_step, self._plan)

    def _end_step(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._whole()
        self._look_ahead()
        if self.left <= self.done - self._counted:
            for host in self.hosts:
                if host.phase == "member":
                    self._in(host.lag_s, self._may_leave, host, host.group)

    def _whole(self) -> None:
        """The sum of the next step is whole."""
        pause_s = self.now - self._done_at
        if pause_s > 2 * self.setting.step_s and self.done:
            self.seen.pauses_s.append(pause_s)
        self._count(self.done)
        self.done, self._done_at = self.done + 1, self.now
        self.seen.steps += 1
        self._in(self.setting.timeout_s, self._late, self.done)
        for term in self.roster.joining(self.done):
            self._give_state(self.hosts[term.pipeline], term.number)

    def _count(self, steps: int) -> None:
        """Count the samples of steps that have ended for good: trained on, or left to the others."""
        for step in range(self._counted, steps):
            if self._lost is None or step in self._changes:
                counting, all_members = set(self.roster.counting(step)), self.roster.members(step)
                ended = {t.pipeline for t in self.roster.terms if t.published <= step < t.end}
                self._check(
                    counting | ended == set(all_members),
                    "a step has samples of a pipeline that is not named",
                    step,
                )
                self._lost = lost = len(all_members) - len(counting)
                self._check(
                    bool(counting) and lost == len(ended), "a share counts twice", step, counting & ended
                )
            self.left += self._lost - 1
            self.seen.retrained += self._lost
            self._counted = step + 1

    def _late(self, step: int) -> None:
        """All that wait for a step for longer than the timeout report it."""
        if self.done != step or not self.members.training:
            return
        for host in self.hosts:
            waits = host.trains and not (host.is_frozen or host.hangs) and host.has_state
            if waits and self._position(host)[3] == step < host.begun:
                self._say(host, "late", step, self.setting.timeout_s)
        self._in(self.setting.timeout_s, self._late, step)
        self._check(
            self.now - self._done_at < 5 * self.setting.timeout_s + self.setting.cut_s * 10,
            "one that has ended is waited for",
            step,
        )

    def _may_leave(self, host: Host, number: int) -> None:
        is_idle = host.group == number and host.trains and not (host.is_frozen or host.hangs)
        if is_idle and self.left <= self.done - self._counted and self._position(host)[3] == host.begun:
            host.phase = "leaving"
            self._say(host, "leave", host.begun, self._position(host)[4])

    # ---- changes -----------------------------------------------------------------------------------------------------

    def _freeze(self, host: Host, number: int, lost: Sequence[int], breaks: bool) -> None:
        self._position(host)
        host.is_frozen, host.answered = True, number
        self._frozen.add(host)
        if breaks and not host.is_halted:
            host.is_halted = True
            self._halted.add(host)
            self._plan += 1
        self._say(host, "begun", number, host.begun, host.begun, host.ended, {})

    def _note_roster(self, message: Sequence[Any]) -> None:
        """Check a roster when it is made, by what all hosts have done."""
        _, terms, _, since, epoch, resume, owed, _ = message
        before, self.version = self.roster, self.version + 1
        self.roster = before.changed(terms, since)
        self._check(self.roster.terms == self.members.roster.terms, "hosts have another roster", self.version)
        self._lost = None
        self._changes = {n for t in self.roster.terms for n in (t.first, t.published, t.cut, t.end)}
        self.seen.rosters += 1
        was = {term.number: term for term in before.terms}
        changed = [term for term in self.roster.terms if was.get(term.number) != term]
        present = {term.number for term in self.roster.present}
        living = [h for h in self.hosts if h.group in present and h.phase == "member" and h.group in was]
        for host in living:
            has_answered = host.is_frozen and host.answered == self._freezes
            self._check(has_answered, "a roster before an answer", host.name, host.answered, self._freezes)
        steps = [host for host in living if host.begun > host.first or not host.first]
        lowest = min((host.ended for host in steps), default=0)
        begun = max((host.begun for host in steps), default=0)
        for term in changed:
            decided = term.end if term.has_ended else term.first
            if term.number in was and not term.has_ended:  # another donor
                decided = begun
            self._check(decided >= begun, "a change of a step that one has begun", term, begun)
            self._note_change(term)
        is_new = epoch != self._epoch
        self._epoch = epoch
        if is_new:
            ended = max((h.ended for h in living if h.ended > h.first), default=0)
            self._check(ended <= resume <= self.done, "a lost sum was applied", ended, resume, self.done)
            lacking = {h.name for h in living if h.ended < resume and h.first < resume}
            source, given = owed.get(0, ["", []])
            self._check(lacking <= set(given), "a sum is owed, and not given", lacking, owed)
            have = {h.name for h in living if h.ended >= resume > h.first}
            self._check(not lacking or source in have, "a sum is owed by one that has it not", owed)
            self.done, self._done_at = resume, min(self._done_at, self.now)
        for step in range(lowest, max((host.ended for host in steps), default=0)):
            same = list(before.counting(step)) == list(self.roster.counting(step))
            self._check(same, "an ended step counts others now", step)

    def _note_change(self, term: Any) -> None:
        host = self.hosts[term.pipeline]
        if not term.has_ended and term.donor is not None:
            donors = [t for t in self.roster.present if t.pipeline == term.donor]
            self._check(bool(donors) and donors[0].first < term.first, "no donor has the state", term)
            self.seen.joins += host.version < 0
            self.seen.waits = max(self.seen.waits, term.first - self.done)
        if term.was_lost and host.group == term.number and host.lost_at is not None:
            self.seen.roster_s.setdefault(host.lost_by, []).append(self.now - host.lost_at)

    def _take(
        self,
        host: Host,
        version: int,
        terms: Any,
        facts: Any,
        since: int,
        epoch: int,
        resume: int,
        owed: Any,
        stop: Any,
    ) -> None:
        joins = host.phase == "entering"
        self._check(joins or host.is_frozen, "a roster without a freeze", host.name)
        host.is_frozen = host.is_halted = False
        self._frozen.discard(host)
        self._halted.discard(host)
        host.version = version
        if joins:
            term = next(term for term in self.roster.terms if term.number == host.group)
            host.phase, host.first = "member", term.first
            host.begun = host.ended = host.published = term.first
            host.has_state = term.donor is None
        elif host.ended < resume:
            host.ended = max(host.ended, resume)
        host.missed = -1
        if not host.has_state and self.done >= host.first:
            self._give_state(host, host.group)
        if not self._frozen:
            self._look_ahead()
        self._may_leave(host, host.group)

    def _give_state(self, host: Host, number: int) -> None:
        """The donor of a host sends the state of the first step's beginning."""
        if host.group == number and host.phase == "member" and not host.has_state:
            term = next(term for term in self.roster.terms if term.number == number)
            donor = next(self.hosts[t.pipeline] for t in self.roster.present if t.pipeline == term.donor)
            self._check(
                self.done == term.first, "a donor is past the state that it is to give", term, self.done
            )
            self._in(self.random.uniform(0.2, 2), self._has_state, host, number, donor, donor.group)

    def _has_state(self, host: Host, number: int, donor: Host, its: int) -> None:
        is_there = host.group == number and host.trains
        if not is_there or host.has_state or donor.group != its or not donor.runs:
            return
        self._check(self.done == host.first, "a joiner begins with another state", host.name)
        host.has_state = True
        self._say(host, "has state")
        self._look_ahead()

    # ---- losses and joins --------------------------------------------------------------------------------------------

    def _start(self, host: Host) -> None:
        number, self._started = self._started, self._started + 1
        host.group, host.phase, host.version = number, "starting", -1
        host.is_frozen = host.is_halted = host.is_stopped = host.hangs = False
        host.said_at = host.heard_at = self.now
        host.lost_at, host.missed, host.begun, host.ended, host.published, host.first = None, -1, 0, 0, 0, 0
        self.at[number] = host
        self.members.started(number, self.now)
        if self.tape is not None:
            self.tape.append(("started", (number,), self.now))
        self._in(self.random.uniform(4, 8), self._connect, host, number)

    def _connect(self, host: Host, number: int) -> None:
        if host.group != number or not host.runs:
            return
        about = {"name": f"pipeline {host.pipeline}", "pipeline": host.pipeline, "size": 1, "period": 1}
        about |= {"host": host.name, "timeout_s": self.setting.timeout_s}
        if self.tape is not None:
            self.tape.append(("hello", (number, 0, about), self.now))
        self.members.hello(number, 0, about, self.now)
        host.phase = "entering"
        self._say(host, "enter", 1, {"plan": "a"}, FACTS)

    def _end(self, host: Host, again: bool = True) -> None:
        """The process of a host ends; the state machine hears of it by its connection, and later by its launcher."""
        number, host.phase = host.group, "off"
        for those in (self._frozen, self._halted):
            those.discard(host)
        closed_s = max(host.cut_until - self.now, 0.0) + self._latency()
        self._in(max(closed_s, host.said_at - self.now), self._tell, "closed", number, 0)
        self._in(closed_s + self.random.uniform(0.1, 1), self._tell, "gone", number)
        if again and self.left > 0:
            self._in(self.random.uniform(*self.setting.again_s), self._start_again, host, number)
        self._is_over = not any(h.phase in ("member", "leaving") for h in self.hosts)

    def _start_again(self, host: Host, number: int) -> None:
        if host.cut_until > self.now:
            self._in(host.cut_until - self.now, self._start_again, host, number)
        elif host.group == number and self.left > 0:
            self._start(host)

    def _kill(self, command: Kill) -> None:
        host = self.at[command.group]
        if host.group != command.group:
            return
        self._check(bool(command.why) or host.phase == "off", "a kill without a reason", host.name)
        if host.phase != "off":
            self.seen.reasons[re.sub(r"\d+", "N", command.why)[:80]] += 1
            self.seen.innocent += host.lost_at is None
            self._end(host)

    def _fault(self) -> None:
        """Something happens to some hosts."""
        if self.now > self._faults_end:
            return
        self._in(self.random.expovariate(1 / self.setting.fault_s), self._fault)
        able = [host for host in self.hosts if host.trains and host.lost_at is None]
        if len(able) < max(2, len(self.hosts) // 2):  # a run of which all are lost is lost, and that is all
            return
        kind = self.random.choices(("killed", "stopped", "hung", "cut"), (60, 15, 10, 15))[0]
        if kind == "cut":
            seconds = self.random.expovariate(1 / self.setting.cut_s)
            begin, some = self.random.randrange(len(able)), self.random.randint(1, self.setting.cut_hosts)
            chosen = [host for host in able[begin : begin + some] if host.pipeline]  # not the launcher's
            for host in chosen:
                self._cut(host, seconds)
        else:
            chosen = [self.random.choice(able)]
        for host in chosen:
            host.lost_at, host.lost_by = self.now, kind
            self.seen.faults[kind] += 1
            if kind == "stopped":
                host.is_stopped = True
                self._plan += 1
            elif kind == "hung":
                self._position(host)
                host.hangs, self._plan = True, self._plan + 1
                self._look_ahead()
            elif kind == "killed":
                self._interrupt(host)

    def _cut(self, host: Host, seconds: float) -> None:
        self._position(host)
        if self.now < self._done_at + host.lag_s:
            host.missed = self.done
        host.cut_until = self.now + seconds
        self._plan += 1
        self._in(seconds, self._heal, host, host.group)

    def _heal(self, host: Host, number: int) -> None:
        if host.group == number and host.trains:
            host.lost_at, host.missed = None, -1
            self._look_ahead()

    def _interrupt(self, host: Host) -> None:
        """A process is killed; if that is in the midst of a sum, some hosts may have it whole, and others not."""
        sums = self.now > self._next_at - _SUM * self.setting.step_s and self._plan == self._planned
        self._plan += 1
        self._end(host)
        others = [one for one in self.hosts if one.trains and one.first <= self.done]
        if sums and self.random.random() < 0.5 and len(others) > 1 and not self.roster.joining(self.done + 1):
            for one in others:
                self._position(one)
            self._whole()
            for one in self.random.sample(others, self.random.randrange(1, len(others))):
                one.missed = self.done
        for one in others:
            self._in(self.random.uniform(0, 0.1), self._breaks, one, one.group, self._epoch)

    def _breaks(self, host: Host, number: int, epoch: int) -> None:
        """The sum that a host takes part in fails, as a connection to another one is closed."""
        if host.group == number and host.trains and not host.is_halted and epoch == self._epoch:
            self._say(host, "broken", epoch)
