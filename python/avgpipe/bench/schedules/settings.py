"""The options of ``avgpipe bench schedules``, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from avgpipe import units
from avgpipe.links import ON_HOST

SCHEDULES = (
    "1f1b",
    "all-forward-all-backward",
    "advance-forward",
    "interleaved-1f1b",
    "zero-bubble-h1",
    "zero-bubble-v",
)
SYSTEMS = ("pipedream", "pipedream-2bw", "ea-pipe", "data-parallel", "model-parallel")
TORCH = ("torch-1f1b", "torch-gpipe", "torch-advance-forward", "torch-interleaved-1f1b", "torch-zero-bubble")
ROWS = (*SCHEDULES, *SYSTEMS, *TORCH)
ALL = "all"  # in place of the names of rows
# The schedules for which both sides have a row; each system more takes its time.
DEFAULT = (*SCHEDULES[:3], *(name for name in TORCH if name != "torch-advance-forward"))
LINKS = ("auto", *ON_HOST)
CHUNKS = 2  # of a rank in the interleaved schedules
MIN_ACTIVATION_BYTES = 64


@dataclass(frozen=True)
class ScheduleSettings:
    """forward_s, backward_s: of a micro-batch on a stage. activation_bytes: of a micro-batch, float32.
    rate_bits_per_s: of each worker's line in each direction; None: the machine's own loopback. pipelines: of the
    row advance-forward, each number a row. batches: of a row in a round, at least. only: rows; ("all",) is every one,
    () those of DEFAULT.

    ValueError for values that are out of range.
    """

    stages: int = 6
    micro_batches: int = 12
    forward_s: float = 10e-3
    backward_s: float = 20e-3
    activation_bytes: int = 2**20
    rate_bits_per_s: float | None = None
    pipelines: tuple[int, ...] = (1, 2, 3)
    link: str = "auto"
    batches: int = 6
    rounds: int = 3
    only: tuple[str, ...] = ()
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        names = ("stages", "micro-batches", "batches", "rounds")
        for name, value in zip(names, (self.stages, self.micro_batches, self.batches, self.rounds)):
            if value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")
        for name, seconds in (("forward-ms", self.forward_s), ("backward-ms", self.backward_s)):
            if not 0 <= seconds < 3600:
                raise ValueError(f"--{name} {seconds * 1e3:g}: must be at least 0 and less than an hour")
        if self.activation_bytes < MIN_ACTIVATION_BYTES or self.activation_bytes % 4:
            raise ValueError(
                f"--activation {self.activation_bytes}: must be a multiple of 4 bytes and at least "
                f"{MIN_ACTIVATION_BYTES}"
            )
        if not self.pipelines or min(self.pipelines) < 1:
            raise ValueError(
                f"--pipelines {','.join(map(str, self.pipelines))}: must be numbers of at least 1"
            )
        if self.link not in LINKS:
            raise ValueError(f"--link {self.link}: use one of {', '.join(LINKS)}")
        if self.rate_bits_per_s is not None and self.link == "shm":
            raise ValueError("--link shm with --rate: shared memory passes no limited line; use --link gloo")
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout {self.timeout_s:g}: must be positive")
        for name in self.only:
            if name not in (*ROWS, ALL):
                raise ValueError(f"--rows {name}: no such row, use some of {','.join(ROWS)}, or {ALL}")

    @property
    def effective_link(self) -> str:
        """Where workers have hosts of their own, "auto" is what would be chosen between hosts."""
        return "gloo" if self.rate_bits_per_s is not None else self.link

    @property
    def budget_s(self) -> float:
        """Seconds that all the workers may take: far above what any row should need."""
        from avgpipe.bench.schedules.bounds import flush_s, link_s

        batch_s = flush_s(self.stages, self.micro_batches, self.forward_s, self.backward_s)
        batch_s += 2 * link_s(self.stages, self.micro_batches, self.transfer_s)
        rows = len(self.rows) + len(self.pipelines) + 2  # some names are two rows
        if "model-parallel" in self.rows:  # one micro-batch after another
            one_s = flush_s(self.stages, 1, self.forward_s, self.backward_s, self.transfer_s)
            rows += ceil(self.micro_batches * one_s / max(batch_s, 1e-9))
        return 120 + self.timeout_s + 6 * rows * (self.rounds + 1) * (self.batches + 5) * (batch_s + 0.02)

    @property
    def transfer_s(self) -> float:
        """Of an activation, or its gradient, on a line."""
        return 0.0 if self.rate_bits_per_s is None else 8 * self.activation_bytes / self.rate_bits_per_s

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of what is measured, in the order of the table."""
        chosen = ROWS if ALL in self.only else self.only or DEFAULT
        return tuple(name for name in ROWS if name in chosen)

    def command(self) -> list[str]:
        """The words that measure this again, with every default spelled out."""
        words = ["avgpipe", "bench", "schedules", "--stages", str(self.stages)]
        words += ["--micro-batches", str(self.micro_batches), "--forward-ms", f"{self.forward_s * 1e3:g}"]
        words += ["--backward-ms", f"{self.backward_s * 1e3:g}", "--activation", str(self.activation_bytes)]
        words += [] if self.rate_bits_per_s is None else ["--rate", f"{self.rate_bits_per_s:.0f}bit"]
        words += ["--pipelines", ",".join(map(str, self.pipelines)), "--link", self.link]
        words += ["--batches", str(self.batches), "--rounds", str(self.rounds)]
        return words + (["--rows", ",".join(self.only)] if self.only else [])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> ScheduleSettings:
        return ScheduleSettings(
            **{**found, "pipelines": tuple(found["pipelines"]), "only": tuple(found["only"])}
        )


def parse_rate(text: str | None) -> float | None:
    """Bits per second, as in "1Gbit" or "250Mbit"; None for None and "none"."""
    if text is None or text == "none":
        return None
    value = 8 * units.parse_rate("--rate", text)
    if not 1e5 <= value <= 1e12:
        raise ValueError(
            f"--rate {text}: write a rate as 1Gbit or 250Mbit, from 100kbit to 1000Gbit, or none"
        )
    return value


def parse_pipelines(text: str) -> tuple[int, ...]:
    return units.parse_numbers("--pipelines", text, int, "1,2,3")
