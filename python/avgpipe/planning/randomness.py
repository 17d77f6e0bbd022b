"""Jitter and stragglers: what a simulation draws, in whole numbers, so that every machine draws the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from avgpipe.planning.numbers import number

MOST_JITTER, MOST_FACTOR = 0.25, 1000.0
MOST_DEVIATIONS = 131070 / 37837.2  # of the sum of four uniform 16-bit numbers, in standard deviations
_DEVIATION = 37837.2


class Draws(NamedTuple):
    """As the engine takes them: times vary by ``jitter`` / 2^48 per unit of the sum of four 16-bit numbers;
    ``threshold`` of 2^32 draws are stragglers, which take ``factor`` / 2^16 times as long.
    """

    seed: int
    jitter: int
    threshold: int
    factor: int


def draws(jitter: float, stragglers: tuple[float, float] | None, seed: int) -> Draws:
    probability, factor = stragglers or (0.0, 1.0)
    return Draws(seed, round(jitter / _DEVIATION * 2**48), round(probability * 2**32), round(factor * 2**16))


def most_factor(jitter: float, stragglers: tuple[float, float] | None) -> float:
    """No time is multiplied by more."""
    return (1 + MOST_DEVIATIONS * jitter) * (stragglers or (0.0, 1.0))[1]


def least_factor(jitter: float) -> float:
    """No time is multiplied by less."""
    return 1 - MOST_DEVIATIONS * jitter


def checked_jitter(jitter: Any) -> float:
    found = number("jitter", jitter)
    if found > MOST_JITTER:
        raise ValueError(f"jitter={jitter!r}: must be at most {MOST_JITTER}, use stragglers for rarer delays")
    return found


def checked_stragglers(stragglers: Any) -> tuple[float, float] | None:
    if stragglers is None:
        return None
    if not isinstance(stragglers, (tuple, list)) or len(stragglers) != 2:
        raise TypeError(f"stragglers={stragglers!r}: give (probability, factor), or None")
    probability = number("stragglers[0]", stragglers[0])
    factor = number("stragglers[1]", stragglers[1])
    if probability > 1:
        raise ValueError(f"stragglers[0]={probability:g}: a probability is at most 1")
    if not 1 <= factor <= MOST_FACTOR:
        raise ValueError(f"stragglers[1]={factor:g}: must be between 1 and {MOST_FACTOR:g}")
    return probability, factor


def checked_seed(seed: Any) -> None:
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r}: must be an int from 0 to 2**64 - 1")
