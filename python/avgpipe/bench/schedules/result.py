"""What the comparison found, as values, and their form as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from avgpipe.bench.schedules.bounds import Bound, bounds
from avgpipe.bench.schedules.our_plans import OurCase, our_cases, simulated_s
from avgpipe.bench.schedules.rows import Unavailable
from avgpipe.bench.schedules.settings import ScheduleSettings

Simulate: TypeAlias = Callable[[str, Mapping[str, Sequence[float]] | None], float | None]


@dataclass(frozen=True)
class Timed:
    """A row: seconds per batch, one sample a round. Of our rows, what the simulation says: simulated_s, with the times
    that were set; simulated_as_measured_s, with the mean times that actions took, host included.
    """

    name: str
    median_s: float
    quartile1_s: float
    quartile3_s: float
    samples_s: tuple[float, ...]
    simulated_s: float | None = None
    simulated_as_measured_s: float | None = None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("avgpipe ")

    @property
    def is_drop_in(self) -> bool:
        """Ours on torch's runtime."""
        return self.name.endswith("(ours)")

    @property
    def over_simulated(self) -> float | None:
        """Measured over simulated seconds."""
        return self.median_s / self.simulated_s if self.simulated_s else None

    @property
    def over_simulated_as_measured(self) -> float | None:
        return self.median_s / self.simulated_as_measured_s if self.simulated_as_measured_s else None

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "over_simulated": self.over_simulated,
            "over_simulated_as_measured": self.over_simulated_as_measured,
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Timed:
        known = {field.name: found[field.name] for field in fields(Timed) if field.name in found}
        return Timed(**{**known, "samples_s": tuple(found["samples_s"])})


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
        """The bound of every row that sends its activations: no bubble, and the line at its rate."""
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


def timed_rows(measured: Sequence[dict[str, Any]], simulate: Simulate) -> list[Timed]:
    """Of what `measure_rows` returned on rank 0, where batches end last. simulate: of a row's name and actions."""
    made = []
    for row in measured:
        samples = row["seconds"]
        quartile1, _, quartile3 = (
            statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        )
        name, median, actions = row["name"], statistics.median(samples), row.get("actions")
        as_measured = None if actions is None else simulate(name, actions)
        made.append(
            Timed(name, median, quartile1, quartile3, tuple(samples), simulate(name, None), as_measured)
        )
    return made


def summarise(
    settings: ScheduleSettings, ranks: Sequence[dict[str, Any]], failed: Sequence[Unavailable] = ()
) -> ScheduleResult:
    rate = settings.rate_bits_per_s
    line = ranks[0]["line_bytes_per_s"]
    cases = {case.name: case for case in our_cases(settings) if isinstance(case, OurCase)}

    def simulate(name: str, actions: Mapping[str, Sequence[float]] | None) -> float | None:
        return simulated_s(cases[name], settings, line, actions) if name in cases else None

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
        tuple(timed_rows(ranks[0]["rows"], simulate)),
        (*(Unavailable(**row) for row in ranks[0]["unavailable"]), *failed),
    )
