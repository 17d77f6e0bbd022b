"""Rows of hand-made samples."""

import json

import pytest

from avgpipe.bench.result import SectionResult, summarise
from avgpipe.bench.section import Section, Skipped, Variant


def variant(name, role, bytes_per_element=8.0, **options):
    return Variant(name, role, bytes_per_element, lambda: None, **options)


def section(elements=1_000_000):
    return Section("pull", "one tensor", "How fast?", elements, 1234, list)


VARIANTS = [
    variant("limit", "limit"),
    variant("other limit", "limit"),
    variant("ours", "ours", 16.0),
    variant("ours, less work", "ours", 12.0, against=()),
    variant("ours, other work", "ours", against=("slow",)),
    variant("slow", "baseline", 16.0),
    variant("slower", "baseline", 16.0, compile_s=3.0),
]
SAMPLES = [
    [0.001, 0.003, 0.002, 0.004, 0.005],
    [0.001] * 5,
    [0.004] * 5,
    [0.002] * 5,
    [0.001] * 5,
    [0.006] * 5,
    [0.012] * 5,
]


@pytest.fixture
def result():
    return summarise(section(), VARIANTS, SAMPLES, [Skipped("absent", "no such library")])


def test_medians_and_quartiles(result):
    row = result["limit"]
    assert (row.quartile1_s, row.median_s, row.quartile3_s) == (0.002, 0.003, 0.004)


def test_bandwidth_counts_a_billion_bytes_a_second(result):
    assert result["ours"].gb_per_s == pytest.approx(1e6 * 16 / 0.004 / 1e9)


def test_fractions_are_of_the_first_limit(result):
    assert result.limit == "limit"
    assert result["limit"].fraction_of_limit == 1.0
    assert result["ours"].fraction_of_limit == pytest.approx((16 / 0.004) / (8 / 0.003))


def test_ratios_say_how_many_times_longer_a_baseline_took(result):
    assert result["ours"].ratios == pytest.approx({"slow": 1.5, "slower": 3.0})
    assert result["slow"].ratios == {}


def test_ratios_are_between_variants_that_do_the_same_work(result):
    assert result["ours, less work"].ratios == {}
    assert result["ours, other work"].ratios == pytest.approx({"slow": 6.0})


def test_without_a_limit_there_are_no_fractions():
    row = summarise(section(), VARIANTS[2:3], [[0.5]])["ours"]
    assert row.fraction_of_limit is None
    assert (row.quartile1_s, row.median_s, row.quartile3_s) == (0.5, 0.5, 0.5)


def test_json_has_milliseconds_and_what_was_left_out(result):
    answer = json.loads(json.dumps(result.to_json()))
    assert SectionResult.from_json(answer).to_json() == answer
    assert answer["rows"][0]["median_ms"] == pytest.approx(3.0)
    assert answer["rows"][-1]["compile_s"] == 3.0
    assert "compile_s" not in answer["rows"][0]
    assert answer["skipped"] == [{"name": "absent", "reason": "no such library"}]
