"""Timelines of runs, their breakdown by causes, their pictures and traces."""

from avgpipe.schedule.row import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.timeline import StageTime, Timeline

__all__ = ["COMPUTE_KINDS", "Event", "EventKind", "StageTime", "Timeline"]
