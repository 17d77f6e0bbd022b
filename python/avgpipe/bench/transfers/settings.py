"""The options of ``avgpipe bench transfers``, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from avgpipe.links import ON_HOST
from avgpipe.units import parse_bytes

LINKS = (*ON_HOST, "local")
LATENCY_BYTES = 1024
SIZES = (2**18, 2**20, 2**22, 2**24, 2**26)
COPIES = 16  # of the largest message that both processes hold at once, at most, all rows together
_WORD_BYTES = 8


@dataclass(frozen=True)
class TransferSettings:
    """links: those to measure. sizes: bytes of the messages whose bandwidth is measured. rounds: samples of each row.
    timeout_s: of every wait for the other process.

    ValueError for values that are out of range.
    """

    links: tuple[str, ...] = LINKS
    sizes: tuple[int, ...] = SIZES
    rounds: int = 9
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError(f"--links: name some of {','.join(LINKS)}")
        for name in self.links:
            if name not in LINKS:
                raise ValueError(f"--links {name}: no such link, use some of {','.join(LINKS)}")
        for size in self.sizes:
            if size < _WORD_BYTES or size % _WORD_BYTES:
                raise ValueError(
                    f"--sizes {size}: must be multiples of {_WORD_BYTES} bytes, and at least one"
                )
        if not self.sizes:
            raise ValueError("--sizes: name at least one, as 1MiB")
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds}: must be at least 1")
        if not 0 < self.timeout_s < 3600:
            raise ValueError(f"--timeout {self.timeout_s:g}: must be positive and less than an hour")

    @property
    def memory_bytes(self) -> int:
        return COPIES * max(self.sizes)

    @property
    def budget_s(self) -> float:
        """Seconds that both processes may take: far above what they should need."""
        return 60 + self.timeout_s + self.rounds * (5 + sum(20 + size / 5e7 for size in self.sizes))

    def command(self) -> list[str]:
        """The words that measure this again, with every default spelled out."""
        words = ["avgpipe", "bench", "transfers", "--links", ",".join(self.links)]
        return [*words, "--sizes", ",".join(map(str, self.sizes)), "--rounds", str(self.rounds)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> TransferSettings:
        return TransferSettings(**{**found, "links": tuple(found["links"]), "sizes": tuple(found["sizes"])})


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes as in "256KiB,1MiB"; ValueError for anything else."""
    return tuple(parse_bytes("--sizes", word.strip()) for word in text.split(","))
