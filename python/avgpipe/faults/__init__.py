"""Injected faults: their description and their effects; ``avgpipe.testing`` arms them."""

from __future__ import annotations

from avgpipe.ranks import environment as probe


def arm(text: str) -> None:
    """Arm the faults described in the environment; ValueError for an invalid text."""
    from avgpipe.faults.fault import armed_by

    probe.armed.extend(armed_by(text))
