"""Who trains when, where pipelines come and go."""

from __future__ import annotations

import json

from avgpipe.fault.roster import Roster, Term


def begun(*pipelines: int) -> Roster:
    return Roster([Term(i, number, 0) for number, i in enumerate(pipelines)])


def test_all_count_while_nothing_is_lost() -> None:
    roster = begun(0, 1, 2)
    assert roster.members(7) == [0, 1, 2]
    assert list(roster.counting(7)) == [0, 1, 2]


def test_a_lost_pipeline_counts_in_published_steps_and_is_a_member_of_begun_ones() -> None:
    roster = begun(0, 1)
    gone = roster.leave(1, published=5, begun=7)
    assert (gone.published, gone.end) == (5, 7)
    assert [roster.members(turn) for turn in (4, 5, 6, 7)] == [[0, 1], [0, 1], [0, 1], [0]]
    assert [list(roster.counting(turn)) for turn in (4, 5, 6, 7)] == [[0, 1], [0], [0], [0]]


def test_a_joining_pipeline_is_a_member_from_its_first_step_on() -> None:
    roster = begun(0, 1)
    roster.leave(1, published=5, begun=7)
    roster.enter(Term(1, 2, first=9, donor=0))
    assert [roster.members(turn) for turn in (8, 9)] == [[0], [0, 1]]
    assert [term.number for term in roster.joining(9)] == [2]
    assert roster.joining(8) == []


def test_one_that_is_lost_before_its_turn_was_never_there() -> None:
    roster = begun(0, 1)
    roster.enter(Term(2, 2, first=9, donor=0))
    gone = roster.leave(2, published=9, begun=6)
    assert (gone.published, gone.end) == (9, 9)
    assert roster.members(9) == [0, 1]


def test_another_one_gives_where_the_donor_is_lost() -> None:
    roster = begun(0, 1)
    roster.enter(Term(2, 2, first=9, donor=0))
    roster.enter(Term(3, 3, first=9, donor=0))
    roster.leave(0, published=6, begun=8)
    roster.change_donor(2)
    assert [term.donor for term in roster.joining(9)] == [1, 0]
    roster.leave(1, published=9, begun=10)
    assert roster.change_donor(3) is None  # who joins with it has no state to give


def test_the_oldest_on_each_host_speaks_as_long_as_it_is_there() -> None:
    hosts = ["b", "a", "b", "a"]
    roster = Roster([Term(i, number, 0, host=hosts[i]) for number, i in enumerate((3, 0, 1, 2))])
    assert [(host, term.pipeline) for host, term in roster.speakers(5).items()] == [("b", 0), ("a", 3)]
    roster.leave(3, published=7, begun=9, was_lost=True)
    assert [term.pipeline for term in roster.speakers(5).values()] == [0, 1]
    roster.enter(Term(3, 7, first=9, donor=0, host="c"))
    assert [[*roster.speakers(turn)] for turn in (8, 9)] == [["b", "a"], ["b", "a", "c"]]


def test_what_is_over_is_forgotten_and_the_rest_travels() -> None:
    roster = begun(0, 1)
    roster.leave(1, published=5, begun=7)
    roster.enter(Term(1, 2, first=9, donor=0))
    roster.forget(6)
    assert len(roster.terms) == 3
    roster.forget(7)
    assert [term.number for term in roster.terms] == [0, 2]
    assert Roster().changed(json.loads(json.dumps(roster.to_json())), 7).terms == roster.terms


def test_changed_terms_make_the_same_roster_of_one_that_is_known() -> None:
    roster, known = begun(0, 1, 2), begun(0, 1, 2)
    gone = roster.leave(1, published=5, begun=7)
    roster.enter(Term(1, 3, first=9, donor=0))
    known = known.changed(Roster([gone, roster.terms[-1]]).to_json(), roster.since)
    assert known.terms == roster.terms
    roster.forget(8)
    assert known.changed([], roster.since).terms == roster.terms
