import gzip
import os
from pathlib import Path

import pytest
import torch

from avgpipe.tasks import DataNotFound
from avgpipe_lab.workloads.data import (
    EOS,
    MRPC_FILES,
    Paraphrase,
    find_paraphrases,
    find_text,
    find_translations,
    has_paraphrases,
    load_text,
    read_paraphrases,
    read_text,
    read_translations,
    split_words,
)


def write(folder, train="", valid="a\n"):
    for split, text in (("train", train), ("valid", valid)):
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
    corpus = load_text(write(tmp_path, train="c b b a a a <unk>\n", valid="a x\n"))
    assert corpus.vocabulary == ("a", "b", "c", "<unk>", "<eos>")
    assert spelled(corpus, "valid") == "a <unk> <eos>"


def test_unknown_is_added_only_where_it_is_needed(tmp_path):
    assert "<unk>" not in load_text(write(tmp_path, train="a b\n")).vocabulary
    corpus = load_text(write(tmp_path, train="a b\n", valid="c\n"))
    assert corpus.vocabulary[-1] == "<unk>"
    assert spelled(corpus, "valid") == "<unk> <eos>"


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
    for split in ("train", "valid"):
        text = f"{split} text\n".encode()
        packed = gzip.compress(text) if pattern.endswith(".gz") else text
        (tmp_path / pattern.format(split)).write_bytes(packed)
    assert spelled(load_text(tmp_path), "train") == "train text <eos>"


def test_missing_files_are_named_with_their_folder(tmp_path):
    with pytest.raises(
        ValueError, match=r"lacks train.txt, valid.txt; give a folder with train.txt"
    ) as caught:
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
    ids=["not UTF-8", "not gzip", "cut short"],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    write(tmp_path)
    (tmp_path / "train.txt").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path)


def test_standard_library_source():
    corpus = load_text(None, vocabulary_size=1000, max_bytes=300_000)
    again = load_text(None, vocabulary_size=1000, max_bytes=300_000)
    assert len(corpus.vocabulary) == 1000
    assert {"<unk>", "<eos>", "def", "self", "    ", "("} <= set(corpus.vocabulary)
    assert corpus.vocabulary == again.vocabulary
    for split in ("train", "valid"):
        tokens = getattr(corpus, split)
        assert torch.equal(tokens, getattr(again, split))
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 1000
    assert len(corpus.train) > 15_000
    assert len(corpus.valid) > 500
    assert "def __init__ ( self" in spelled(corpus, "train")


def test_raw_text_is_that_of_the_files(tmp_path):
    write(tmp_path, train=" b  a\r\n\nlast", valid="v")
    assert read_text(tmp_path) == {"train": " b  a\n\nlast\n", "valid": "v\n"}


