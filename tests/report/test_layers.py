"""The picture of a profile."""

import pytest

from avgpipe.report.pictures import plot_layers
from tests.planning.test_profile import PROFILE


def widths(axes):
    return [[bar.get_width() for bar in bars] for bars in axes.containers]


def test_bars_are_seconds_and_bytes_of_each_layer(tmp_path):
    figure = plot_layers(PROFILE, tmp_path / "a.png")
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["first", "second", "third"]
    # forward, the inputs' and the weights' part of the backward, update, averaging
    assert widths(left) == [[3, 4, 1], [0, 2, 0.5], [4, 4, 0.5], [0, 0.5, 0], [0, 0.25, 0]]
    assert widths(right)[0] == pytest.approx([20 / 2**20, 60 / 2**20, 0])
    assert (tmp_path / "a.png").stat().st_size > 5_000
    assert "micro-batches of 4" in figure.get_suptitle()


def test_another_size_may_be_drawn():
    assert widths(plot_layers(PROFILE, samples=2).axes[0])[0] == [1, 2, 1]


def test_many_layers_are_drawn_with_fewer_names():
    many = type(PROFILE)("m", "d", (2, 4), tuple(PROFILE.layers) * 100)
    assert len(plot_layers(many).axes[0].get_yticks()) == 100


def test_no_picture_format():
    with pytest.raises(ValueError, match=r"a\.mp3"):
        plot_layers(PROFILE, "a.mp3")
