"""What a run looked like: timelines, their pictures and traces."""

from avgpipe.report.timeline import COMPUTE_KINDS, Event, Timeline

__all__ = ["COMPUTE_KINDS", "Event", "Timeline"]
