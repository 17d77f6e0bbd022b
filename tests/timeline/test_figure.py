"""Figures as files."""

import pytest
from matplotlib.figure import Figure

from avgpipe.timeline.plot import check_format, check_picture, write_figure


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


@pytest.mark.parametrize(
    ("name", "reason"), [("a.gif2", "no picture format"), ("none/a.png", "is no folder")]
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name, reason):
    with pytest.raises(ValueError, match=reason):
        check_picture(tmp_path / name)


def test_a_picture_is_no_folder(tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"folder.png: cannot be written, name a file"):
        check_picture(tmp_path / "folder.png")
