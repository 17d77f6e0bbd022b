import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import Costs, advance, choose_advance, steady_batch_s
from avgpipe.schedule import build_schedule

LINE = Costs(0.010, 0.020, 0.0087)


def every_choice(stages, micro_batches, costs, pipelines, held):
    """(bytes, seconds) of every advance that can be run, by brute force."""
    found = []
    for vector in product(range(micro_batches), repeat=stages):
        try:
            schedule = build_schedule("advance-forward", stages, micro_batches, list(vector))
        except ValueError:
            continue
        seconds = steady_batch_s(schedule, costs, pipelines=pipelines)
        found.append((sum(p * h for p, h in zip(schedule.peak_in_flight, held)), seconds))
    return found


@st.composite
def problems(draw, most_stages, most_micro_batches):
    stages = draw(st.integers(1, most_stages))
    micro_batches = draw(st.integers(1, most_micro_batches))
    forward_s = [draw(st.integers(3, 12)) / 1000 for _ in range(stages)]
    transfer_s = draw(st.sampled_from([0.001, 0.0087, 0.03]))
    held = [draw(st.integers(1, 4)) for _ in range(stages)]
    costs = Costs(forward_s, [2 * f for f in forward_s], transfer_s, activation_bytes=held)
    return stages, micro_batches, costs, held


@settings(max_examples=15)
@given(problems(3, 5), st.integers(1, 2))
def test_small_problems_have_the_answer_of_an_exhaustive_search(problem, pipelines):
    stages, micro_batches, costs, held = problem
    choice = choose_advance(stages, micro_batches, costs, pipelines=pipelines)
    found = every_choice(stages, micro_batches, costs, pipelines, held)
    best = min(seconds for _, seconds in found)
    assert choice.best_seconds == best
    enough = [each for each in found if each[1] <= 1.01 * best]
    assert sum(p * h for p, h in zip(choice.peak_in_flight, held)) == min(enough)[0]
    assert choice.seconds == min(enough)[1]


@settings(max_examples=10)
@given(problems(3, 6), st.integers(1, 2))
def test_the_search_for_larger_problems_comes_close_to_the_exhaustive_one(problem, pipelines):
    stages, micro_batches, costs, held = problem
    exact = choose_advance(stages, micro_batches, costs, pipelines=pipelines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advance, "EXHAUSTIVE_UP_TO", 0)
        choice = choose_advance(stages, micro_batches, costs, pipelines=pipelines)
    assert choice.best_seconds <= 1.05 * exact.best_seconds
    assert choice.seconds <= 1.01 * choice.best_seconds
    if choice.best_seconds == exact.best_seconds:
        spent, least = (sum(p * h for p, h in zip(each.peak_in_flight, held)) for each in (choice, exact))
        assert spent <= 1.25 * least


@settings(max_examples=10)
@given(problems(5, 8), st.integers(1, 2))
def test_a_choice_says_what_its_schedule_does(problem, pipelines):
    stages, micro_batches, costs, _ = problem
    choice = choose_advance(stages, micro_batches, costs, pipelines=pipelines)

    def seconds(vector):
        schedule = build_schedule("advance-forward", stages, micro_batches, vector)
        return steady_batch_s(schedule, costs, pipelines=pipelines)

    assert choice.seconds == seconds(choice.advance) <= 1.01 * choice.best_seconds
    assert choice.default_seconds == seconds(None) >= choice.best_seconds
    assert choice.one_f_one_b_seconds == seconds(0) >= choice.best_seconds
    schedule = build_schedule("advance-forward", stages, micro_batches, choice.advance)
    assert choice.peak_in_flight == schedule.peak_in_flight


@pytest.mark.parametrize(("pipelines", "milliseconds"), [(1, 597), (2, 360), (3, 360)])
def test_six_stages_reach_the_bound_with_less_memory_than_all_forwards_first(pipelines, milliseconds):
    choice = choose_advance(6, 12, LINE, pipelines=pipelines)
    assert choice.seconds == pytest.approx(milliseconds / 1000, rel=0.01)
    assert sum(choice.peak_in_flight) <= 6 + 2 * 15  # as the default K-1-k
    if pipelines == 3:
        assert choice.advance == [0] * 6


