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


def test_another_one_gives_where_the_donor_is_lost_in_time() -> None:
    roster = begun(0, 1)
    roster.enter(Term(2, 2, first=9, donor=0))
    roster.leave(0, published=6, begun=8)
    assert [term.donor for term in roster.joining(9)] == [1]
    late = begun(0, 1)
    late.enter(Term(2, 2, first=9, donor=0))
    late.leave(0, published=9, begun=10)  # turn 9 has begun: who has come may lack its state
    assert [term.donor for term in late.joining(9)] == [0]


def test_what_is_over_is_forgotten_and_the_rest_travels() -> None:
    roster = begun(0, 1)
    roster.leave(1, published=5, begun=7)
    roster.enter(Term(1, 2, first=9, donor=0))
    roster.forget(6)
    assert len(roster.terms) == 3
    roster.forget(7)
    assert [term.number for term in roster.terms] == [0, 2]
    assert Roster.from_json(json.loads(json.dumps(roster.to_json()))).terms == roster.terms
