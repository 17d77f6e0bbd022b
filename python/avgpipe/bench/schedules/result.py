"""What the comparison found, as values, and their form as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from avgpipe.bench.schedules.bounds import Bound, bounds
from avgpipe.bench.schedules.rows import Unavailable
from avgpipe.bench.schedules.settings import ScheduleSettings


@dataclass(frozen=True)
class Timed:
    """A row: seconds per batch, one sample a round."""

    name: str
    median_s: float
    quartile1_s: float
    quartile3_s: float
    samples_s: tuple[float, ...]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("avgpipe ")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Timed:
        return Timed(**{**found, "samples_s": tuple(found["samples_s"])})


@dataclass(frozen=True)
class ScheduleResult:
    """line_bytes_per_s: what a plain transfer reached between two workers."""

    settings: ScheduleSettings
    line_bytes_per_s: float | None
    bounds: tuple[Bound, ...]
    rows: tuple[Timed, ...]
    unavailable: tuple[Unavailable, ...] = ()

    @property
    def limit_s(self) -> float:
        """The bound that holds for every row: no bubble, and the line at its rate."""
        return max(b.seconds for b in self.bounds if b.name.startswith("no bubble") or "line rate" in b.name)

    def to_json(self) -> dict[str, Any]:
        return {
            "emulated": True,
            "settings": self.settings.to_json(),
            "line_bytes_per_s": self.line_bytes_per_s,
            "limit_s": self.limit_s,
            "bounds": [asdict(bound) for bound in self.bounds],
            "rows": [row.to_json() for row in self.rows],
            "unavailable": [asdict(row) for row in self.unavailable],
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> ScheduleResult:
        return ScheduleResult(
            settings=ScheduleSettings.from_json(found["settings"]),
            line_bytes_per_s=found["line_bytes_per_s"],
            bounds=tuple(Bound(**bound) for bound in found["bounds"]),
            rows=tuple(Timed.from_json(row) for row in found["rows"]),
            unavailable=tuple(Unavailable(**row) for row in found["unavailable"]),
        )


def timed_rows(measured: Sequence[dict[str, Any]]) -> list[Timed]:
    """Of what `measure_rows` returned on rank 0, where batches end last."""
    made = []
    for row in measured:
        samples = row["seconds"]
        quartile1, _, quartile3 = (
            statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        )
        made.append(Timed(row["name"], statistics.median(samples), quartile1, quartile3, tuple(samples)))
    return made


def summarise(settings: ScheduleSettings, ranks: Sequence[dict[str, Any]]) -> ScheduleResult:
    rate = settings.rate_bits_per_s
    line = ranks[0]["line_bytes_per_s"]
    return ScheduleResult(
        settings,
        line,
        tuple(
            bounds(
                settings.stages,
                settings.micro_batches,
                settings.forward_s,
                settings.backward_s,
                settings.activation_bytes,
                None if rate is None else rate / 8,
                line,
            )
        ),
        tuple(timed_rows(ranks[0]["rows"])),
        tuple(Unavailable(**row) for row in ranks[0]["unavailable"]),
    )
