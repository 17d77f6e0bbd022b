"""Spans of time in words."""

from __future__ import annotations


def unit_of(span_s: float) -> tuple[str, float]:
    """The unit in which a span reads well, and how many of it make a second."""
    return ("s", 1.0) if span_s >= 2 else ("ms", 1e3) if span_s >= 2e-3 else ("µs", 1e6)


def in_words(span_s: float) -> str:
    """Three digits and the unit: "12.3 ms"."""
    unit, per_s = unit_of(span_s)
    value = span_s * per_s
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
