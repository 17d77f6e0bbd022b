"""The rule that names slow workers, on readings as workers tell them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from avgpipe.runtime.pace import Reading, Stragglers

ALONE: list[list[int]] = [[], [], []]


def said(rows: Iterable[list[float | None]], alike: list[list[int]] | None = None) -> list[tuple[int, str]]:
    """What is said, with the number of the row of readings, of which each has one of every worker, in milliseconds."""
    alike = ALONE if alike is None else alike
    stragglers = Stragglers([f"rank {n} (stage {n})" for n in range(len(alike))], alike)
    found = []
    for number, row in enumerate(rows):
        readings = [None if ms is None else Reading(number, ms / 1e3) for ms in row]
        found += [(number, text) for text in stragglers.look(readings)]
    return found


def test_a_worker_that_becomes_slow_is_named_once_with_figures() -> None:
    rows = [[10, 20, 10]] * 5 + [[10, 20, 18]] * 20
    assert said(rows) == [
        (
            9,
            "rank 2 (stage 2) takes 1.8 times as long for a micro-batch as it did at first (18.0 ms, not 10.0 ms), the "
            "others 1.0 times: its device or host is slow, or shared",
        )
    ]


def test_it_is_reported_when_that_is_over_and_when_it_begins_again() -> None:
    rows = [[10, 20, 10]] * 5 + [[10, 40, 10]] * 6 + [[10, 21, 10]] * 6 + [[10, 60, 10]] * 6
    assert [(number, text.split(" (")[0], "again" in text) for number, text in said(rows)] == [
        (9, "rank 1", False),
        (15, "rank 1", True),
        (21, "rank 1", False),
    ]


def test_the_largest_stage_is_no_straggler() -> None:
    assert said([[10, 100, 10]] * 50) == []


def test_what_makes_all_slower_is_nobodys_fault() -> None:
    assert said([[10, 20, 10]] * 5 + [[30, 55, 28]] * 50) == []
    assert said([[10, 20, 10]] * 5 + [[16, 34, 15]] * 50) == []


def test_a_worker_that_is_slower_than_all_that_became_slower_is_named() -> None:
    ((_, text),) = said([[10, 20, 10]] * 5 + [[20, 40, 45]] * 50)
    assert text.startswith("rank 2 (stage 2) takes 4.5 times")
    assert "the others 2.0 times" in text


def test_moments_do_not_count() -> None:
    rows = [[10.0, 20.0, 10.0]] * 5 + [[10, 20, 10], [10, 90, 10], [10, 90, 10]] * 30
    assert said(rows) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_straggler(seed: int) -> None:
    """A third up or down each time, and now and then three times as long, on each worker by itself."""
    dice = random.Random(seed)

    def noisy(ms: float) -> float:
        return ms * dice.uniform(0.75, 1.35) * (3 if dice.random() < 0.05 else 1)

    assert said([noisy(10), noisy(20), noisy(10)] for _ in range(500)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_straggler_is_found_in_noise(seed: int) -> None:
    dice = random.Random(seed)
    noisy: Callable[[float], float] = lambda ms: ms * dice.uniform(0.9, 1.15)  # noqa: E731
    rows = [[noisy(10), noisy(20), noisy(10)] for _ in range(20)]
    rows += [[noisy(10), noisy(44), noisy(10)] for _ in range(20)]
    ((number, text),) = said(rows)
    assert text.startswith("rank 1 (stage 1) takes")
    assert 20 < number < 30


def test_replicas_of_a_stage_are_compared_from_the_beginning() -> None:
    rows = [[10.0, 20.0, 10.0]] * 10
    ((number, text),) = said(rows, alike=[[1, 2], [0, 2], [0, 1]])
    assert number == 4
    assert text.startswith(
        "rank 1 (stage 1) takes 2.0 times as long for a micro-batch as others do with the same work"
    )


def test_readings_that_are_not_there_or_not_new_do_not_count() -> None:
    stragglers = Stragglers(["a", "b"], [[], []])
    assert stragglers.look([None, None]) == []
    for number in range(5):
        assert stragglers.look([Reading(number, 1.0), Reading(number, 1.0)]) == []
    for _ in range(10):
        assert stragglers.look([Reading(4, 1.0), Reading(4, 9.0)]) == []
    assert stragglers.look([]) == []


def test_a_worker_alone_is_compared_with_none() -> None:
    assert said([[10.0]] * 5 + [[50.0]] * 20, alike=[[]]) == []
