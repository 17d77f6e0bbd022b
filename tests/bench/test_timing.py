"""The order in which variants are measured."""

import itertools

import pytest

from avgpipe.bench import timing
from avgpipe.bench.section import Variant


@pytest.fixture
def calls(monkeypatch):
    """Names in the order of calls; every call lasts 1 s on the clock, so a sample is one call."""
    made = []
    ticks = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    return made


def variants(calls, names):
    return [Variant(name, "ours", 1.0, lambda name=name: calls.append(name)) for name in names]


def test_every_round_goes_through_all_variants(calls):
    samples = timing.measure(variants(calls, "ABC"), 3, "cpu")
    warm_up, measured = calls[:-9], calls[-9:]
    assert set(warm_up) == set("ABC")
    assert measured == list("ABCABCABC")
    assert [len(seconds) for seconds in samples] == [3, 3, 3]


def test_every_variant_is_warmed_up_twice(calls):
    timing.measure(variants(calls, "AB"), 1, "cpu")
    assert sorted(calls[:-2]) == list("AABB")


def test_short_calls_are_repeated_and_the_mean_is_taken(monkeypatch):
    made, clock = [], itertools.count(step=1e-4)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    (seconds,) = timing.measure(variants(made, "A"), 1, "cpu")
    repeats = len(made) - 2
    assert repeats == 20  # of 0.1 ms each make 2 ms
    assert seconds == [pytest.approx(1e-4 / 20)]  # this clock ticks once a sample