def test_no_advance_is_chosen_where_there_is_nothing_to_hide():
    assert choose_advance(4, 8, Costs(0.01, 0.02)).advance == [0, 0, 0, 0]
    assert choose_advance(1, 8, LINE).advance == [0]
    assert choose_advance(3, 1, LINE).advance == [0, 0, 0]
    assert choose_advance(4, 2, LINE).peak_in_flight == [2, 2, 2, 1]


def test_long_transfers_want_more_advance():
    chosen = [choose_advance(3, 8, Costs(0.01, 0.02, t)).peak_in_flight for t in (0.002, 0.01, 0.02)]
    assert sum(chosen[0]) < sum(chosen[1]) < sum(chosen[2])


def test_memory_limits_the_advance():
    costs = Costs(0.01, 0.02, 0.02, activation_bytes=[100, 50, 50], weight_bytes=1000)
    free = choose_advance(3, 8, costs, pipelines=2)
    assert free.peak_in_flight[0] > 4
    limited = choose_advance(3, 8, costs, pipelines=2, memory_limit_bytes=2 * (1000 + 4 * 100))
    assert limited.peak_in_flight[0] <= 4
    assert limited.best_seconds > free.best_seconds
    assert limited.default_seconds == free.default_seconds
    assert "within 1 % of the best under the memory limit, " in str(limited)


def test_a_limit_that_nothing_reaches_changes_nothing():
    costs = Costs(0.01, 0.02, 0.02, activation_bytes=100)
    limited = choose_advance(3, 8, costs, memory_limit_bytes=float("inf"))
    assert limited.advance == choose_advance(3, 8, costs).advance


def test_costs_of_nothing_take_no_time():
    choice = choose_advance(6, 12, Costs(0, 0), pipelines=2)
    assert choice.advance == [0] * 6
    assert choice.seconds == 0


def test_a_limit_that_just_fits_1f1b_gives_1f1b():
    costs = Costs(0.01, 0.02, 0.02, activation_bytes=[0.1, 0.15, 0.3])
    assert choose_advance(3, 8, costs, memory_limit_bytes=0.30000000000000004).advance == [0, 0, 0]


def test_a_limit_below_1f1b_is_refused_with_the_way_out():
    costs = Costs(0.01, 0.02, activation_bytes=100, weight_bytes=1000)
    with pytest.raises(
        ValueError, match=r"memory_limit_bytes=2599: stage 0 needs 2600 even with 1F1B \(2 pipelines, 3 "
    ):
        choose_advance(3, 8, costs, pipelines=2, memory_limit_bytes=2599)
    with pytest.raises(ValueError, match=r"give Costs\(activation_bytes"):
        choose_advance(3, 8, LINE, memory_limit_bytes=10)
    for value in ("2GiB", True, 0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"memory_limit_bytes={value!r}: must be a number of bytes"):
            choose_advance(3, 8, costs, memory_limit_bytes=value)


def test_the_explanation_has_the_choice_and_the_reason():
    assert str(choose_advance(3, 8, Costs(0.01, 0.02, 0.01))).splitlines() == [
        "advance 2,1,0: 340.0 ms per batch predicted, 5,3,1 micro-batches held per stage and pipeline",
        "the least memory within 1 % of the best, 340.0 ms; the default K-1-k takes 340.0 ms, 1F1B 420.0 ms",
    ]


@pytest.mark.parametrize(("pipelines", "transfer_s"), [(1, 0.02), (2, 0.0087), (2, 0.03)])
def test_a_choice_is_quick(pipelines, transfer_s):
    begun = time.process_time()
    choose_advance(6, 12, Costs(0.01, 0.02, transfer_s), pipelines=pipelines)
    assert time.process_time() - begun < 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4, LINE), "stages=0"), ((2, "4", LINE), "micro_batches='4'"), ((2, 4, None), "costs=None")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        choose_advance(*arguments)
    with pytest.raises(ValueError, match="batches=5: 2 pipelines"):
        choose_advance(2, 4, LINE, pipelines=2, batches=5)
    with pytest.raises(ValueError, match="pipelines=True"):
        choose_advance(2, 4, LINE, pipelines=True)
