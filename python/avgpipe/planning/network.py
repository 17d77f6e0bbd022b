"""How the workers hang together: levels of a hierarchy, each with its bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from avgpipe.planning.profile import LinkProfile, Profile


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


Levels = tuple[Level, ...]


def network(
    profile: Profile,
    stages: int | None,
    workers: int | None,
    levels: Sequence[Sequence[float]] | None,
    link: LinkProfile | None,
) -> Levels:
    """The levels meant by a partitioner's options, lowest first.

    Without levels, one of ``workers`` (None: as many as stages, or 4) on ``link`` (None: the profile's; a profile
    without one counts transfers as free).
    """
    if levels is None:
        count = workers if workers is not None else 4 if stages is None else stages
        check_workers(count)
        found = link or profile.link or LinkProfile(0.0, math.inf)
        return (Level(count, found.bytes_per_s, found.latency_s),)
    if link is not None:
        raise ValueError("link and levels both say how fast the network is: leave one out")
    if not levels:
        raise ValueError("levels is empty: give (units, bytes_per_s) of each, lowest first, or leave it out")
    made = tuple(_level(n, level) for n, level in enumerate(levels))
    total = math.prod(level.units for level in made)
    if workers is not None and workers != total:
        units = " x ".join(str(level.units) for level in made)
        raise ValueError(f"workers={workers!r}, but the levels have {units} = {total}: leave workers out")
    return made


def check_workers(workers: int) -> None:
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers={workers!r}: must be an int of at least 1")


def check_enough(stages: int | None, workers: int) -> None:
    if stages is not None and workers < stages:
        raise ValueError(
            f"workers={workers}: {stages} stages need a worker each, give {stages} or fewer stages"
        )


def _level(n: int, level: Sequence[float]) -> Level:
    try:
        made = Level(*level)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"levels[{n}]={level!r}: must be (units, bytes_per_s) or (units, bytes_per_s, latency_s)"
        ) from error
    if type(made.units) is not int or made.units < 1:
        raise ValueError(f"levels[{n}]: units={made.units!r}: must be an int of at least 1")
    for name, least in (("bytes_per_s", "above"), ("latency_s", "at least")):
        value = getattr(made, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"levels[{n}]: {name}={value!r}: must be a number")
        if not (value > 0 or (value == 0 and least == "at least")):
            raise ValueError(f"levels[{n}]: {name}={value!r}: must be {least} 0")
    return made


def pipedream_sync_s(size_bytes: float, workers: int, bytes_per_s: float) -> float:
    """PipeDream's time to synchronise weights over replicas, W_l(m) = 4 (m - 1) |w_l| / (m B)."""
    return 4 * (workers - 1) * size_bytes / (workers * bytes_per_s)


def ring_s(size_bytes: float, workers: int, bytes_per_s: float) -> float:
    """An all-reduce over a ring: every worker sends 2 (m - 1) / m of the bytes."""
    return 2 * (workers - 1) * size_bytes / (workers * bytes_per_s)
