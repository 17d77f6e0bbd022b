"""Figures as files."""

import pytest
from matplotlib.figure import Figure

from avgpipe.timeline.figure import check_format, write_figure


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF"), ("a", b"\x89PNG")]
)
def test_the_suffix_is_the_format(tmp_path, name, begins):
    check_format("--plot", tmp_path / name)
    write_figure(Figure(), tmp_path / name, dpi=30)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_what_is_no_picture_is_refused_in_the_callers_words():
    with pytest.raises(ValueError, match=r"^--plot a\.txt: no picture format, end it in one of \..*\.png"):
        check_format("--plot a.txt", "a.txt")
