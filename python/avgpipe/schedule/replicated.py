"""Kept for the runtime's own order of work, see avgpipe.schedule.builders."""

from avgpipe.schedule.builders import warm_up

__all__ = ["warm_up"]
