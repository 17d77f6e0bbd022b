import gzip
import os
from pathlib import Path

import pytest
import torch

from avgpipe.workloads.text import EOS, SPLITS, DataNotFound, find_text, load_text, read_text, split_words

DATA = Path(os.environ.get("AVGPIPE_DATA") or Path(__file__).parents[3] / "shared" / "data")


def write(folder, train="", valid="a\n", test="a\n"):
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{split}.txt").write_bytes(text.encode())
    return folder


def spelled(corpus, split):
    return " ".join(corpus.vocabulary[n] for n in getattr(corpus, split).tolist())


def test_tokens_are_split_at_white_space_and_every_line_counts_one_eos(tmp_path):
    corpus = load_text(write(tmp_path, train=" b  a\tb\n\n a b \n"))
    assert spelled(corpus, "train") == "b a b <eos> <eos> a b <eos>"
    assert corpus.train.dtype == torch.int64
    assert corpus.train.shape == (8,)


def test_a_last_line_without_its_end_counts_too(tmp_path):
    assert spelled(load_text(write(tmp_path, train="a b\r\na")), "train") == "a b <eos> a <eos>"


def test_vocabulary_is_that_of_train_most_frequent_first(tmp_path):
    corpus = load_text(write(tmp_path, train="c b b a a a <unk>\n", valid="a x\n", test="b\n"))
    assert corpus.vocabulary == ("a", "b", "c", "<unk>", "<eos>")
    assert spelled(corpus, "valid") == "a <unk> <eos>"


def test_unknown_is_added_only_where_it_is_needed(tmp_path):
    assert "<unk>" not in load_text(write(tmp_path, train="a b\n")).vocabulary
    corpus = load_text(write(tmp_path, train="a b\n", test="c\n"))
    assert corpus.vocabulary[-1] == "<unk>"
    assert spelled(corpus, "test") == "<unk> <eos>"


@pytest.mark.parametrize(
    ("train", "size", "expected"),
    [
        ("c b b a a a\n", 3, ("a", "b", "<unk>")),
        ("c b b a a a <unk>\n", 3, ("a", "b", "<unk>")),
        ("b a a\n", 4, ("a", "b", "<eos>", "<unk>")),
        ("b a a <unk>\n", 4, ("a", "b", "<unk>", "<eos>")),
        ("b a a\n", 1, ("<unk>",)),
    ],
)
def test_vocabulary_size_counts_unknown(tmp_path, train, size, expected):
    corpus = load_text(write(tmp_path, train=train), vocabulary_size=size)
    assert corpus.vocabulary == expected
    assert int(corpus.train.max()) < size


@pytest.mark.parametrize("pattern", ["{}.txt.gz", "wiki.{}.tokens", "wiki.{}.tokens.gz"])
def test_other_file_names(tmp_path, pattern):
    for split in ("train", "valid", "test"):
        text = f"{split} text\n".encode()
        packed = gzip.compress(text) if pattern.endswith(".gz") else text
        (tmp_path / pattern.format(split)).write_bytes(packed)
    assert spelled(load_text(tmp_path), "train") == "train text <eos>"


