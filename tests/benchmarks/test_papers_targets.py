"""Samples to a target between validations, their spread over seeds, and what they make of seconds per epoch."""

import json
from math import inf

import pytest

from benchmarks.papers import targets
from benchmarks.papers.targets import joined, table, way_of
from benchmarks.statistics.samples import by_way, passes_to, samples_to, target_of

LOSSES = [(100, 4.0), (200, 3.0), (300, 3.5), (400, 2.0)]


@pytest.mark.parametrize(
    ("target", "samples"),
    [(3.5, 150), (3.0, 200), (2.75, 350), (2.0, 400), (1.9, inf), (4.0, 100), (5.0, 100)],
)
def test_samples_to_a_target_lie_on_the_line_between_validations(target, samples):
    assert samples_to(LOSSES, target) == pytest.approx(samples)


def test_without_validations_nothing_is_reached():
    assert samples_to([], 1.0) == inf


def runs():
    """Three seeds of three ways: at once, with 10 % more samples, and one that mostly fails."""
    made = []
    for seed, shift in enumerate((0.0, 0.1, 0.2)):
        for way, factor in (("one", 1.0), ("2bw", 1.1)):
            losses = [[factor * 100 * n, 5.0 - n + shift] for n in range(1, 4)]
            made.append({"workload": "gnmt", "way": way, "seed": seed, "lr": 0.01, "losses": losses})
        end = 2.5 if seed == 0 else 4.0
        failing = [[100, 4.5], [300, end]]
        made.append({"workload": "gnmt", "way": "N = 4", "seed": seed, "lr": 0.01, "losses": failing})
    return [*made, {"workload": "gpt", "way": "one", "seed": 0, "lr": 0.01, "losses": [[1, 1.0]]}]


def test_passes_are_over_the_baseline_with_the_same_seed():
    ways = by_way(runs(), "gnmt")
    assert set(ways) == {"one", "2bw", "N = 4"}
    assert passes_to(ways, "one", 3.0) == (1, 1, 1)
    assert passes_to(ways, "2bw", 3.0) == pytest.approx((1.1, 1.1, 1.1))
    failed = passes_to(ways, "N = 4", 3.0)
    assert failed.median == failed.most == inf
    assert failed.least < 300 / 200
    del ways["2bw"][2], ways["2bw"][1]
    assert passes_to(ways, "2bw", 3.0) == pytest.approx((1.1, 1.1, 1.1))


def test_a_target_is_one_that_the_baseline_reaches():
    assert target_of(by_way(runs(), "gnmt"), 0.01) == pytest.approx(1.01 * 2.2)


def row(system, way="", epoch_s=60.0, wire_bits=32):
    epochs = {"epoch_s": {"WMT": epoch_s}}
    return {"system": system, "way": way, "described": "K = 6", "wire_bits": wire_bits, **epochs}


@pytest.mark.parametrize(
    ("system", "way", "trained"),
    [
        ("GPipe", "", "one"),
        ("PipeDream", "", None),
        ("PipeDream-2BW", "", "2bw"),
        ("AvgPipe, N = 1", "", "one"),
        ("AvgPipe (G), N = 3", "", "N = 4"),
        ("AvgPipe (P), best", "2BW, error-feedback", "2bw, error feedback"),
        ("AvgPipe, best", "elastic, N = 2", "N = 2, avgpipe"),
        ("AvgPipe (G), halves predicted", "", "halves, predicted"),
        ("AvgPipe (G), N = 2", "", "N = 2, warm-up"),
        ("AvgPipe, a pipeline on each host", "", None),
    ],
)
def test_a_system_was_trained_as_one_of_the_ways(system, way, trained):
    known = (
        "one",
        "2bw",
        "N = 2",
        "N = 2, warm-up",
        "N = 4",
        "2bw, error feedback",
        "N = 2, avgpipe",
        "halves, predicted",
    )
    assert way_of(row(system, way), known) == trained


@pytest.mark.parametrize("system", ["GPipe, 16 bits", "AvgPipe, N = 1", "AvgPipe (G), 16 bits, best"])
def test_narrow_wires_are_trained_as_such_or_stand_for_it(system):
    bits = 16 if "16" in system else 32
    found = row(system, "N = 1", wire_bits=bits)
    assert way_of(found, ("one", "one, 16 bits")) == ("one, 16 bits" if bits == 16 else "one")
    assert way_of(found, ("one",)) == "one"


def test_time_to_target_is_seconds_per_epoch_times_passes():
    case = {
        "rows": [row("GPipe"), row("PipeDream"), row("PipeDream-2BW", epoch_s=50.0), row("AvgPipe, N = 4")]
    }
    gpipe, untrained, late, failed = joined(case, by_way(runs(), "gnmt"), 3.0, epochs=2)
    assert gpipe["passes"] == pytest.approx([1, 1, 1])
    assert gpipe["seconds_to_target"]["WMT"][0] == pytest.approx(120)
    assert late["seconds_to_target"]["WMT"] == pytest.approx([110, 110, 110])
    assert untrained["passes"] is None
    assert failed["passes"][0] is None  # most seeds did not reach it
    assert failed["seconds_to_target"]["WMT"][0] is None
    assert table("a title", [gpipe, untrained, late, failed]).row_count == 4


def test_a_target_that_the_baseline_misses_says_which_one_it_reaches():
    with pytest.raises(
        ValueError, match=r"target 1: way 'one' does not .* every seed; give one of at least 2.2"
    ):
        passes_to(by_way(runs(), "gnmt"), "2bw", 1.0)


def test_the_program_joins_files(tmp_path, monkeypatch, capsys):
    case = {"model": "gnmt", "batch_size": 128, "devices": "all devices", "rows": [row("GPipe")]}
    other = {**case, "model": "bert"}
    (tmp_path / "emulated.json").write_text(json.dumps({"cases": [case, other]}))
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs()))
    monkeypatch.setattr(targets, "write_record", lambda *given: found.append(given))
    monkeypatch.setattr(
        "sys.argv",
        ["targets", str(tmp_path / "emulated.json"), str(tmp_path / "runs.jsonl"), "--targets", "gnmt=3"],
    )
    found = []
    targets.main()
    (_, _, record, _) = found[0]
    assert [case["target"] for case in record["cases"]] == [3.0]
    assert "bert: no run of workload 'bert'" in capsys.readouterr().out
