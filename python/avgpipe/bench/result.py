"""What a benchmark found: rows of a section, and their form as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe.bench.section import Role, Section, Skipped, Variant


@dataclass(frozen=True)
class Row:
    """A variant's measured times, in seconds a call.

    fraction_of_limit: its bandwidth over that of the section's limit; None without a limit.
    ratios: of "ours": how many times longer each baseline took, by the baseline's name.
    """

    name: str
    role: Role
    median_s: float
    quartile1_s: float
    quartile3_s: float
    bytes_per_element: float
    gb_per_s: float
    fraction_of_limit: float | None
    ratios: dict[str, float]
    compile_s: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "median_ms": self.median_s * 1e3,
            "quartile1_ms": self.quartile1_s * 1e3,
            "quartile3_ms": self.quartile3_s * 1e3,
            "bytes_per_element": self.bytes_per_element,
            "gb_per_s": self.gb_per_s,
            "fraction_of_limit": self.fraction_of_limit,
            "ratios": self.ratios,
            **({} if self.compile_s is None else {"compile_s": self.compile_s}),
        }

    @staticmethod
    def from_json(row: dict[str, Any]) -> Row:
        return Row(
            name=row["name"],
            role=row["role"],
            median_s=row["median_ms"] / 1e3,
            quartile1_s=row["quartile1_ms"] / 1e3,
            quartile3_s=row["quartile3_ms"] / 1e3,
            bytes_per_element=row["bytes_per_element"],
            gb_per_s=row["gb_per_s"],
            fraction_of_limit=row["fraction_of_limit"],
            ratios=row["ratios"],
            compile_s=row.get("compile_s"),
        )


@dataclass(frozen=True)
class SectionResult:
    """The rows of a section in the order of its variants. limit: the row that fractions are of."""

    question: str
    case: str
    asks: str
    title: str
    elements: int
    memory_bytes: int
    limit: str | None
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = ()

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "case": self.case,
            "asks": self.asks,
            "elements": self.elements,
            "memory_bytes": self.memory_bytes,
            "limit": self.limit,
            "rows": [row.to_json() for row in self.rows],
            "skipped": [{"name": item.name, "reason": item.reason} for item in self.skipped],
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> SectionResult:
        return SectionResult(
            question=found["question"],
            case=found["case"],
            asks=found["asks"],
            title=f"{found['question']}, {found['case']}, {found['elements'] / 1e6:g} M elements",
            elements=found["elements"],
            memory_bytes=found["memory_bytes"],
            limit=found["limit"],
            rows=tuple(Row.from_json(row) for row in found["rows"]),
            skipped=tuple(Skipped(**item) for item in found["skipped"]),
        )


def summarise(
    section: Section,
    variants: Sequence[Variant],
    samples: Sequence[Sequence[float]],
    skipped: Sequence[Skipped] = (),
) -> SectionResult:
    """Medians, quartiles, bandwidths and ratios of `samples`: seconds a call, a list for each variant."""
    medians = {variant.name: statistics.median(seconds) for variant, seconds in zip(variants, samples)}
    speeds = {v.name: section.elements * v.bytes_per_element / medians[v.name] / 1e9 for v in variants}
    limit = next((variant.name for variant in variants if variant.role == "limit"), None)
    rows = []
    for variant, seconds in zip(variants, samples):
        quartile1, _, quartile3 = _quartiles(seconds)
        rows.append(
            Row(
                name=variant.name,
                role=variant.role,
                median_s=medians[variant.name],
                quartile1_s=quartile1,
                quartile3_s=quartile3,
                bytes_per_element=variant.bytes_per_element,
                gb_per_s=speeds[variant.name],
                fraction_of_limit=None if limit is None else speeds[variant.name] / speeds[limit],
                ratios={
                    other.name: medians[other.name] / medians[variant.name]
                    for other in variants
                    if _compares(variant, other)
                },
                compile_s=variant.compile_s,
            )
        )
    return SectionResult(
        *(
            section.question,
            section.case,
            section.asks,
            section.title,
            section.elements,
            section.memory_bytes,
        ),
        *(limit, tuple(rows), tuple(skipped)),
    )


def _compares(variant: Variant, other: Variant) -> bool:
    does_the_same = variant.against is None or other.name in variant.against
    return variant.role == "ours" and other.role == "baseline" and does_the_same


def _quartiles(seconds: Sequence[float]) -> list[float]:
    return (
        statistics.quantiles(seconds, n=4, method="inclusive")
        if len(seconds) > 1
        else [*seconds, *seconds, *seconds]
    )
