"""Rows of hand-made samples."""

import io
import json

import pytest
from rich.console import Console

from avgpipe_lab.bench import Way, summarise, table

HEAD = {
    "question": "pull",
    "case": "one tensor",
    "asks": "How fast?",
    "elements": 1_000_000,
}


def way(name, role, bytes_per_element=8.0):
    return Way(name, role, bytes_per_element)


WAYS = [
    way("limit", "limit"),
    way("other limit", "limit"),
    way("ours", "ours", 16.0),
    way("ours, too", "ours"),
    way("slow", "baseline", 16.0),
    way("slower", "baseline", 16.0),
]
SAMPLES = [
    [0.001, 0.003, 0.002, 0.004, 0.005],
    [0.001] * 5,
    [0.004] * 5,
    [0.001] * 5,
    [0.006] * 5,
    [0.012] * 5,
]


@pytest.fixture
def section():
    return summarise(HEAD, WAYS, SAMPLES, {"absent": "no such library"})


def row(section, name):
    return next(row for row in section["rows"] if row["name"] == name)


def test_medians_and_quartiles_are_milliseconds(section):
    found = row(section, "limit")
    assert [found[key] for key in ("quartile1_ms", "median_ms", "quartile3_ms")] == pytest.approx([2, 3, 4])


def test_bandwidth_counts_a_billion_bytes_a_second(section):
    assert row(section, "ours")["gb_per_s"] == pytest.approx(1e6 * 16 / 0.004 / 1e9)


def test_fractions_are_of_the_first_limit(section):
    assert section["limit"] == "limit"
    assert row(section, "limit")["fraction_of_limit"] == 1.0
    assert row(section, "ours")["fraction_of_limit"] == pytest.approx((16 / 0.004) / (8 / 0.003))


def test_ratios_are_of_baselines(section):
    assert row(section, "ours")["ratios"] == pytest.approx({"slow": 1.5, "slower": 3.0})
    assert row(section, "ours, too")["ratios"] == pytest.approx({"slow": 6.0, "slower": 12.0})
    assert row(section, "slow")["ratios"] == {}


def test_without_a_limit_there_are_no_fractions():
    (found,) = summarise(HEAD, WAYS[2:3], [[0.5]], {})["rows"]
    assert found["fraction_of_limit"] is None
    assert (found["quartile1_ms"], found["median_ms"], found["quartile3_ms"]) == (500, 500, 500)


def test_what_moves_no_bytes_is_measured_by_its_time_and_beside_its_simulation():
    head = {name: value for name, value in HEAD.items() if name != "elements"}
    found = summarise(
        head, [Way("limit", "limit"), Way("ours", "ours", simulated_s=0.2)], [[0.1], [0.25]], {}
    )
    limit, ours = found["rows"]
    assert ours["fraction_of_limit"] == pytest.approx(0.4)
    assert (ours["simulated_ms"], ours["over_simulated"]) == pytest.approx((200, 1.25))
    assert not {"bytes_per_element", "gb_per_s"} & {*limit, *ours}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(found))
    text = console.export_text()
    assert "simulated" in text
    assert "GB/s" not in text


def test_a_section_is_json(section):
    assert json.loads(json.dumps(section)) == section
    assert section["skipped"] == [{"name": "absent", "reason": "no such library"}]


def test_the_table_has_a_row_for_each_way_and_says_what_else_is_to_be_known(section):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(section))
    text = console.export_text()
    assert "pull, one tensor, 1 M elements" in text
    assert "1.50x" in text
    for line in ("How fast?", "limit: limit", "absent: no such library"):
        assert line in text
