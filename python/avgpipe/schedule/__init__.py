"""Schedules as data: what every stage runs, in which order. Pure data; imports no torch."""

from avgpipe.schedule.action import Action
from avgpipe.schedule.builders import build_schedule, schedule_names, warm_ups
from avgpipe.schedule.schedule import Schedule
from avgpipe.schedule.stream import Step, Stream

__all__ = ["Action", "Schedule", "Step", "Stream", "build_schedule", "schedule_names", "warm_ups"]