def test_raw_text_is_cut_after_whole_lines(tmp_path):
    write(tmp_path, train="0123456\n" * 100, valid="\nlonger than asked\nb\n")
    assert read_text(tmp_path, max_bytes=100) == {"train": "0123456\n" * 10, "valid": "\nlonger than asked\n"}
    write(tmp_path, train="a\n", valid="é\né\né\né\né\n")
    assert read_text(tmp_path, max_bytes=100)["valid"] == "é\né\né\n"
    assert read_text(tmp_path, max_bytes=10**6) == read_text(tmp_path)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_an_empty_split_has_no_raw_text(tmp_path, split):
    write(tmp_path, train="a\n")
    (tmp_path / f"{split}.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=rf"{split}\.txt has no words: give a text for {split}"):
        read_text(tmp_path)


@pytest.mark.slow
def test_raw_text_of_the_standard_library_has_the_words_of_the_corpus():
    texts = read_text(None, max_bytes=300_000)
    corpus = load_text(None, max_bytes=300_000)
    assert 50_000 < sum(map(len, texts.values())) <= 300_000
    for split in texts:
        words, tokens = split_words(texts[split], source=True), getattr(corpus, split)
        # a file that ends or begins with blank lines joins them to its neighbour's
        assert 0 <= len(tokens) - len(words) < 50
        assert words.count("def") == int((tokens == corpus.vocabulary.index("def")).sum())


def test_words_of_a_text_are_those_of_its_corpus(text_folder):
    text = (text_folder / "valid.txt").read_text()
    assert " ".join(split_words(text)) == spelled(load_text(text_folder), "valid")
    assert split_words("a b") == ["a", "b", EOS]


def real_data(name):
    if "AVGPIPE_DATA" not in os.environ:
        pytest.skip("AVGPIPE_DATA names no folder of real data")
    return Path(os.environ["AVGPIPE_DATA"]) / name


def test_wikitext_2_has_its_published_counts():
    corpus = load_text(real_data("wikitext-2"))
    assert len(corpus.vocabulary) == 33_278
    splits = corpus.train, corpus.valid
    assert [len(s) for s in splits] == [2_088_628, 217_646]
    eos, unknown = (corpus.vocabulary.index(token) for token in ("<eos>", "<unk>"))
    assert [int((s == eos).sum()) for s in splits] == [36_718, 3_760]
    assert [int((s == unknown).sum()) for s in splits] == [54_625, 11_718]


# ---- translations --------------------------------------------------------------------------------------------------


@pytest.fixture
def translations(tmp_path):
    for stem, count in (("train", 4), ("val", 3)):
        for language, word in (("en", "dog"), ("de", "Hund")):
            lines = [f"{stem} {word} {line}" for line in range(count)]
            (tmp_path / f"{stem}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def test_lines_become_pairs(translations):
    text = read_translations(translations)
    assert [len(text["train"]), len(text["valid"])] == [4, 3]
    assert text["train"][1] == ("train dog 1", "train Hund 1")


def test_compressed_files_and_other_names_are_read(translations):
    expected = read_translations(translations)
    for language in ("en", "de"):
        plain = translations / f"val.{language}"
        (translations / f"dev.{language}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert read_translations(translations) == expected


def test_signs_that_divide_lines_elsewhere_stay_inside_a_sentence(translations):
    (translations / "val.en").write_bytes("a\u2028b\r\nc\x0bd\r\ne\x85f\r\n".encode())
    assert [source for source, _ in read_translations(translations)["valid"]] == [
        "a\u2028b",
        "c\x0bd",
        "e\x85f",
    ]


def test_missing_translations_are_named_without_reading(translations, tmp_path):
    with pytest.raises(DataNotFound, match=r"nowhere does not exist; give a folder with train\.\{en,de\}"):
        find_translations(tmp_path / "nowhere")
    (translations / "train.en").write_bytes(b"\xff")
    assert find_translations(translations)["train.en"] == translations / "train.en"
    (translations / "train.de").unlink()
    (translations / "val.en").unlink()
    with pytest.raises(DataNotFound, match=r"lacks train\.de, val\.en; .*\(\.gz is read too\)"):
        find_translations(translations)


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
        (lambda p: p.write_text(""), r"train\.en has an empty line, line 1"),
        (lambda p: p.write_text("a\n \nc\nd\n"), r"train\.en has an empty line, line 2: remove the pair"),
    ],
)
def test_bad_translations_are_refused_in_one_line(translations, spoil, message):
    spoil(translations / "train.en")
    with pytest.raises(ValueError, match=message) as caught:
        read_translations(translations)
    assert "\n" not in str(caught.value)


def test_multi30k_has_the_published_counts():
    text = read_translations(real_data("multi30k-en-de"))
    assert [len(text["train"]), len(text["valid"])] == [29_000, 1_014]
    assert text["train"][0] == (
        "Two young, White males are outside near many bushes.",
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    )


# ---- paraphrases ---------------------------------------------------------------------------------------------------

TRAIN, DEV = MRPC_FILES
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def row(number, label=1, first="a b", second="b a"):
    return f"{label}\t{number}\t{number + 100}\t{first}\t{second}"


@pytest.fixture
def paraphrases(tmp_path):
    rows = [*(row(n, n % 2) for n in range(6)), row(6, 0, 'he said " no', "so\u2028no")]
    (tmp_path / TRAIN).write_bytes(("\ufeff" + "\r\n".join([HEADER, *rows]) + "\r\n").encode())
    (tmp_path / DEV).write_text("4\t104\n1\t101\n")
    return tmp_path


def test_dev_ids_divide_the_training_file(paraphrases):
    pairs = read_paraphrases(paraphrases)
    assert [p.label for p in pairs["train"]] == [0, 0, 1, 1, 0]
    assert [p.label for p in pairs["valid"]] == [1, 0]  # in the order of the training file
    assert pairs["train"][0] == Paraphrase("a b", "b a", 0)
    assert pairs["train"][-1] == Paraphrase('he said " no', "so\u2028no", 0)


def test_missing_paraphrases_are_named(paraphrases, tmp_path):
    assert has_paraphrases(paraphrases)
    (paraphrases / DEV).unlink()
    with pytest.raises(DataNotFound, match=f"lacks {DEV}"):
        find_paraphrases(paraphrases)
    with pytest.raises(DataNotFound, match="is a file"):
        read_paraphrases(paraphrases / TRAIN)
    assert not has_paraphrases(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            TRAIN,
            row(5),
            "1\t5\t105\tcut in",
            "line 7: '1.*cut in' is no label .* the file is truncated",
        ),
        (TRAIN, row(5), row(5) + "\tmore", "line 7: .* is no label"),
        (TRAIN, row(3), row(3, "yes"), "line 5: .* is no label"),
        (TRAIN, row(5), "", "line 7: .* is no label"),
        (
            TRAIN,
            HEADER,
            "label,first,second",
            "begins with 'label,first,second', not with the header 'Quality",
        ),
        (DEV, "1\t101", "1", "lacks 1 of the 2 pairs that dev_ids.tsv names, such as '1'"),
        (DEV, "1\t101", "77\t101", "lacks 1 of the 2 pairs that dev_ids.tsv names"),
        (DEV, "4\t104\n1\t101\n", "", "valid split in .* is empty"),
    ],
)
def test_bad_paraphrases_give_one_clear_line(paraphrases, name, old, new, message):
    text = (paraphrases / name).read_text(encoding="utf-8-sig")
    assert old in text
    (paraphrases / name).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_paraphrases(paraphrases)
    assert "\n" not in str(error.value)


def test_mrpc_has_the_published_sizes():
    pairs = read_paraphrases(real_data("mrpc"))
    sizes = {split: (len(found), sum(p.label for p in found)) for split, found in pairs.items()}
    assert sizes == {"train": (3668, 2474), "valid": (408, 279)}
