"""Which pipelines keep the others waiting for longer than they may: decided from what each has reported.

Each function returns the groups to end, with the rank that is to blame, None if that is unknown, and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from avgpipe.fault.group import Group, Process
from avgpipe.fault.roster import Roster

Blame: TypeAlias = tuple[Group, int | None, str]

_NEVER = float("inf")


def silent(
    groups: Mapping[int, Group], members: Mapping[int, int], timeout_s: float, now: float
) -> list[Blame]:
    """Find processes that send nothing, such as stopped ones: the others would wait for them."""
    found: list[Blame] = []
    for group in groups.values():
        for rank, process in group.processes.items():
            is_waited_for = process.wants != "leave" or group.number in members
            if process.heard_at < now - timeout_s and is_waited_for:
                silence = f"{process.name} sent no message for {timeout_s:g} s"
                found.append((group, rank, f"{silence}, when it was at {process.doing}"))
    return found


def first_silence(groups: Mapping[int, Group], timeout_s: float, now: float) -> float:
    """Return the earliest time at which a process may have been silent for too long."""
    living = (g for g in groups.values() if not g.is_lost and g.left_at is None)
    heard = min((p.heard_at for g in living for p in g.processes.values()), default=now)
    return max(heard, now - timeout_s) + timeout_s


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
    group: Group, process: Process, turn: int, waited_s: float, behind: Mapping[int, Group], is_alone: bool
) -> list[Blame]:
    """Find the pipelines whose step a process waits for; its own if all have published it, the second time.

    Args:
        behind: The pipelines that have not published the step.
        is_alone: Whether all that count in it are on one host.
    """
    waited = f"pipeline {group.pipeline} has waited {waited_s:g} s for"
    found: list[Blame] = []
    for pipeline, other in behind.items():
        doing = "; ".join(f"{p.name} was at {p.doing}" for _, p in sorted(other.processes.items()))
        found.append((other, None, f"{waited} pipeline {pipeline}'s part of step {turn}; {doing}"))
    if not behind and is_alone and process.reported_late == turn:
        why = f"{waited} step {turn}, which every pipeline has published; {process.name} was at "
        found.append((group, None, f"{why}{process.doing}"))
    return found
