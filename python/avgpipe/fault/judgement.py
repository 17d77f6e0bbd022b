"""Which pipelines may leave, and which ones keep the others waiting for too long, by what each has reported.

The functions find values and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from avgpipe.fault.group import Group, Process
from avgpipe.fault.roster import Roster

# A group to be ended, the rank that is to blame, None if that is unknown, and the reason.
Blame: TypeAlias = tuple[Group, int | None, str]

_NEVER = float("inf")


def silent(
    groups: Mapping[int, Group], members: Mapping[int, int], timeout_s: float, now: float
) -> tuple[list[Blame], float]:
    """Find processes that send nothing, such as stopped ones: the others would wait for them.

    Return also the earliest time at which another one may have been silent for too long.
    """
    found, heard = list[Blame](), now
    for group in groups.values():
        for rank, process in group.processes.items():
            is_waited_for = process.wants != "leave" or group.number in members
            if process.heard_at < now - timeout_s and is_waited_for:
                silence = f"{process.name} sent no message for {timeout_s:g} s"
                found.append((group, rank, f"{silence}; it last reported: {process.doing}"))
            elif not group.is_lost and group.left_at is None:
                heard = min(heard, process.heard_at)
    return found, max(heard, now - timeout_s) + timeout_s


def overdue(
    groups: Mapping[int, Group], started: Mapping[int, float], timeout_s: float, now: float
) -> list[int]:
    """Find groups that keep living ones waiting before the run begins; return their numbers.

    Args:
        started: When each group was started that has not entered.
    """
    ready = {n: g for n, g in groups.items() if g.all_want("enter") and not g.is_lost}
    since = min((group.ready_at for group in ready.values()), default=_NEVER)
    # One that was started again needs at least as long as the others before it can be late.
    needs = [g.ready_at - started[n] for n, g in ready.items() if n in started]
    least = min(needs, default=0.0)
    return [n for n, at in started.items() if n not in ready and max(at + least, since) < now - timeout_s]


def behind(
    turn: int, roster: Roster, groups: Mapping[int, Group], members: Mapping[int, int]
) -> dict[int, Group]:
    """Return the pipelines that have not published a step, as far as they have reported."""
    return {
        pipeline: groups[term.number]
        for pipeline, term in roster.counting(turn).items()
        if term.number in members and term.first + groups[term.number].published() <= turn
    }


def late(
    process: Process, turn: int, waited_s: float, behind: Mapping[int, Group], is_alone: bool
) -> list[Blame]:
    """Find the pipelines whose step a process waits for; its own if all have published it, the second time.

    Args:
        behind: The pipelines that have not published the step.
        is_alone: Whether all that count in it are on one host.
    """
    waited = f"pipeline {process.group.pipeline} has waited {waited_s:g} s for"
    found: list[Blame] = []
    for pipeline, other in behind.items():
        doing = "; ".join(f"{p.name} last reported: {p.doing}" for _, p in sorted(other.processes.items()))
        found.append((other, None, f"{waited} pipeline {pipeline}'s part of step {turn}; {doing}"))
    if not behind and is_alone and process.reported_late == turn:
        why = f"{waited} step {turn}, which every pipeline has published; {process.name} last reported: "
        found.append((process.group, None, f"{why}{process.doing}"))
    return found


def unreachable(
    reported: Sequence[Group], living: Sequence[Group], waits_for: Mapping[int, str], home: str
) -> list[Group]:
    """Return the groups to be ended where sums over hosts have failed again and again.

    They are those on the host that most wait for, though not the launcher's; if none is named, all that
    reported it.

    Args:
        reported: the members that have reported a sum that failed, or did not come.
        waits_for: by number of a group, the host that it waited for; "" if unknown.
    """
    hosts = {group.host for group in living} - {home}
    named = Counter(host for group in reported if (host := waits_for.get(group.number, "")) in hosts)
    if not named:
        return [group for group in reported if group.host != home]
    (worst, _), *_ = named.most_common(1)
    return [group for group in living if group.host == worst]


# ---- leaving ---------------------------------------------------------------------------------------------------------


def may_leave(living: Sequence[Group], leavers: Iterable[Group]) -> list[Group]:
    """Return the members that want to leave, if no other one needs them or their host for steps that have begun.

    Args:
        living: The members that are not lost.
        leavers: Those that want to leave.
    """
    ended: dict[str, int] = {}  # by host, by all that do not want to leave
    for group in living:
        for process in group.processes.values():
            if process.wants != "leave":
                ended[group.host] = min(process.ended, ended.get(group.host, process.ended))
    slowest = sorted(ended, key=lambda host: ended[host])[:2]
    return [
        group
        for group in leavers
        if not group.is_lost
        and all(ended[h] >= group.begun() for h in slowest if h != group.host)
        and not (ended and leaves_unfinished(group))
    ]


def unfinished(living: Sequence[Group], leavers: Iterable[Group], since: float) -> list[Group]:
    """Return the members that have left in the midst of a step before a time, and others go on.

    Args:
        living, leavers: As of :func:`may_leave`.
    """
    over = [group for group in leavers if group.ready_at < since and leaves_unfinished(group)]
    leaving = may_leave(living, leavers) if over else []
    return [group for group in over if group not in leaving]


def leaves_unfinished(group: Group) -> bool:
    """Whether a member leaves without its part of steps that it has begun, as where a script stops early."""
    return group.all_want("leave") and group.first + group.published() < group.begun()


# ---- losses ----------------------------------------------------------------------------------------------------------


def readable(group: Group, staying: Sequence[Group], resume: int) -> int:
    """Return the first step that a lost group has not published, as far as those that are left can read it.

    Args:
        resume: the first step whose sums over hosts are to be made.
    """
    if not staying:  # it matters to no process
        return group.first + group.published()
    mates = [
        answer.seen.get(group.number, 0)
        for other in staying
        if other.host == group.host and other.first <= resume
        for process in other.processes.values()
        if (answer := process.answer) is not None
    ]
    return max(group.first + max(mates, default=0), resume)
