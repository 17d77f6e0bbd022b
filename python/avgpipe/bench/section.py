"""What a benchmark asks, as values: sections of variants. `timing` runs them, `result` says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["ours", "baseline", "limit"]


@dataclass(frozen=True)
class Variant:
    """One way to do a section's work.

    bytes_per_element: what the work must move for each of the section's elements, read or written, whatever
        this way of doing it moves besides. Alike for all variants that do the same work.
    run: does it once; on CUDA it enqueues.
    against: names of the baselines that do the same work; None: all of the section. Of "ours" alone.
    compile_s: seconds that its first call took to compile.
    """

    name: str
    role: Role
    bytes_per_element: float
    run: Callable[[], object]
    against: tuple[str, ...] | None = None
    compile_s: float | None = None


@dataclass(frozen=True)
class Skipped:
    """A variant that cannot run here, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Section:
    """A question in one case: variants to be measured in turn, in the same minutes, on the same memory.

    question: the name by which it is chosen. case: its operands' layout or number. asks: the question in words.
    memory_bytes: what its operands and the baselines' temporaries need at once, on the device.
    prepare: makes operands and variants, the first "limit" being the one that fractions are of.
    """

    question: str
    case: str
    asks: str
    elements: int
    memory_bytes: int
    prepare: Callable[[], Sequence[Variant | Skipped]]

    @property
    def title(self) -> str:
        return f"{self.question}, {self.case}, {self.elements / 1e6:g} M elements"
