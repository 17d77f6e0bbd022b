"""Schedules as data: what every stage runs, in which order. Pure data; imports no torch."""

from avgpipe.schedule.action import Action
from avgpipe.schedule.builders import build_schedule, schedule_names, warm_ups
from avgpipe.schedule.schedule import Schedule

__all__ = ["Action", "Schedule", "build_schedule", "schedule_names", "warm_ups"]
