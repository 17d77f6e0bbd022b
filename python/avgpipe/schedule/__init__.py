"""Schedules as data: the actions of every worker, in order. Imports no torch."""

from avgpipe.schedule.builders import (
    RECOMPUTE,
    WEIGHTS,
    build_schedule,
    checked_replication,
    published,
    schedule_names,
)
from avgpipe.schedule.one_stage import warm_ups
from avgpipe.schedule.row import Action, Kind, Row, RowCursor
from avgpipe.schedule.schedule import Schedule

__all__ = [
    "RECOMPUTE",
    "WEIGHTS",
    "Action",
    "Kind",
    "Row",
    "RowCursor",
    "Schedule",
    "build_schedule",
    "checked_replication",
    "published",
    "schedule_names",
    "warm_ups",
]
