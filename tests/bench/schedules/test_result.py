"""Results as values, tables and pictures."""

import io
import json

import pytest
from rich.console import Console

from avgpipe.bench.schedules.picture import plot_schedules
from avgpipe.bench.schedules.result import ScheduleResult, summarise
from avgpipe.bench.schedules.settings import ScheduleSettings
from avgpipe.bench.schedules.table import table


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
    assert len(axes.get_legend().get_texts()) == len(result.bounds)
