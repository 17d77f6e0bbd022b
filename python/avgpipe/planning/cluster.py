"""The devices to plan for, and how they are connected: levels of a hierarchy, each with its bandwidth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from avgpipe.errors import check_count
from avgpipe.files import check_keys, parse_toml, reading
from avgpipe.planning.chain import limit_of
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.units import parse_bytes, parse_rate, parse_seconds

# ---- levels --------------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """``units`` units of the level below (of workers, on the lowest level) joined by links of ``bytes_per_s`` each.

    Four machines of four devices are ``Level(4, 12e9), Level(4, 1.25e9)``.
    """

    units: int
    bytes_per_s: float
    latency_s: float = 0.0

    @property
    def link(self) -> LinkProfile:
        return LinkProfile(self.latency_s, self.bytes_per_s)


_FREE = LinkProfile(0.0, math.inf)
_MOST_WORKERS, MOST_LEVELS = 2**16, 16


def ring_s(size_bytes: Any, workers: int, bytes_per_s: float) -> Any:
    """Return the seconds of an all-reduce over a ring: every worker sends 2 (m - 1) / m of the bytes."""
    return 2 * (workers - 1) * size_bytes / (workers * bytes_per_s)


# ---- clusters: values, read from TOML files ------------------------------------------------------------------------


class Device(NamedTuple):
    """A worker's device.

    Attributes:
        memory_bytes: Memory of the device; None: unlimited.
        speed: Speed relative to the device that was profiled.
    """

    memory_bytes: float | None = None
    speed: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Devices, and how they are connected.

    Attributes:
        devices: One for each worker.
        levels: Levels as the partitioners take them, lowest first: a number of units (of devices, on the
            lowest level), each with a link of ``bytes_per_s`` in each direction to the others of its level.
            The product of the units is the number of devices.
        is_here: Whether these are the workers that were profiled, so that measurements between them hold.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    name: str = ""
    is_here: bool = False

    def __post_init__(self) -> None:
        total = math.prod(level.units for level in self.levels)
        if total != len(self.devices):
            units = " x ".join(str(level.units) for level in self.levels)
            raise ValueError(
                f"the levels join {units} = {total} devices, but there are {len(self.devices)}: change units or count"
            )

    @classmethod
    def like(
        cls,
        profile: Profile,
        workers: int,
        memory_limit_bytes: float | None = None,
        link: LinkProfile | None = None,
    ) -> Cluster:
        """Return workers as profiled, all joined by ``link``, None: the profile's; without one transfers are free."""
        check_count("workers", workers, most=_MOST_WORKERS)
        limit_of(memory_limit_bytes)
        found = link or profile.link or _FREE
        level = Level(workers, found.bytes_per_s, found.latency_s)
        return cls((Device(memory_limit_bytes),) * workers, (level,), is_here=link is None)

    @property
    def workers(self) -> int:
        return len(self.devices)

    def height(self, a: int, b: int) -> int:
        """Return the lowest level, as an index, that joins the different workers a and b."""
        if not (0 <= a < self.workers and 0 <= b < self.workers):
            raise ValueError(f"workers {a} and {b}: there are {self.workers}")
        return next(h for h in range(len(self.levels)) if self.unit(a, h + 1) == self.unit(b, h + 1))

    def unit(self, worker: int, height: int) -> int:
        """Return the unit of a level that a worker is in, counted over the whole cluster."""
        for level in self.levels[:height]:
            worker //= level.units
        return worker

    def link(self, senders: Sequence[int], receivers: Sequence[int]) -> LinkProfile:
        """Return the link of the slowest pair when all ``senders`` send at once: those of one unit share its link."""
        heights = [self.height(a, b) for a, b in zip(senders, receivers)]
        sending = Counter((height, self.unit(a, height)) for height, a in zip(heights, senders))
        return LinkProfile(
            max(self.levels[height].latency_s for height in heights),
            min(self.levels[height].bytes_per_s / count for (height, _), count in sending.items()),
        )

    def slowest(self, here: Sequence[int], there: Sequence[int]) -> LinkProfile:
        """Return the slowest link between a worker of ``here`` and another of ``there``; a free one without pairs."""
        heights = {self.height(a, b) for a in here for b in there if a != b}
        links = [_FREE, *(self.levels[height].link for height in heights)]
        return LinkProfile(max(x.latency_s for x in links), min(x.bytes_per_s for x in links))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file; ValueError names an invalid entry.

        ``[[devices]]``: groups of devices in the order of the workers, with ``count``, and optionally
        ``memory`` ("80GiB") and ``speed`` (1.0). ``[[levels]]``, lowest first: ``units``, ``bandwidth``
        ("100Gbit") and ``latency`` ("20us", by default 0s). ``name``.
        """
        with reading(path) as text:
            return cls.from_toml(text)

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        found = parse_toml("a cluster file", text)
        check_keys("the file", found, ("name", "devices", "levels"), ("devices", "levels"))
        for name in ("devices", "levels"):
            rows = found[name]
            if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"{name} must be tables: begin each with [[{name}]]")
        check_count("the number of levels", len(found["levels"]), most=MOST_LEVELS)
        devices = [d for n, row in enumerate(found["devices"]) for d in _devices(f"devices[{n}]", row)]
        levels = [_level(f"levels[{n}]", row) for n, row in enumerate(found["levels"])]
        name = found.get("name", "")
        if not isinstance(name, str):
            raise ValueError(f"name={name!r}: must be a text")
        return cls(tuple(devices), tuple(levels), name)


def _devices(where: str, row: dict[str, Any]) -> list[Device]:
    check_keys(where, row, ("count", "memory", "speed"), ("count",))
    check_count(f"{where}: count", row["count"], most=_MOST_WORKERS)
    speed = row.get("speed", 1.0)
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
        raise ValueError(f"{where}: speed {speed!r}: must be a number above 0, 1.0 for the profiled device's")
    memory = (
        parse_bytes(f"{where}: memory", row["memory"], positive=True, bare=False) if "memory" in row else None
    )
    return [Device(memory, float(speed))] * row["count"]


def _level(where: str, row: dict[str, Any]) -> Level:
    check_keys(where, row, ("units", "bandwidth", "latency"), ("units", "bandwidth"))
    check_count(f"{where}: units", row["units"])
    return Level(
        row["units"],
        parse_rate(f"{where}: bandwidth", row["bandwidth"]),
        parse_seconds(f"{where}: latency", row.get("latency", "0s")),
    )
