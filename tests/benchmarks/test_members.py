"""The simulated crowd of hosts around the true state machine of membership: short runs, and that broken rules show."""

from __future__ import annotations

from typing import Any

import pytest

from avgpipe.fault.members import Members
from avgpipe.fault.roster import Roster
from benchmarks.membership.crowd import Broken, Crowd, Setting
from benchmarks.simulation.members import meeting, replayed, summed, tape_of
from benchmarks.tables.exchange import members_promises, members_seconds


@pytest.mark.parametrize("seed", range(3))
def test_promises_hold_on_16_hosts_with_many_losses(seed: int) -> None:
    seen = Crowd(Setting(16, minutes=20, fault_s=15, again_s=(1, 20), seed=seed)).run()
    assert seen.steps >= 20 * 60
    assert seen.joins > 10
    assert seen.retrained > 10
    assert set(seen.faults) == {"killed", "stopped", "hung", "cut"}
    assert seen.waits < 60  # steps until one that joins begins, however many are lost meanwhile
    assert not any(
        "cannot exchange updates" in why for why in seen.reasons
    )  # its peers were lost, each by itself


def test_a_loss_is_in_the_roster_at_once_and_a_silent_one_after_the_timeout() -> None:
    seen = Crowd(Setting(8, minutes=60, cut_hosts=1, seed=4)).run()
    assert sorted(seen.roster_s["killed"])[len(seen.roster_s["killed"]) // 2] < 0.2
    assert all(25 < seconds < 90 for seconds in seen.roster_s["stopped"])


def _roster_without_wait(self: Members, number: int, *values: Any) -> Any:
    """A state machine that changes the roster before all have answered."""
    commands = _receive(self, number, *values)
    if self._frozen is not None:
        for group in self.living():
            for process in group.processes.values():
                process.answer = process.answer or next(
                    (p.answer for g in self.living() for p in g.processes.values() if p.answer), None
                )
        self._has_news = True
    return commands


def _forgets_what_is_owed(self: Members, *values: Any) -> None:
    _begin_epoch(self, *values)
    self._owed = {}


def _knows_another_state(self: Roster, turn: int) -> dict[int, Any]:
    """A roster in which a lost pipeline counts until its term ends."""
    found = {term.pipeline: term for term in self.terms if term.first <= turn < term.end}
    return dict(sorted(found.items()))


_receive, _begin_epoch = Members.receive, Members._begin_epoch


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ((Members, "receive"), _roster_without_wait),
        ((Members, "_begin_epoch"), _forgets_what_is_owed),
        ((Roster, "counting"), _knows_another_state),
    ],
)
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, place: Any, wrong: Any) -> None:
    monkeypatch.setattr(*place, wrong)
    crowds = [Crowd(Setting(16, minutes=20, fault_s=15, again_s=(1, 20), seed=seed)) for seed in range(5)]

    def run_all() -> None:
        for crowd in crowds:
            crowd.run()

    with pytest.raises(Broken):
        run_all()


def test_replayed_events_cost_the_state_machine_a_part_of_a_core() -> None:
    cost = replayed(tape_of(16, 2), 16, 180)
    assert 10 < cost["in_per_s"] < 20  # a report of each host each second
    assert cost["events_per_s"] > 0
    assert cost["change_bytes"] < cost["roster_bytes"]


def test_a_meeting_of_all_passes_on_the_cube_of_its_size() -> None:
    assert meeting(4) == {"messages": 16, "bytes": 16 * 2 * (154 + 32)}


def test_tables_have_a_column_or_a_row_for_each_number_of_hosts() -> None:
    runs = [Crowd(Setting(4, minutes=10, seed=seed)).run() for seed in range(2)]
    record = {"rows": [summed(4, 10, runs)]}
    assert members_promises(record).splitlines()[2].startswith("| 4 | 20 | ")
    assert members_seconds(record).splitlines()[0].endswith("| 4 hosts |")
