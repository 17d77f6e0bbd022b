"""The waits of a run whose processes may be lost, beside a Pipeline's ``timeout_s``: one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Waits in seconds; docs/design/failure.md says what waits, and how they follow each other.

    Attributes whose names end in ``poll_s``, ``look_s`` or ``tick_s`` are the times between two looks; the others are
    the longest waits.
    """

    # of the launcher
    poll_s: float = 0.05
    look_s: float = 0.02
    blame_s: float = 2.0
    stopped_s: float = 8.0
    store_s: float = 10.0
    start_s: float = 300.0
    sure_s: float = 1.0
    again_s: float = 60.0
    closed_end_s: float = 10.0
    reported_end_s: float = 30.0
    join_answer_s: float = 60.0
    join_end_s: float = 3.0
    join_alive_s: float = 1.0
    join_silent_s: float = 30.0
    # of ranks that meet
    store_answer_s: float = 2.0
    meet_poll_s: float = 0.02
    connect_look_s: float = 0.5
    connect_end_s: float = 2.0
    roll_call_s: float = 2.0
    # of ranks that train
    # More than timeout_s: a group's own timeout ends after ours, whose error says more. Short: a process cannot end
    # while gloo waits.
    group_spare_s: float = 3.0
    tick_s: float = 0.5
    note_s: float = 5.0
    watchdog_end_s: float = 5.0
    preempt_look_s: float = 0.2
    grace_s: float = 3.0
    # of ranks that are to go on without a lost one
    lost_links_s: float = 0.0
    save_end_s: float = 0.5
    # For the launcher to report a lost or stopped process; else a connection was lost, and no rank is replaced.
    lost_notice_s: float = 5.0
    stopped_notice_s: float = 2.0
    generation_look_s: float = 0.01
    donor_look_s: float = 0.05


LIMITS = Limits()
