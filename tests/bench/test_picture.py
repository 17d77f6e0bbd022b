"""The picture of hand-made results."""

import pytest

from avgpipe.bench.picture import plot_results
from avgpipe.bench.result import summarise
from tests.bench.test_result import SAMPLES, VARIANTS, section


@pytest.fixture
def result():
    return summarise(section(), VARIANTS, SAMPLES)


def test_a_panel_has_a_bar_for_each_variant_and_the_limit_as_a_line(result):
    figure = plot_results([result], "a machine")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([row.gb_per_s for row in result.rows])
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.name for row in result.rows]
    upright = [line for line in axes.lines if line.get_ydata()[0] != line.get_ydata()[1]]
    assert [line.get_xdata()[0] for line in upright] == pytest.approx([result["limit"].gb_per_s])
    assert axes.get_title(loc="left") == result.title


def test_a_dash_runs_from_the_slower_quartile_to_the_faster_one(result):
    (axes,) = plot_results([result], "a machine").axes
    dash = next(line for line in axes.lines if list(line.get_ydata()) == [0, 0])
    assert list(dash.get_xdata()) == pytest.approx([8 / 4, 8 / 2])
    assert axes.get_xlim()[1] > 8 / 2


def test_every_section_gets_a_panel(result):
    shown = [axes for axes in plot_results([result] * 3, "a machine").axes if axes.axison]
    assert len(shown) == 3


def test_it_is_written_in_the_suffix_s_format(result, tmp_path):
    plot_results([result], "a machine", tmp_path / "a.png")
    plot_results([result], "a machine", tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="none to draw"):
        plot_results([], "a machine")