def test_missing_files_are_named_with_their_folder(tmp_path):
    (tmp_path / "valid.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"lacks train.txt, test.txt") as caught:
        find_text(tmp_path)
    assert isinstance(caught.value, DataNotFound | FileNotFoundError)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist; give a folder with train\.txt"):
        load_text(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        load_text(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.txt", b"good \xff bad", "not UTF-8 text: byte 5 is 0xff"),
        ("train.txt.gz", b"no gzip", "train.txt.gz cannot be read"),
        ("train.txt.gz", gzip.compress(b"words " * 1000)[:-20], "train.txt.gz cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    write(tmp_path)
    (tmp_path / "train.txt").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path)


def test_vocabulary_size_must_be_positive(text_folder):
    with pytest.raises(ValueError, match="vocabulary_size must be at least 1, got 0"):
        load_text(text_folder, vocabulary_size=0)


def test_standard_library_source():
    corpus = load_text(None, vocabulary_size=1000, max_bytes=300_000)
    again = load_text(None, vocabulary_size=1000, max_bytes=300_000)
    assert len(corpus.vocabulary) == 1000
    assert {"<unk>", "<eos>", "def", "self", "    ", "("} <= set(corpus.vocabulary)
    assert corpus.vocabulary == again.vocabulary
    for split in ("train", "valid", "test"):
        tokens = getattr(corpus, split)
        assert torch.equal(tokens, getattr(again, split))
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 1000
    assert len(corpus.train) > 15_000
    assert min(len(corpus.valid), len(corpus.test)) > 500
    assert "def __init__ ( self" in spelled(corpus, "train")


def test_more_bytes_read_more_source():
    sizes = [len(load_text(None, vocabulary_size=50, max_bytes=n).train) for n in (500_000, 1_000_000)]
    assert sizes[0] < sizes[1]


def test_raw_text_is_that_of_the_files(tmp_path):
    write(tmp_path, train=" b  a\r\n\nlast", valid="v\n", test="t")
    assert read_text(tmp_path) == {"train": " b  a\n\nlast\n", "valid": "v\n", "test": "t\n"}


def test_raw_text_is_cut_after_whole_lines(tmp_path):
    write(tmp_path, train="0123456\n" * 100, valid="\nlonger than asked\nb\n", test="é\né\né\né\né\n")
    texts = read_text(tmp_path, max_bytes=100)
    assert texts == {"train": "0123456\n" * 10, "valid": "\nlonger than asked\n", "test": "é\né\né\n"}
    assert read_text(tmp_path, max_bytes=10**6) == read_text(tmp_path)


@pytest.mark.parametrize("split", SPLITS)
def test_an_empty_split_has_no_raw_text(tmp_path, split):
    write(tmp_path, train="a\n")
    (tmp_path / f"{split}.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=rf"{split}\.txt has no words: give a text for {split}"):
        read_text(tmp_path)


def test_raw_text_of_nothing_is_refused(text_folder):
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        read_text(text_folder, max_bytes=0)


def test_raw_text_of_the_standard_library_has_the_words_of_the_corpus():
    texts = read_text(None, max_bytes=300_000)
    corpus = load_text(None, max_bytes=300_000)
    assert 50_000 < sum(map(len, texts.values())) <= 300_000
    for split in SPLITS:
        words, tokens = split_words(texts[split], source=True), getattr(corpus, split)
        # a file that ends or begins with blank lines joins them to its neighbour's
        assert 0 <= len(tokens) - len(words) < 50
        assert words.count("def") == int((tokens == corpus.vocabulary.index("def")).sum())


def test_words_of_a_text_are_those_of_its_corpus(text_folder):
    text = (text_folder / "valid.txt").read_text()
    assert " ".join(split_words(text)) == spelled(load_text(text_folder), "valid")
    assert split_words("a b") == ["a", "b", EOS]


def test_wikitext_2_has_its_published_counts():
    folder = DATA / "wikitext-2"
    if not folder.is_dir():
        pytest.skip(f"no WikiText-2 in {folder}; set AVGPIPE_DATA to the folder above it")
    corpus = load_text(folder)
    assert len(corpus.vocabulary) == 33_278
    assert [len(getattr(corpus, s)) for s in ("train", "valid", "test")] == [2_088_628, 217_646, 245_569]
    eos, unknown = (corpus.vocabulary.index(token) for token in ("<eos>", "<unk>"))
    assert [int((s == eos).sum()) for s in (corpus.train, corpus.valid, corpus.test)] == [
        36_718,
        3_760,
        4_358,
    ]
    counts = [int((s == unknown).sum()) for s in (corpus.train, corpus.valid, corpus.test)]
    assert counts == [54_625, 11_718, 15_218]
