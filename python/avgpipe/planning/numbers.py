"""Checks the numbers that costs are made of, and spreads them over stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

Each = float | tuple[float, ...]
"""A cost of a stage or boundary: of all micro-batches, or one of each."""

_OF_BOUNDARIES = ("transfer_s", "gradient_transfer_s", "latency_s")  # one number less than there are stages


def checked(name: str, value: Any) -> float | tuple[float, ...]:
    """A number of at least 0, or a tuple of them; TypeError and ValueError for anything else."""
    if isinstance(value, Real):
        return number(name, value)
    return tuple(number(f"{name}[{k}]", entry) for k, entry in enumerate(_entries(name, value)))


def checked_each(name: str, value: Any) -> float | tuple[Each, ...]:
    """The same, and an entry may be a sequence itself: a number per micro-batch."""
    if isinstance(value, Real):
        return number(name, value)
    return tuple(
        number(f"{name}[{k}]", entry) if _is_plain(entry) else _of_micro_batches(f"{name}[{k}]", entry)
        for k, entry in enumerate(_entries(name, value))
    )


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, str) or not hasattr(entry, "__len__")


def _of_micro_batches(name: str, entry: Iterable[Any]) -> tuple[float, ...]:
    numbers = tuple(number(f"{name}[{m}]", value) for m, value in enumerate(entry))
    if not numbers:
        raise ValueError(f"{name} is empty: give a number, or a list of one number per micro-batch")
    return numbers


def _entries(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r}: must be a number, or a list of one number per stage")
    entries = list(value)
    if not entries and name not in _OF_BOUNDARIES:  # one stage has none
        raise ValueError(f"{name} is empty: give a number, or a list of one number per stage")
    return entries


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number")
    found = float(value)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
    return found


def spread(name: str, value: float | Sequence[float], count: int) -> list[float]:
    """One number per stage or boundary; ValueError for a sequence of another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    return list(_of_length(name, value, count))


def spread_each(
    name: str, value: float | Sequence[float | Sequence[float]], count: int, micro_batches: int | None
) -> list[Each]:
    """The same of what :func:`checked_each` made, whose entries have ``micro_batches`` numbers if not one."""
    if not isinstance(value, Sequence):
        return [value] * count
    spread: list[Each] = []
    for k, entry in enumerate(_of_length(name, value, count)):
        if isinstance(entry, Sequence) and len(entry) != micro_batches:
            raise ValueError(
                f"{name}[{k}] has {len(entry)} entries for {micro_batches or 'an unknown number of'} micro-batches: "
                "give one for each, or one number for all"
            )
        spread.append(tuple(entry) if isinstance(entry, Sequence) else entry)
    return spread


def _of_length(name: str, value: Sequence[Any], count: int) -> Sequence[Any]:
    if len(value) != count:
        places = "boundaries" if name in _OF_BOUNDARIES else "stages"
        raise ValueError(
            f"{name} has {len(value)} entries for {count} {places}: give {count}, or one number for all"
        )
    return value


def total(cost: Each, micro_batches: int) -> float:
    """Of all micro-batches of a batch."""
    return sum(cost) if isinstance(cost, tuple) else micro_batches * cost


def least(cost: Each) -> float:
    return min(cost) if isinstance(cost, tuple) else cost
