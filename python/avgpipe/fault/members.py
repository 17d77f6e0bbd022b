"""The members of a run of isolated pipelines: a state machine without input or output.

Events and the time go in, commands come out; there is no socket, clock or process in it. A pipeline is a member
with all its processes or not at all. When one is lost or leaves, or another one wants to join, all processes
are asked to begin no further step (``freeze``) and to report how far they are; the change then takes effect
with a step that no process has begun::

    members     freeze ->            <- begun 7, 8, 7            roster: ... from step 8 on ->
    process     begins no step, continues those already begun               begins step 8 by the new roster

Where pipelines of several hosts sum their updates together, a loss breaks the sum that is under way. Each
process then reports, with its steps begun, the steps whose sums its host has *whole*. A sum counts if for
every rank some host has it whole: hosts that lack it get it from there. Otherwise no process has applied it, since a
process applies a step only when its host has the sums of all ranks; it is made again, by those that are left,
in another *epoch*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from avgpipe.fault import judgement
from avgpipe.fault.group import OVER, REFUSED, WEIGHTS, Answer, Command, Freeze, Group, Kill, Process, Say
from avgpipe.fault.roster import Roster, Term

_JUDGE_S = 1.5  # after a process is late, for the others to report how far they are
_BLAME_S = 2.0  # after a sum has failed, for the host that is to blame to be lost; after one has left, for the others
_TRIES = 3  # epochs without a whole sum, until those that cannot sum are lost
_NEVER = float("inf")
_HEARD = ("heard",)
_LEFT = "it has left before the end of a step, and the others go on"


class Members:
    """Decides which pipelines train together, and from which step on.

    Each event returns the commands that follow from it.

    Args:
        wanted: how many pipelines begin the run together.
        home: the host of the launcher; one that cannot reach it is lost, not the launcher's.

    Attributes:
        groups: by number; one that has ended stays as long as a roster has its term.
        members: the pipelines of groups that are members, by the number of the group.
        history: all terms by number, as far as they are known.
        timeout_s: after such a silence a process counts as lost.
        reached: the most steps that any process has begun.
        epoch: how often sums over hosts were begun again.
    """

    def __init__(self, wanted: int, home: str = "") -> None:
        self.wanted, self._home = wanted, home
        self.roster, self.history = Roster(), dict[int, Term]()
        self.groups: dict[int, Group] = {}
        self.members: dict[int, int] = {}
        self.timeout_s = _NEVER
        self.reached = self.epoch = 0
        self._out: list[Command] = []
        self._started: dict[int, float] = {}  # groups that have not entered, and when they were started
        self._freezes = 0
        self._frozen: Freeze | None = None
        self._unanswered: set[Process] = set()  # that have been asked
        self._has_news = False  # since the last look for changes; there are many more messages than changes
        self._leavers: dict[int, Group] = {}  # members that want to leave
        # The step on which a process timed out, the timeout in seconds, and when it said so.
        self._late_ones: dict[Process, tuple[int, float, float]] = {}
        self._asked_at = -_NEVER  # when all were last asked to report
        self._silent_at = -_NEVER  # the earliest time at which a process may have been silent for too long
        self._sent: dict[int, Term] = {}  # terms as the members know them
        self._begun = self._clean = 0  # steps at the last change; by which all lost samples are trained on
        self._resume = 0  # the first step whose sum is made in this epoch
        self._owed: dict[int, Any] = {}  # by rank: the host that has the step before, and those that lack it
        self._broken_at: float | None = None  # when a sum of this epoch has failed
        self._broken_by: set[int] = set()  # groups that reported it
        self._waits_for: dict[int, str] = {}  # by group: the first host that it waited for in this epoch
        self._in_vain = 0  # epochs since a sum was whole, that no loss explains
        self._is_to_stop = False
        self._stop: int | None = None  # the first step that has no batches

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the first step has a roster."""
        return self._begun > 0 or bool(self.roster.terms)

    @property
    def training(self) -> set[int]:
        """The pipelines that train, or have left with the last step and may still be about to exit."""
        done = (g for g in self.groups.values() if g.left_at == self.reached and not g.has_ended)
        return {*self.members.values(), *(group.pipeline for group in done)}

    @property
    def is_awaited(self) -> bool:
        """Whether processes train, or wait to begin."""
        waiting = (p for g in self.groups.values() if not g.is_lost for p in g.processes.values())
        return self.has_begun or any(process.wants == "enter" for process in waiting)

    def is_done(self, number: int) -> bool | None:
        """Whether a group left at the end of the run, not before; None while that is not known.

        It is known once no other one trains any more, or one of them has begun another step. A group that was no
        member is done if none is.
        """
        group = self.groups.get(number)
        if group is None:
            return not self.is_awaited
        if group.left_at is None or group.left_at < self.reached:
            return False
        return None if self.members else True

    def progress(self) -> dict[str, Any]:
        """Return the position of the run, for a pipeline that joins.

        The batches are the fewest that any process has begun: a process that is ahead may be lost before the
        pipeline joins, and the others begin its batches only then.
        """
        begun = (process.batches for process in self._processes() if process.batches is not None)
        return {"has_begun": self.has_begun, "batches": min(begun, default=0)}

    def term_of(self, group: Group) -> Term:
        return self.history[group.number]

    def living(self) -> list[Group]:
        """Return the groups that are members and not lost."""
        return [g for n in self.members if not (g := self.groups[n]).is_lost]

    def _processes(self) -> list[Process]:
        return [process for group in self.living() for process in group.processes.values()]

    # ---- events ------------------------------------------------------------------------------------------------------

    def started(self, number: int, now: float) -> None:
        """Note that the processes of a group are being started."""
        self._started[number] = now

    def hello(self, number: int, rank: int, about: Mapping[str, Any], now: float) -> None:
        """Note a process that has connected. ValueError where it must not take part."""
        group = self.groups.get(number)
        if group is None and number in self._started:
            pipeline, size, period = (int(about[name]) for name in ("pipeline", "size", "period"))
            group = self.groups[number] = Group(pipeline, number, size, period, str(about["host"]))
        if group is None or group.is_lost or rank in group.processes or not 0 <= rank < group.size:
            raise ValueError(f"the processes started together with {about['name']} have ended")
        self.timeout_s = float(about["timeout_s"])
        self._silent_at = -_NEVER
        group.processes[rank] = Process(group, rank, str(about["name"]), now)

    def receive(self, number: int, rank: int, kind: str, values: Sequence[Any], now: float) -> list[Command]:
        """Handle a message. ValueError, TypeError, KeyError or AttributeError for an invalid one."""
        process = self.groups[number].processes[rank]
        process.heard_at = now
        getattr(self, f"_on_{kind.replace(' ', '_')}")(process, now, *values)
        return self._changed(now)

    def closed(self, number: int, rank: int, now: float) -> list[Command]:
        """Note that the connection to a process has ended."""
        group = self.groups.get(number)
        if group is not None and rank in group.processes:
            self._lose(group, rank, "")
        return self._changed(now)

    def lose(self, number: int, rank: int | None, why: str, now: float) -> list[Command]:
        """End a group, because one of its processes is lost."""
        self._lose_started(number, rank, why)
        return self._changed(now)

    def gone(self, number: int, now: float) -> list[Command]:
        """Note that all processes of a group have ended."""
        self._started.pop(number, None)
        group = self.groups.get(number)
        if group is not None:
            group.has_ended = True
            if group.left_at is None:
                group.is_lost = True
            if number not in self.history:  # it was no member: nothing of it is needed
                del self.groups[number]
        self._has_news = True
        return self._changed(now)

    def tick(self, now: float, computed_at: float = -_NEVER) -> list[Command]:
        """Do what is due at a time.

        ``computed_at``: when the newest result was there that one pipeline computed for all, infinity while
        one is computing. That has no timeout, and a pipeline that joins may wait for its first step
        meanwhile: the timeout of the others begins then.
        """
        if now > self._silent_at:
            blames, self._silent_at = judgement.silent(self.groups, self.members, self.timeout_s, now)
            self._lose_all(blames)
        if not self.has_begun:
            self._find_overdue(now)
        if self._late_ones:
            self._judge(now, computed_at)
        if self._leavers:
            over = judgement.unfinished(self.living(), self._leavers.values(), now - _BLAME_S)
            self._lose_all((group, None, _LEFT) for group in over)
        return self._changed(now)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _on_alive(self, process: Process, now: float, doing: str, *counts: int) -> None:
        process.doing = str(doing)
        process.batches, process.begun, process.ended, process.published = map(int, counts)
        if process.begun > process.group.first:  # else it waits for its first step, which may never come
            self.reached = max(self.reached, process.begun)
        self._has_news = self._has_news or bool(self._leavers)  # which wait for the ends of steps
        self._out.append(process.send(_HEARD))

    def _on_begun(
        self, process: Process, now: float, freeze: int, begun: int, batches: int, whole: int, seen: Any
    ) -> None:
        counts = {int(number): int(count) for number, count in seen.items()}
        process.answer = Answer(int(freeze), int(begun), int(whole), counts)
        process.begun, process.batches = int(begun), int(batches)
        if process.answer.freeze == self._freezes:
            self._unanswered.discard(process)
            self._has_news = self._has_news or not self._unanswered or bool(self._leavers)

    def _on_enter(
        self, process: Process, now: float, request: int, digests: Mapping[str, str], facts: Any
    ) -> None:
        """Admit a process that is made as the others are, and at the start has their weights."""
        for other in self.groups.values():
            mate = other.processes.get(process.rank)
            theirs = {} if other.is_lost or mate is None else mate.digests
            if not theirs:
                continue
            different = [name for name, digest in theirs.items() if digests.get(name) != digest]
            if self.has_begun and WEIGHTS in different:
                different.remove(WEIGHTS)
            if different:
                why = f"{' and '.join(different)} are not those of pipeline {other.pipeline}"
                self._lose(
                    process.group,
                    process.rank,
                    f"{REFUSED}{why}; all must run the same script with the same files",
                )
                return
            break  # it is like all others
        process.digests, process.facts, process.wants = digests, facts, "enter"
        process.group.ready_at, self._has_news = now, True
        self._out.append(process.send(["reply", request, {}]))

    def _on_leave(self, process: Process, now: float, begun: int, published: int) -> None:
        group = process.group
        process.wants, process.begun, self._has_news = "leave", int(begun), True
        process.published = int(published)
        if process.begun > group.first:
            self.reached = max(self.reached, process.begun)
        group.ready_at = now
        if group.is_lost or not group.all_want("leave"):
            return
        if group.number in self.members:
            self._leavers[group.number] = group
        else:
            group.left_at = self.reached  # no step was its to take part in
            self._release(group)

    def _on_late(self, process: Process, now: float, turn: int, waited_s: float, host: str = "") -> None:
        if host:
            self._waits_for.setdefault(process.group.number, str(host))
        self._late_ones[process] = int(turn), float(waited_s), now
        if now > self._asked_at + _JUDGE_S:  # they report by themselves, too
            self._asked_at = now
            self._out += [p.send(["report"]) for p in self._processes()]

    def _on_broken(self, process: Process, now: float, epoch: int, host: str = "") -> None:
        number = process.group.number
        if epoch == self.epoch and number in self.members:
            self._waits_for.setdefault(number, str(host))
            self._broken_at = now if self._broken_at is None else self._broken_at
            self._broken_by.add(number)

    def _on_unseen(self, process: Process, now: float, other: int) -> None:
        """A process cannot open the memory of another one, so it must have ended, and no step may need it."""
        if other in self.members:
            self._lose(self.groups[other], None, "")

    def _on_has_state(self, process: Process, now: float) -> None:
        process.has_state = True

    def _on_gives_up(self, process: Process, now: float, why: str) -> None:
        self._lose(process.group, None, str(why))

    def _on_stop(self, process: Process, now: float) -> None:
        self._is_to_stop = self._has_news = True

    def _release(self, group: Group) -> None:
        self._out += [process.send(["released"]) for process in group.processes.values()]

    # ---- losses ------------------------------------------------------------------------------------------------------

    def _lose(self, group: Group, rank: int | None, why: str) -> None:
        if not group.is_lost and group.left_at is None:
            group.is_lost = self._has_news = True
            self._out.append(Kill(group.number, rank, why))

    def _lose_started(self, number: int, rank: int | None, why: str) -> None:
        if (group := self.groups.get(number)) is not None:
            self._lose(group, rank, why)
        else:
            self._out.append(Kill(number, rank, why))

    def _lose_all(self, blames: Iterable[judgement.Blame]) -> None:
        for blame in blames:
            self._lose(*blame)

    def _find_overdue(self, now: float) -> None:
        """End groups that keep living ones waiting for longer than the timeout before the run begins."""
        why = "it has not reached its first batch, for which the others have waited"
        for number in judgement.overdue(self.groups, self._started, self.timeout_s, now):
            del self._started[number]
            self._lose_started(number, None, why)

    def _judge(self, now: float, computed_at: float) -> None:
        """Find the cause for processes that are late, once all have reported since, or would have."""
        heard = min((process.heard_at for process in self._processes()), default=now)
        found: dict[int, tuple[dict[int, Group], bool]] = {}  # by step: all wait for the same one
        for process, (turn, waited_s, at) in list(self._late_ones.items()):
            group = process.group
            if group.is_lost or group.number not in self.members:
                del self._late_ones[process]
            elif now >= computed_at + waited_s and (heard > at or now > at + _JUDGE_S):
                del self._late_ones[process]
                if self.term_of(group).first <= turn:
                    if turn not in found:
                        is_alone = len(self.roster.speakers(turn)) <= 1
                        found[turn] = judgement.behind(turn, self.roster, self.groups, self.members), is_alone
                    self._end_late(process, turn, waited_s, *found[turn])

    def _end_late(
        self, process: Process, turn: int, waited_s: float, missing: Mapping[int, Group], is_alone: bool
    ) -> None:
        self._lose_all(judgement.late(process, turn, waited_s, missing, is_alone))
        if not missing and not is_alone:
            self._broken_at = -_NEVER  # the sum is under way between hosts, and does not come
            self._broken_by.add(process.group.number)
        elif not missing:
            process.reported_late = turn  # the last publication may still be in flight

    # ---- changes -----------------------------------------------------------------------------------------------------

    def _changed(self, now: float) -> list[Command]:
        """Make the changes that are due; return all commands."""
        breaks = self._frozen is not None and self._frozen.breaks
        if self._has_news or (self._is_broken(now) and not breaks):
            self._has_news = False
            self._change(now)
        out, self._out = self._out, []
        return out

    def _is_broken(self, now: float) -> bool:
        return self._broken_at is not None and now > self._broken_at + _BLAME_S

    def _change(self, now: float) -> None:
        lost = frozenset(n for n in self.members if self.groups[n].is_lost)
        leaving = judgement.may_leave(self.living(), self._leavers.values()) if self._leavers else []
        left = {group.number for group in leaving}
        joining = [] if self._stop is not None else self._ready()  # else nothing is left to train on
        stops = self._is_to_stop and self._stop is None
        is_broken = self._is_broken(now)
        if not self.has_begun:
            if len(joining) >= self.wanted:
                self._apply(lost, [], joining)
            return
        is_due = bool(lost or leaving or is_broken or ((joining or stops) and self.members))
        if self._frozen is None and not is_due:
            return
        staying = [g for g in self.living() if g.number not in left]
        asked = [process for group in staying for process in group.processes.values()]
        leaves_early = any(p.begun < self.reached for g in leaving for p in g.processes.values())
        breaks = bool(lost) or is_broken or leaves_early
        if self._frozen is None or self._frozen.lost != lost or (breaks and not self._frozen.breaks):
            self._freezes += 1
            self._frozen, self._unanswered = Freeze(lost, breaks), set(asked)
            message = ["freeze", self._freezes, sorted(lost), breaks]
            for process in asked:
                process.answer = None
                self._out.append(process.send(message))
        if all(p.answer is not None and p.answer.freeze == self._freezes for p in asked):
            self._apply(lost, leaving, joining)

    def _ready(self) -> list[Group]:
        """Return the groups that want to join."""
        free = (g for n, g in self.groups.items() if n not in self.history and not g.is_lost)
        ready = {g.pipeline: g for g in free if g.all_want("enter")}
        return [ready[i] for i in sorted(ready) if i not in self.members.values()]

    def _apply(self, lost: Iterable[int], leaving: Sequence[Group], joining: Sequence[Group]) -> None:
        """Change the roster from a step on that no process has begun."""
        frozen, self._frozen = self._frozen, None
        begins = not self.has_begun
        gone = [self.groups[n] for n in sorted(lost)]
        left = {group.number for group in leaving}
        staying = [g for g in self.living() if g.number not in left]
        if frozen is not None and frozen.breaks:
            self._begin_epoch(staying, gone)
        published = {g.number: judgement.readable(g, staying, self._resume) for g in gone}
        for group in leaving:
            group.left_at = published[group.number] = group.begun()
        # Those that wait for their first step, which is to come, have begun none.
        answers = [(g, p.answer) for g in staying for p in g.processes.values() if p.answer is not None]
        counts = [answer.begun for g, answer in answers if answer.begun > g.first]
        counts += [steps for n, steps in published.items() if steps > self.groups[n].first]
        self._begun = begun = max([self._begun, *counts])
        self.reached = max(self.reached, begun)
        for group in (*gone, *leaving):
            del self.members[group.number]
            self._leavers.pop(group.number, None)
        for group in (*gone, *leaving):
            self._apply_end(group, published[group.number], begun)
        if frozen is not None and frozen.breaks:
            self._cut_unread(staying, begun)
        for group in leaving:
            self._release(group)
        if self._is_to_stop and self._stop is None:
            self._stop = begun
        self._admit(joining, begun, begins)
        self.history |= {term.number: term for term in self.roster.terms}
        self._forget(begun)
        self._send_roster()
        self._has_news = True  # such as a pipeline that was refused for now

    def _begin_epoch(self, staying: Sequence[Group], gone: Sequence[Group]) -> None:
        """Decide which sums are whole, and who lacks the last of them.

        Only the last step that any host has whole may be whole for some ranks alone: no host sums the next one
        before it has that one for all ranks.
        """
        self.epoch += 1
        whole: dict[int, dict[str, int]] = {}  # by rank and host
        for group in staying:
            for rank, process in group.processes.items():
                assert process.answer is not None
                hosts, count = whole.setdefault(rank, {}), process.answer.whole
                count = count if count > self.term_of(group).first else 0  # it was in no step yet
                hosts[group.host] = max(hosts.get(group.host, 0), count)
        most = max((max(hosts.values()) for hosts in whole.values()), default=self._resume)
        if any(max(hosts.values()) < most for hosts in whole.values()):
            most -= 1
        self._in_vain = 0 if most > self._resume or gone else self._in_vain + 1
        if self._in_vain > _TRIES:
            reported = [self.groups[n] for n in sorted(self._broken_by & self.members.keys())]
            for group in judgement.unreachable(reported, self.living(), self._waits_for, self._home):
                self._lose(group, None, "it cannot exchange updates with the others")
        self._broken_at, self._broken_by, self._waits_for = None, set(), {}
        self._resume, self._owed = most, {}
        there = self.roster.speakers(most - 1)
        for rank, hosts in whole.items():
            lacking = [h for h, count in hosts.items() if h in there and count < most]
            if lacking:
                self._owed[rank] = [next(h for h, count in hosts.items() if count >= most), lacking]

    def _admit(self, joining: Sequence[Group], begun: int, begins: bool) -> None:
        donors = [term for term in self.roster.present if term.first < begun]
        for group in joining:
            if not begins and (self._stop is not None or not donors):
                break  # no donor is left, or none will be soon
            near = [term for term in donors if term.host == group.host] or donors
            first = 0 if begins else -(-max(begun, self._clean) // group.period) * group.period
            donor = None if begins else near[0].pipeline
            term = Term(group.pipeline, group.number, first, donor, host=group.host)
            group.first = first
            self.roster.enter(term)
            self.members[group.number] = group.pipeline
            self._started.pop(group.number, None)
            if not begins:
                state = f"with the optimizer's state of pipeline {donor}"
                line = f"pipeline {group.pipeline} trains with the others from step {first} on, {state}"
                self._out.append(Say(line))

    def _apply_end(self, group: Group, published: int, begun: int) -> None:
        was_lost = group.is_lost
        term = self.roster.leave(group.pipeline, published, begun, was_lost)
        for other in self.roster.present:
            joined = self.groups[other.number]
            needs = other.donor == group.pipeline and not joined.has_state()
            if needs and self.roster.change_donor(other.number) is None:
                why = f"pipeline {group.pipeline}, whose state it was to get, has ended"
                self._lose(joined, None, why if was_lost else OVER)
        self._train_again(group, term.published, term.end, begun)

    def _train_again(self, group: Group, first: int, end: int, begun: int) -> None:
        """Note that the others train again on a group's samples of some steps.

        End those that joined after these, and begin before they are trained on again.
        """
        # The reference does not have the published steps of an unfinished period either.
        lost = end - first // group.period * group.period
        self._clean = max(self._clean, begun) + lost
        if lost and self.members and group.is_lost:
            steps = "step" if lost == 1 else f"{lost} steps"
            line = f"pipeline {group.pipeline}: the others train on its samples of its last {steps}"
            self._out.append(Say(line))
        why = f"it joined too late to know the lost samples of pipeline {group.pipeline}"
        for other in self.roster.present if lost else ():
            if first < other.first < self._clean:
                self._lose(self.groups[other.number], None, why)

    def _cut_unread(self, staying: Sequence[Group], begun: int) -> None:
        """Have lost groups count in no step whose sum is still to be made, where no process can read them any more."""
        readers = {g.host for g in staying if self.term_of(g).first <= self._resume}
        for term in self.roster.cut(readers, self._resume, begun):
            self._train_again(self.groups[term.number], term.cut, term.published, begun)

    def _forget(self, begun: int) -> None:
        """Drop steps that no member still needs: all are past a step once all have published the next."""
        ended = [process.ended for process in self._processes()]
        self.roster.forget(min([begun, self._resume if self.epoch else begun, *ended]) - 2)
        needed = {term.number for term in self.roster.terms}
        self.groups = {
            n: g for n, g in self.groups.items() if n in needed or not g.has_ended or g.left_at is not None
        }

    def _send_roster(self) -> None:
        """Send all terms to new members; to the others those that have changed."""
        terms = {term.number: term for term in self.roster.terms}
        changed = [term for number, term in terms.items() if self._sent.get(number) != term]
        about = [self.roster.since, self.epoch, self._resume, self._owed, self._stop]
        whole, part = (["roster", *self._shown(some), *about] for some in ([*terms.values()], changed))
        for group in self.living():
            message = part if group.number in self._sent else whole
            self._out += [process.send(message) for process in group.processes.values()]
        self._sent = terms

    def _shown(self, terms: Sequence[Term]) -> list[Any]:
        facts = {
            term.number: {rank: p.facts for rank, p in sorted(self.groups[term.number].processes.items())}
            for term in terms
        }
        return [Roster(terms).to_json(), facts]
