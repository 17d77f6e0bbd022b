import gzip
import os

import pytest

from avgpipe.workloads.parallel_text import Pairs, find_parallel, read_parallel
from avgpipe.workloads.text import DataNotFound

SPLITS = {"train": "train", "val": "valid", "test_2016_flickr": "test"}


@pytest.fixture
def folder(tmp_path):
    for n, stem in enumerate(SPLITS):
        for language, word in (("en", "dog"), ("de", "Hund")):
            lines = [f"{stem} {word} {line}" for line in range(4 - n)]
            (tmp_path / f"{stem}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def test_lines_become_pairs(folder):
    text = read_parallel(folder)
    assert [len(text.train), len(text.valid), len(text.test)] == [4, 3, 2]
    assert text.test == Pairs(
        ("test_2016_flickr dog 0", "test_2016_flickr dog 1"),
        ("test_2016_flickr Hund 0", "test_2016_flickr Hund 1"),
    )


def test_limit_keeps_the_first_training_pairs_and_all_others(folder):
    text = read_parallel(folder, 2)
    assert text.train.target == ("train Hund 0", "train Hund 1")
    assert [len(text.train), len(text.valid), len(text.test)] == [2, 3, 2]
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_parallel(folder, 0)


def test_languages_can_be_exchanged(folder):
    assert read_parallel(folder, source="de", target="en").train.source[0] == "train Hund 0"


def test_compressed_files_and_other_names_are_read(folder):
    expected = read_parallel(folder)
    for language in ("en", "de"):
        plain = folder / f"val.{language}"
        (folder / f"dev.{language}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        (folder / f"test_2016_flickr.{language}").rename(folder / f"test.{language}")
    assert read_parallel(folder) == expected


def test_signs_that_divide_lines_elsewhere_stay_inside_a_sentence(folder):
    (folder / "val.en").write_bytes("a\u2028b\r\nc\x0bd\r\ne\x85f\r\n".encode())
    assert read_parallel(folder).valid.source == ("a\u2028b", "c\x0bd", "e\x85f")


def test_missing_folder_and_files_are_named(folder, tmp_path):
    with pytest.raises(DataNotFound, match=r"nowhere does not exist; give a folder with train\.\{en,de\}"):
        find_parallel(tmp_path / "nowhere")
    with pytest.raises(DataNotFound, match=r"train\.en is a file, not a folder"):
        find_parallel(folder / "train.en")
    (folder / "train.de").unlink()
    (folder / "val.en").unlink()
    with pytest.raises(DataNotFound, match=r"lacks train\.de, val\.en \(\.gz is read too\)"):
        find_parallel(folder)


def test_files_are_found_without_reading(folder):
    (folder / "train.en").write_bytes(b"\xff")
    assert find_parallel(folder)["train"] == (folder / "train.en", folder / "train.de")


def _truncated(path):
    packed = gzip.compress(os.urandom(3000))
    path.with_suffix(".en.gz").write_bytes(packed[: len(packed) // 2])
    path.unlink()


def _corrupt(path):
    packed = bytearray(gzip.compress(b"a\nb\nc\nd\n" * 50))
    packed[12:20] = b"\xff" * 8
    path.with_suffix(".en.gz").write_bytes(packed)
    path.unlink()


def _not_gzip(path):
    path.rename(path.with_suffix(".en.gz"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncated, r"train\.en\.gz cannot be read: .*end-of-stream"),
        (_corrupt, r"train\.en\.gz cannot be read: "),
        (_not_gzip, r"train\.en\.gz cannot be read: Not a gzipped file"),
        (lambda p: p.write_bytes(b"a\nb\nc\nd\xff"), r"train\.en is not UTF-8 text: byte 7 is 0xff"),
        (lambda p: p.write_text("a\nb\nc\n"), r"train\.en has 3 lines and train\.de 4: line n of both"),
        (lambda p: p.write_text(""), r"train\.en is empty"),
        (lambda p: p.write_text("a\n \nc\nd\n"), r"train\.en has an empty line, line 2: remove the pair"),
    ],
)
def test_bad_files_are_refused_in_one_line(folder, spoil, message):
    spoil(folder / "train.en")
    with pytest.raises(ValueError, match=message) as caught:
        read_parallel(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif("AVGPIPE_DATA" not in os.environ, reason="AVGPIPE_DATA does not name the data folder")
def test_multi30k_has_the_published_counts():
    text = read_parallel(os.path.join(os.environ["AVGPIPE_DATA"], "multi30k-en-de"))
    assert [len(text.train), len(text.valid), len(text.test)] == [29_000, 1_014, 1_000]
    assert text.train.source[0] == "Two young, White males are outside near many bushes."
    assert text.train.target[0] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
