"""Which pipelines train, turn by turn, where each may come and go.

A *turn* is what makes one step of every pipeline: a batch that all share, or one batch for each. Turns are numbered
over the life of a run. Who is a member of a turn is settled before anybody begins it; who counts in it, when it ends: a
pipeline that was lost counts in the turns that all its processes had told, and in none after. Every process of every
pipeline has the same roster, and what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

_NEVER = 2**62


@dataclass(frozen=True)
class Term:
    """A pipeline's membership, once: where it was lost and came again, it has two.

    Attributes:
        pipeline: its number.
        number: of the stay, over the life of a run.
        first: the first turn of which it is a member.
        donor: the member whose state it begins with; None for one of those that begin the run.
        told: the first turn in which it does not count.
        end: the first turn of which it is no member any more; those from ``told`` on before it are lost.
    """

    pipeline: int
    number: int
    first: int
    donor: int | None = None
    published: int = _NEVER
    end: int = _NEVER

    @property
    def has_ended(self) -> bool:
        return self.end != _NEVER


class Roster:
    """All that is known of who trains when."""

    def __init__(self, terms: Sequence[Term] = ()) -> None:
        self.terms = list(terms)

    def members(self, turn: int) -> list[int]:
        """Return who was to train in a turn, in ascending order."""
        return sorted(term.pipeline for term in self.terms if term.first <= turn < term.end)

    def counting(self, turn: int) -> dict[int, Term]:
        """Return the stays of the members that count in a turn, ascending; one may still be lost before it has told."""
        found = {term.pipeline: term for term in self.terms if term.first <= turn < term.published}
        return dict(sorted(found.items()))

    def joining(self, turn: int) -> list[Term]:
        """Return those that come with a turn, and take their state from another."""
        return [term for term in self.terms if term.first == turn and term.donor is not None]

    @property
    def present(self) -> list[Term]:
        """Those whose end is not known."""
        return [term for term in self.terms if not term.has_ended]

    # ---- changes -----------------------------------------------------------------------------------------------------

    def enter(self, term: Term) -> None:
        """Let a pipeline come, with a turn that nobody has begun."""
        self.terms.append(term)

    def leave(self, pipeline: int, published: int, begun: int) -> Term:
        """Note that a member is gone; it had told the turns before ``told``, and nobody has begun turn ``begun``."""
        number, term = next(
            (n, s) for n, s in enumerate(self.terms) if s.pipeline == pipeline and not s.has_ended
        )
        end = max(begun, term.first)
        self.terms[number] = gone = replace(term, published=min(published, end), end=end)
        heirs = [other for other in self.present if other.first < begun]
        for n, other in enumerate(self.terms):  # who was to give may be another, as all have what is given
            if heirs and other.donor == pipeline and other.first >= begun and not other.has_ended:
                self.terms[n] = replace(other, donor=heirs[0].pipeline)
        return gone

    def forget(self, turn: int) -> None:
        """Drop what concerns only turns before ``turn``."""
        self.terms = [term for term in self.terms if term.end > turn]

    # ---- over the wire -----------------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        return [astuple(term) for term in self.terms]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Roster:
        return cls([Term(*value) for value in values])
