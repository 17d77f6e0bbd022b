"""Faults on purpose: what they are, and what they do; ``avgpipe.testing`` arms them."""

from __future__ import annotations

from avgpipe.ranks import probe


def arm(text: str) -> None:
    """Arm what the environment asks for; ValueError for what is no such text."""
    from avgpipe.faults.fault import armed_by

    probe.armed.extend(armed_by(text))
