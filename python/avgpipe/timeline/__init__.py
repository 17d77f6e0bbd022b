"""What a run looked like: timelines, where their time went, their pictures and traces."""

from avgpipe.schedule.event import COMPUTE_KINDS, Event, EventKind
from avgpipe.timeline.timeline import StageTime, Timeline

__all__ = ["COMPUTE_KINDS", "Event", "EventKind", "StageTime", "Timeline"]
