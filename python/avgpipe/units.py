"""Quantities as text: as written in options and files, and as printed in reports.

A parser takes the name of its source (an option, a key of a file) first; its ValueError begins with that
name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_Number = TypeVar("_Number", int, float)


def parse_bytes(name: str, text: str, *, positive: bool = False, bare: bool = True) -> int:
    """Read a size such as "1MiB", "24GB" or, where ``bare``, "4096"."""
    size = _with_unit(text, _BYTES, "B" if bare else "")
    if size is None or size != int(size):
        raise ValueError(f"{name} {text}: write a size as 80GiB, 512MiB or 24GB")
    if positive and size == 0:
        raise ValueError(f"{name} {text}: must be more than 0")
    return int(size)


def parse_rate(name: str, text: str) -> float:
    """Read a rate such as "10Gbit"; in bytes per second."""
    bits = _with_unit(text, _BITS)
    if bits is None or not bits > 0:
        raise ValueError(f"{name} {text}: write a rate as 10Gbit, 250Mbit or 1e9bit")
    return bits / 8


def parse_seconds(name: str, text: str) -> float:
    """Read a duration such as "50us"."""
    seconds = _with_unit(text, _SECONDS)
    if seconds is None:
        raise ValueError(f"{name} {text}: write a time as 50us, 0.2ms or 0s")
    return seconds


def parse_numbers(
    name: str, text: str, kind: Callable[[str], _Number], example: str, *, least: float | None = None
) -> tuple[_Number, ...]:
    """Read numbers with commas between them.

    Args:
        name: The beginning of the error.
        text: As in "1,2,4".
        kind: int or float.
        example: The example that the error suggests.
        least: The smallest number that is accepted; None accepts all, infinite ones included.
    """
    try:
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not (least is None or all(least <= number < math.inf for number in numbers)):
        what = "whole numbers" if kind is int else "numbers"
        bound = "" if least is None else f" of at least {least:g}"
        raise ValueError(f"{name} {text}: write {what}{bound} with commas between, as {example}")
    return numbers


def parse_names(text: str | None) -> tuple[str, ...]:
    """Read names with commas between them; none from None."""
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _with_unit(text: Any, units: dict[str, float], default: str = "") -> float | None:
    """Return the value in the unit of factor 1; None if it is no finite number with such a unit."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or (match[2] or default) not in units:
        return None
    try:
        value = float(match[1]) * units[match[2] or default]
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def format_bytes(size: float) -> str:
    """Return three digits and the unit: "12.3 MiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def format_count(count: float) -> str:
    """Return three digits and the power of a thousand: "12.3 M"."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return three digits and the unit: "12.3 ms"."""
    unit, per_s = time_unit(seconds)
    value = seconds * per_s
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration in words: 42 s, 3:05 min, 2:07 h; "-" if it is not finite."""
    if not abs(seconds) < math.inf:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that suits a time, and how many of it make a second."""
    return ("s", 1.0) if seconds >= 2 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
