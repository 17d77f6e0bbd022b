from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.model.balance import balance


def dearest(costs: list[float], first: list[int]) -> float:
    bounds = [0, *first, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


@given(st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))
    cuts = [list(c) for c in itertools.combinations(range(1, len(costs)), stages - 1)]
    first = balance(costs, stages)
    assert first in cuts
    assert dearest(costs, first) == min(dearest(costs, c) for c in cuts)


def test_layers_without_cost_may_stand_anywhere_but_no_stage_is_empty() -> None:
    assert balance([0, 0, 0], 3) == [1, 2]
    assert balance([1, 1, 1, 5], 2) == [3]


@pytest.mark.parametrize(
    ("costs", "stages"), [([1.0], 2), ([1.0], 0), ([], 1), ([-1.0, 1.0], 1), ([float("nan")], 1)]
)
def test_impossible_cuts_are_refused(costs: list[float], stages: int) -> None:
    with pytest.raises(ValueError, match=r"cannot cut|must be numbers"):
        balance(costs, stages)


def sent_over(sent: list[int], first: list[int]) -> int:
    return sum(sent[n - 1] for n in first)


@given(st.data())
def test_among_cuts_that_are_about_as_good_the_one_that_sends_least_is_taken(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 40).map(float), min_size=1, max_size=8))
    sent = data.draw(st.lists(st.integers(0, 3), min_size=len(costs) - 1, max_size=len(costs) - 1))
    stages = data.draw(st.integers(1, len(costs)))
    cuts = [list(c) for c in itertools.combinations(range(1, len(costs)), stages - 1)]
    limit = 1.05 * min(dearest(costs, c) for c in cuts) + 1e-9
    first = balance(costs, stages, sent)
    good = [c for c in cuts if dearest(costs, c) <= limit]
    assert first in good
    assert (sent_over(sent, first), dearest(costs, first)) == min(
        (sent_over(sent, c), dearest(costs, c)) for c in good
    )


def test_what_is_sent_only_decides_among_cuts_of_about_the_same_balance() -> None:
    assert balance([50, 50, 2, 50, 50], 2, [9, 9, 1, 9]) == [3]
    assert balance([50, 50, 2, 50, 50], 2, [9, 1, 9, 9]) == [2]
    assert balance([10, 10, 10, 10], 2, [0, 9, 0]) == [2]
    assert balance([1, 1, 0], 2, [5, 5]) == balance([1, 1, 0], 2)
