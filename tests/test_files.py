import json
import os
import re
import stat
import threading

import pytest

from avgpipe.files import (
    json_object,
    make_folder,
    parse_json,
    parse_toml,
    read_json,
    read_lines,
    read_text,
    reading,
    write_atomically,
)
from tests.runner import ROOT


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


def test_what_is_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for inside in ("", "a/b"):
        with pytest.raises(
            OSError, match=r"is a link to nowhere, where nothing is: make that folder.*/link'"
        ):
            make_folder(tmp_path / "link" / inside)
    with pytest.raises(OSError, match=r"is a file: name a folder.*/file'"):
        make_folder(tmp_path / "file")
    (tmp_path / "nowhere").mkdir()
    make_folder(tmp_path / "link" / "a" / "b")
    make_folder(tmp_path / "link" / "a")
    assert (tmp_path / "nowhere" / "a" / "b").is_dir()


# ---- reading ---------------------------------------------------------------------------------------------------------

DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * DEEP, "nested too deeply"),
        ('{"a":' * DEEP, "nested too deeply"),
        ("[" * 65 + "]" * 65, "nested too deeply: at most 64"),
        ('{"a": 1e400}', "a text, a: must be a finite number .* not inf"),
        ('{"a": NaN}', "a text, a: must be a finite number .* not nan"),
        (f'{{"a": [{10**400}]}}', r"a text: must be a finite number of less than 64 bits, not 1000"),
        (f'{{"a": {"9" * 5000}}}', "thousands of digits"),
        ('{"a": "\\ud800"}', "one half of a character"),
        ('{"a": 1', "a text must be JSON: .*line 1 column 8"),
        ("", "a text must be JSON: .*line 1 column 1"),
        ("[]", "a text must be a JSON object, not list"),
    ],
)
def test_text_beyond_the_limits_is_refused_in_a_line(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        json_object("a text", text)
    assert len(str(raised.value)) < 300


def test_what_is_within_the_limits_is_read_unchanged():
    values = {
        "nested": json.loads("[" * 62 + "]" * 62),
        "numbers": [2**63 - 1, -(2**63), 1e308],
        "text": "a\U0001f600",
    }
    assert json_object("a text", json.dumps(values)) == values
    assert str(parse_json("a text", "[1e400, NaN]", finite=False)) == "[inf, nan]"


@pytest.mark.parametrize("text", ["a = " + "[" * DEEP, "a = 1" + "0" * 5000, "a = ", "[[a"])
def test_toml_is_refused_alike(text):
    with pytest.raises(ValueError, match=r"^tables (is nested too deeply|must be TOML: )"):
        parse_toml("tables", text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff{}", "no UTF-8 text, .* at byte 0: save it as UTF-8"),
        (b"x" * 101, "101 bytes, and at most 100"),
    ],
)
def test_the_error_names_the_file(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"), reading(path, 100):
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    "error", [RecursionError(), OverflowError("too large"), MemoryError(), TypeError("no int")]
)
def test_whatever_a_value_is_wrong_by_becomes_one_error(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{path}: ({type(error).__name__}|{error})$"), reading(path):
        raise error


def test_a_message_with_a_whole_file_is_cut(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ValueError, match=r" \.\.\.$") as raised, reading(path):
        raise ValueError("x" * 10**6)
    assert len(str(raised.value)) < 1000


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "file") == {}


def test_a_pipe_and_a_device_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="this is a pipe or a device, not a file: write its content"):
            read_text(path)


def test_a_missing_file_and_a_folder_stay_errors_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match="file"):
        read_text(tmp_path / "file")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_text(tmp_path)


def test_lines_are_numbered(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"a": NaN}\n\n[1]\n{')
    with pytest.raises(ValueError, match=f"^{path}: line 4 must be JSON"):
        read_lines(path)
    path.write_text("[1]\n\n2\n")
    assert read_lines(path) == [[1], 2]


# Messages between processes of a run, and what a module has written itself a moment ago, are no text from outside.
MESSAGES = {
    "avgpipe": """checkpoint/load.py cli/profile.py fault/door.py fault/generation.py fault/slots.py fault/speaker.py
        files.py links/codec.py measure/check.py ranks/launch.py ranks/met.py ranks/process.py ranks/world.py
        runtime/alike.py runtime/stage.py""",
    "avgpipe_lab": "bench/chaos/job.py bench/chaos/watch.py bench/namespaces.py",
}


@pytest.mark.parametrize("package", MESSAGES)
def test_text_from_outside_has_one_reader(package):
    folder = ROOT / "python" / package
    pattern = r"\bjson\.loads?\(|\btomli(b)?\b|\bcsv\.(reader|DictReader)|JSONDecoder"
    found = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if re.search(pattern, p.read_text())}
    assert found == set(MESSAGES[package].split())
