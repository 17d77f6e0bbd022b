"""Results as values, tables and pictures."""

import io
import json

import pytest
from rich.console import Console

from avgpipe.bench.schedules.our_plans import our_cases
from avgpipe.bench.schedules.picture import plot_schedules
from avgpipe.bench.schedules.result import ScheduleResult, summarise
from avgpipe.bench.schedules.rows import Unavailable
from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.bench.schedules.table import table
from tests.cli.command import ROOT


def made(**options):
    rows = [
        {"name": "avgpipe advance-forward, N = 2", "seconds": [0.4, 0.36, 0.38]},
        {"name": "torch 1f1b", "seconds": [0.76]},
    ]
    rank = {
        "line_bytes_per_s": 1.2e8,
        "rows": rows,
        "unavailable": [{"name": "torch zero-bubble, 1 a rank", "reason": "M is odd"}],
    }
    return summarise(ScheduleSettings(**options), [rank])


def test_rows_have_medians_and_quartiles():
    row, other = made().rows
    assert (row.median_s, row.quartile1_s, row.quartile3_s) == pytest.approx((0.38, 0.37, 0.39))
    assert (other.quartile1_s, other.median_s, other.quartile3_s) == (0.76, 0.76, 0.76)
    assert row.is_ours
    assert not other.is_ours


def test_the_limit_is_what_binds():
    assert made().limit_s == pytest.approx(0.36)
    assert made(rate_bits_per_s=1e9).limit_s == pytest.approx(0.36)
    assert made(rate_bits_per_s=1e9, activation_bytes=2**22).limit_s == pytest.approx(0.8053, abs=1e-4)


def test_results_go_through_json():
    result = made(rate_bits_per_s=1e9)
    text = json.dumps(result.to_json())
    assert json.loads(text)["emulated"] is True
    assert ScheduleResult.from_json(json.loads(text)) == result


def test_the_table_says_what_was_emulated_and_compares():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(made(rate_bits_per_s=1e9)))
    text = console.export_text()
    assert "emulated: K = 6, M = 12" in text
    assert "2.00x" in text
    assert "0.960 Gbit/s" in text
    assert "left out: torch zero-bubble, 1 a rank: M is odd" in text


def test_the_picture_has_a_bar_for_each_row_and_a_line_for_each_bound(tmp_path):
    result = made(rate_bits_per_s=1e9)
    figure = plot_schedules([result, made()], "a machine", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    axes = figure.axes[0]
    assert len(axes.patches) == len(result.rows)
    assert len(axes.get_legend().get_texts()) == len(result.bounds) + 1  # and the simulated times


def test_a_bar_many_times_as_long_as_the_others_leaves_the_picture():
    rows = [{"name": "avgpipe model-parallel", "seconds": [6.0]}]
    rows += [{"name": f"torch {n}", "seconds": [0.5]} for n in range(3)]
    rank = {"line_bytes_per_s": None, "rows": rows, "unavailable": []}
    axes = plot_schedules([summarise(ScheduleSettings(), [rank])], "a machine").axes[0]
    assert axes.get_xlim()[1] < 1000
    assert "6000 ms →" in [text.get_text() for text in axes.texts]


@pytest.mark.filterwarnings("error")
def test_samples_that_spread_widely_leave_room_for_the_bars(tmp_path):
    rows = [{"name": f"torch {n}", "seconds": [0.5, 0.5, late]} for n, late in enumerate((0.5, 0.6, 90.0))]
    rank = {"line_bytes_per_s": 1e9, "rows": rows, "unavailable": []}
    figure = plot_schedules([summarise(ScheduleSettings(), [rank])], "a machine", tmp_path / "a.png")
    assert figure.axes[0].texts[2].get_position()[0] < figure.axes[0].get_xlim()[1]


def test_records_without_simulated_times_are_read():
    path = next((ROOT / "benchmarks" / "results").glob("overlap-emulated-*.json"))
    result = ScheduleResult.from_json(json.loads(path.read_text())["cases"][0])
    assert result.rows
    assert all(row.simulated_s is None and row.over_simulated is None for row in result.rows)


def all_rows(rate=None):
    settings = ScheduleSettings(only=("all",), rate_bits_per_s=rate)
    names = [case.name for case in our_cases(settings)] + ["torch advance-forward (ours)"]
    rank = {
        "line_bytes_per_s": 1.2e8,
        "rows": [{"name": name, "seconds": [1.0]} for name in names],
        "unavailable": [],
    }
    return summarise(settings, [rank])


def test_every_row_of_ours_has_its_simulated_time_and_what_was_measured_over_it():
    *ours, drop_in = all_rows().rows
    assert [row.simulated_s is not None for row in ours] == [True] * 13
    assert ours[0].simulated_s == pytest.approx(0.51)
    assert ours[0].over_simulated == pytest.approx(1 / 0.51)
    assert ours[0].to_json()["over_simulated"] == ours[0].over_simulated
    assert drop_in.simulated_s is None
    assert drop_in.is_drop_in
    assert not drop_in.is_ours


def test_the_table_says_what_a_batch_is_and_fits_into_a_file():
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(table(all_rows(rate=1e9)))
    text = console.export_text()
    assert "pipedream, ea-pipe, model-parallel: a batch is one micro-batch; M of them" in text
    assert "data-parallel: a worker runs M/K micro-batches" in text
    assert "1.961" not in text  # over the 510 ms without a line
    assert "all that a worker sends shares its line" in text
    assert f"{all_rows(rate=1e9).rows[0].over_simulated:.3f}" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_a_row_that_failed_is_told_with_the_others_that_are_left_out():
    rank = {"line_bytes_per_s": None, "rows": [], "unavailable": [{"name": "a", "reason": "b"}]}
    left_out = summarise(ScheduleSettings(), [rank], [Unavailable("c", "d")]).unavailable
    assert [row.name for row in left_out] == ["a", "c"]
