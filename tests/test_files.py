import os
import stat
import threading

import pytest

from avgpipe.files import write_atomically


def test_bytes_and_text_arrive_unchanged(tmp_path):
    write_atomically(tmp_path / "bytes", b"\x00\r\n\xff")
    write_atomically(str(tmp_path / "text"), "µ\r\n")
    assert (tmp_path / "bytes").read_bytes() == b"\x00\r\n\xff"
    assert (tmp_path / "text").read_bytes() == "µ\r\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text"]


def test_an_old_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("a long old content")
    write_atomically(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_keeps_the_old_content_and_leaves_no_temporary_file(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_data_of_another_type_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "file", 3)
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such folder, make it first.*nowhere"):
        write_atomically(tmp_path / "nowhere" / "file", "x")


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_atomically(tmp_path, "x")


def test_the_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_atomically(tmp_path / "atomic", "x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")}
    assert len(modes) == 1


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    write_atomically(tmp_path / ("n" * 255), "x")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_readers_meet_no_mixture_of_several_writers(tmp_path):
    path = tmp_path / "file"
    contents = [letter * 20_000 for letter in "abc"]
    write_atomically(path, contents[0])
    threads = [
        threading.Thread(target=lambda text=text: [write_atomically(path, text) for _ in range(10)])
        for text in contents
    ]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        seen.add(path.read_text())
    for thread in threads:
        thread.join()
    assert seen <= set(contents)
    assert os.listdir(tmp_path) == ["file"]
