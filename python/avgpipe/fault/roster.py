"""Which pipelines train at each step, where each may join and leave.

A *turn* in this package is one step of every pipeline: one batch that all share, or one batch for each. Steps
are numbered over the life of a run. The members of a step are decided before any process begins it; which of
them count in it, when it ends: a lost pipeline counts in the steps before ``published``, and in none after.
Every process of every pipeline has the same roster, and decides the same from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

_NEVER = 2**62


@dataclass(frozen=True)
class Term:
    """The steps from a pipeline's joining to its leaving. One that was lost and joined again has two terms.

    Attributes:
        pipeline: its number.
        number: identifies the term over the life of a run.
        first: the first step of which it is a member.
        donor: the member whose state it begins with; None for a pipeline that begins the run.
        published: the first step that it has not published, in which it does not count.
        end: the first step of which it is no longer a member; its steps from ``published`` to here are lost.
        host: names the host of its processes: those of one host share memory.
        was_lost: whether it was lost, in contrast to one that left.
        cut: the first step in which it does not count although it has published it, as no process is left that
            could read that.
        cut_from: the step from which on the members know so, and train on its samples of these steps again.
    """

    pipeline: int
    number: int
    first: int
    donor: int | None = None
    published: int = _NEVER
    end: int = _NEVER
    host: str = ""
    was_lost: bool = False
    cut: int = _NEVER
    cut_from: int = _NEVER

    @property
    def has_ended(self) -> bool:
        return self.end != _NEVER

    @property
    def counts_until(self) -> int:
        """The first step in which it does not count."""
        return min(self.published, self.cut)


_values = attrgetter(*(field.name for field in fields(Term)))


class Roster:
    """The known terms of all pipelines.

    Attributes:
        since: terms that ended before this step are not known.
    """

    def __init__(self, terms: Sequence[Term] = (), since: int = -1) -> None:
        self.terms, self.since = list(terms), since

    def members(self, turn: int) -> list[int]:
        """Return the members of a step, in ascending order."""
        return sorted(term.pipeline for term in self.terms if term.first <= turn < term.end)

    def counting(self, turn: int) -> dict[int, Term]:
        """Return the terms that count in a step, by pipeline; one may still be lost before publishing it."""
        found = {term.pipeline: term for term in self.terms if term.first <= turn < term.counts_until}
        return dict(sorted(found.items()))

    def joining(self, turn: int) -> list[Term]:
        """Return the terms that begin with a step and with a donor's state."""
        return [term for term in self.terms if term.first == turn and term.donor is not None]

    def speakers(self, turn: int) -> dict[str, Term]:
        """Return for each host that has a part in a step the term whose processes speak for it, by host.

        The oldest of its terms speaks, as far as it was not lost; the order of hosts is that of their
        pipelines.
        """
        there = [term for term in self.terms if term.first <= turn < term.published and not term.was_lost]
        found: dict[str, Term] = {}
        for term in sorted(there, key=lambda term: term.pipeline):
            oldest = found.setdefault(term.host, term)
            if (term.first, term.number) < (oldest.first, oldest.number):
                found[term.host] = term
        return found

    @property
    def present(self) -> list[Term]:
        """The terms whose end is not known."""
        return [term for term in self.terms if not term.has_ended]

    def of(self, number: int) -> Term | None:
        """Return the term with a number; None if it is not known."""
        return next((term for term in self.terms if term.number == number), None)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def enter(self, term: Term) -> None:
        """Add a term, whose first step no process has begun."""
        self.terms.append(term)

    def leave(self, pipeline: int, published: int, begun: int, was_lost: bool = False) -> Term:
        """End a member's term; it published the steps before ``published``, and none has begun ``begun``."""
        term = next(term for term in self.present if term.pipeline == pipeline)
        end = max(begun, term.first)
        return self._change(term, published=min(published, end), end=end, was_lost=was_lost)

    def _change(self, term: Term, **changes: Any) -> Term:
        changed = self.terms[self.terms.index(term)] = replace(term, **changes)
        return changed

    def cut(self, hosts: Collection[str], turn: int, begun: int) -> list[Term]:
        """Have lost terms count in no step from ``turn`` on that are on none of these hosts; return these terms.

        No process has begun step ``begun``.
        """
        lost = [term for term in self.terms if term.was_lost and term.host not in hosts]
        firsts = [(term, max(turn, term.first)) for term in lost]
        return [self._change(t, cut=first, cut_from=begun) for t, first in firsts if first < t.counts_until]

    def change_donor(self, number: int) -> Term | None:
        """Have another member give a joining pipeline its state; None if there is none.

        All that were members before have it: the pipeline's first step cannot end without the pipeline.
        """
        term = self.of(number)
        assert term is not None
        heirs = [other for other in self.present if other.first < term.first]
        near = [other for other in heirs if other.host == term.host] or heirs
        return self._change(term, donor=near[0].pipeline) if near else None

    def forget(self, turn: int) -> None:
        """Drop the terms that ended before step ``turn``."""
        self.since = turn
        self.terms = [
            term for term in self.terms if term.end > turn or (term.cut != _NEVER and term.cut_from > turn)
        ]

    # ---- over the wire -----------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        return [_values(term) for term in self.terms]

    def changed(self, values: Sequence[Any], since: int) -> Roster:
        """Return the roster with terms as another one's :meth:`to_json` has shown them, from a step on."""
        terms = {term.number: term for term in self.terms}
        terms |= {term.number: term for term in (Term(*value) for value in values)}
        known = Roster([*terms.values()])
        known.forget(since)
        return known
