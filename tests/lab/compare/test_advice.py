"""The sentence of advice: what it says for which figures."""

from dataclasses import replace

import pytest

from avgpipe_lab.compare.comparison import DOES_NOT_FIT, FAILED, OK, SystemResult
from avgpipe_lab.compare.text import advice, listed
from tests.lab.compare.comparisons import REPLICAS, at, compared, reaching

MIB = 2**20


def test_nothing_to_compare():
    broken = SystemResult("gpipe", FAILED, None, "no")
    assert advice(compared(broken)) == "Advice: none, as figures exist for no system."
    assert advice(compared(broken, a=at(10))) == "Advice: none, as figures exist for a only."


def test_the_fastest_pipeline_and_by_how_much():
    found = compared(gpipe=at(10), dapple=at(11.2), pipedream=at(5))
    assert advice(found) == "Advice: dapple is fastest here, 12 % faster than gpipe: use it."
    found = compared(gpipe=at(10), dapple=at(23))
    assert advice(found) == "Advice: dapple is fastest here, 2.3 times as fast as gpipe: use it."


def test_data_parallelism_where_it_is_fastest_and_fits():
    found = compared(gpipe=at(10), data_parallel=at(15, **REPLICAS))
    assert advice(found) == (
        "Advice: data-parallel is fastest here, 50 % faster than gpipe, and its model fits into each worker: use it."
    )


def test_data_parallelism_is_the_simplest_of_equals():
    found = compared(gpipe=at(10.3), data_parallel=at(10, **REPLICAS))
    assert advice(found) == (
        "Advice: gpipe and data-parallel are equally fast here (less than 5 % apart), data-parallel is the simplest of "
        "them, and its model fits into each worker: use it."
    )


def test_data_parallelism_that_does_not_fit_is_out_of_the_question():
    big = SystemResult("data-parallel", DOES_NOT_FIT, at(100, **REPLICAS), "needs 9 GiB")
    assert (
        advice(compared(big, gpipe=at(10), dapple=at(12)))
        == "Advice: dapple is fastest here, 20 % faster than gpipe: use it."
    )


def test_of_equally_fast_ones_the_smallest():
    found = compared(a=at(10), b=at(10.2, peak_memory_bytes=300 * MIB), c=at(10.4), d=at(9))
    assert advice(found) == (
        "Advice: c, b and a are equally fast here (less than 5 % apart): use b, which needs least memory (300 MiB)."
    )
    assert advice(compared(a=at(10), b=at(10))).endswith("(less than 5 % apart): take any of them.")


def test_speed_is_not_all_if_another_learns_more():
    found = compared(avgpipe=at(20, best_metric=150.0), gpipe=at(10, best_metric=120.0), trivial=900.0)
    assert advice(found) == (
        "Advice: avgpipe is fastest here, 2.0 times as fast as gpipe, but gpipe learned more from the same samples "
        "(perplexity 120 against 150): compare with a --target to see which reaches it first."
    )


@pytest.mark.parametrize("slow", [{"best_metric": 147.0}, {"best_metric": 160.0}, {"best_metric": None}])
def test_speed_is_all_if_no_other_learns_clearly_more(slow):
    found = compared(a=at(20, best_metric=150.0), b=at(10, **slow))
    assert advice(found) == "Advice: a is fastest here, 2.0 times as fast as b: use it."


def test_metrics_say_nothing_before_the_trivial_answer_is_beaten():
    found = compared(a=at(20, best_metric=1500.0), b=at(10, best_metric=1200.0), trivial=900.0)
    assert advice(found) == "Advice: a is fastest here, 2.0 times as fast as b: use it."


def test_a_target_decides_before_speed():
    found = compared(a=reaching(50.0), b=reaching(62.0), c=at(1000), target=100.0)
    assert (
        advice(found)
        == "Advice: a reached the target first, after 50.0 s of training; b needed 24 % longer: use a."
    )
    found = compared(a=reaching(50.0), b=reaching(150.0), target=100.0)
    assert "b needed 3.0 times as long: use a" in advice(found)


def test_a_target_reached_by_one_or_nearly_together():
    found = compared(a=reaching(50.0), b=at(1000), target=100.0)
    assert advice(found) == "Advice: only a reached the target, after 50.0 s of training: use it."
    found = compared(a=reaching(52.0), b=reaching(50.0), target=100.0)
    assert advice(found) == (
        "Advice: b and a reached the target first, after 50.0 s of training, less than 5 % apart: take any of them."
    )


def test_a_target_that_no_system_reached_leaves_the_speed():
    assert advice(compared(a=at(10), b=at(20), target=1.0)).startswith("Advice: b is fastest here")


def test_what_has_no_time_is_not_ranked_by_speed():
    nothing = at(10, samples=0)
    assert advice(compared(a=nothing, b=nothing)).endswith("no system trained long enough to be timed.")
    assert advice(compared(a=nothing, b=at(10))) == "Advice: b is fastest here: use it."


def test_names_are_listed():
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def seeds(*seconds):
    first, *others = map(reaching, seconds)
    return SystemResult("", OK, first, others=tuple(others))


def test_systems_whose_seeds_overlap_are_level():
    seconds = {"a": (20.0, 22.0, 30.0), "b": (28.0, 29.0, 31.0), "c": (40.0, 41.0, 42.0)}
    named = {name: replace(seeds(*times), system=name) for name, times in seconds.items()}
    said = advice(compared(*named.values(), target=100.0))
    assert said == (
        "Advice: a and b reached the target first, after 22.0 s of training, and the ranges of their seeds overlap: "
        "take any of them."
    )
    said = advice(compared(named["b"], named["c"], target=100.0))
    assert (
        said == "Advice: b reached the target first, after 29.0 s of training; c needed 41 % longer: use b."
    )
