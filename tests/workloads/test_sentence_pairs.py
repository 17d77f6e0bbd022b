import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from avgpipe.workloads.masked import Vocabulary
from avgpipe.workloads.sentence_pairs import (
    DEV_FILE,
    TEST_FILE,
    TRAIN_FILE,
    PairRows,
    SentencePair,
    confusion,
    find_pairs,
    has_pairs,
    joined,
    pair_metrics,
    read_pairs,
)
from avgpipe.workloads.text import DataNotFound

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
VOCABULARY = Vocabulary(size=100, pad=0, begin=1, end=2, mask=3)
REAL = {"train": (3668, 2474), "valid": (408, 279), "test": (1725, 1147)}  # pairs, and paraphrases among them


def row(number, label=1, first="a b", second="b a"):
    return f"{label}\t{number}\t{number + 100}\t{first}\t{second}"


@pytest.fixture
def folder(tmp_path):
    train = [HEADER, *(row(n, n % 2) for n in range(6))]
    test = [HEADER, row(50), row(51, 0, 'he said " no', "so\u2028no")]
    (tmp_path / TRAIN_FILE).write_bytes(("\ufeff" + "\n".join(train) + "\n").encode())
    (tmp_path / TEST_FILE).write_bytes("\r\n".join(test).encode())
    (tmp_path / DEV_FILE).write_text("4\t104\n1\t101\n")
    return tmp_path


def change(folder, name, old, new):
    text = (folder / name).read_text(encoding="utf-8-sig")
    assert old in text
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")


# ---- reading -------------------------------------------------------------------------------------------------------


def test_dev_ids_divide_the_training_file(folder):
    pairs = read_pairs(folder)
    assert [p.label for p in pairs.train] == [0, 0, 1, 1]
    assert [p.label for p in pairs.valid] == [1, 0]  # in the order of the training file
    assert pairs.train[0] == SentencePair("a b", "b a", 0)


def test_quotes_and_other_line_separators_belong_to_the_sentence(folder):
    assert read_pairs(folder).test[1] == SentencePair('he said " no', "so\u2028no", 0)


def test_missing_files_are_named(folder, tmp_path):
    assert has_pairs(folder)
    (folder / TEST_FILE).unlink()
    with pytest.raises(DataNotFound, match=f"lacks {TEST_FILE}"):
        find_pairs(folder)
    with pytest.raises(DataNotFound, match="does not exist"):
        read_pairs(tmp_path / "none")
    with pytest.raises(DataNotFound, match="is a file"):
        read_pairs(folder / TRAIN_FILE)
    assert not has_pairs(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (TRAIN_FILE, row(5), "1\t5\t105\tcut in", "line 7: 4 tab-separated fields instead of 5.*truncated"),
        (TRAIN_FILE, row(5), row(5) + "\tmore", "line 7: 6 tab-separated fields"),
        (TRAIN_FILE, row(3), row(3, "yes"), "line 5: the label must be 0 or 1, got 'yes'"),
        (TRAIN_FILE, row(3), row(2, 0), "line 5: the pair 2 102 occurs twice"),
        (TRAIN_FILE, HEADER, "label,first,second", "does not begin with the header Quality"),
        (TRAIN_FILE, row(4, 0) + "\n" + row(5), "", "line 6: 1 tab-separated fields"),
        (DEV_FILE, "1\t101", "1", "line 2: 1 tab-separated fields instead of two ids"),
        (DEV_FILE, "1\t101", "77\t101", "lacks 1 of the 2 pairs that dev_ids.tsv names, such as 77 101"),
        (
            TEST_FILE,
            row(50) + "\n" + row(51, 0, 'he said " no', "so\u2028no"),
            "",
            "test split in .* is empty",
        ),
        (DEV_FILE, "4\t104\n1\t101\n", "", "valid split in .* is empty"),
    ],
)
def test_bad_files_give_one_clear_line(folder, name, old, new, message):
    change(folder, name, old, new)
    with pytest.raises(ValueError, match=message) as error:
        read_pairs(folder)
    assert "\n" not in str(error.value)


def test_other_encodings_are_refused(folder):
    (folder / TEST_FILE).write_bytes(
        (folder / TEST_FILE).read_bytes() + row(52, 1, "caf\xe9").encode("latin-1")
    )
    with pytest.raises(ValueError, match=r"not UTF-8 text: byte \d+ is 0xe9"):
        read_pairs(folder)


@pytest.mark.skipif("AVGPIPE_DATA" not in os.environ, reason="AVGPIPE_DATA does not name the data folder")
def test_the_real_corpus_has_the_published_sizes():
    pairs = read_pairs(Path(os.environ["AVGPIPE_DATA"]) / "mrpc")
    for split, (size, paraphrases) in REAL.items():
        found = getattr(pairs, split)
        assert (len(found), sum(p.label for p in found)) == (size, paraphrases)


# ---- batches -------------------------------------------------------------------------------------------------------


def test_a_pair_is_joined_with_special_pieces():
    pieces, types = joined([10, 11], [20], VOCABULARY, 16)
    assert pieces == [1, 10, 11, 2, 20, 2]
    assert types == [0, 0, 0, 0, 1, 1]


def test_the_longer_sentence_loses_pieces_first():
    draw = random.Random(0)
    for _ in range(200):
        first = list(range(10, 10 + draw.randrange(1, 12)))
        second = list(range(50, 50 + draw.randrange(1, 12)))
        length = draw.randrange(5, 24)
        a, b = first[:], second[:]
        while len(a) + len(b) > length - 3:  # one at a time, of equals the second
            (a if len(a) > len(b) else b).pop()
        pieces, types = joined(first, second, VOCABULARY, length)
        assert pieces == [1, *a, 2, *b, 2]
        assert types == [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_too_little_room_for_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"at least 5 places.*got 4"):
        joined([5], [6], VOCABULARY, 4)


def test_batches_are_padded_to_their_longest_pair():
    def encode(lines):
        return [[10 + len(word) for word in line.split()] for line in lines]

    pairs = [
        SentencePair("a", "bb", 1),
        SentencePair("a bb ccc", "a", 0),
        SentencePair("a b c d e", "f g", 1),
    ]
    rows = pickle.loads(pickle.dumps(PairRows.of(pairs, encode, VOCABULARY, 32)))
    assert rows.lengths.tolist() == [5, 7, 10]
    inputs, labels = rows(torch.tensor([1, 0]), torch.Generator())
    assert inputs["input_ids"].tolist() == [[1, 11, 12, 13, 2, 11, 2], [1, 11, 2, 12, 2, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert labels.tolist() == [0, 1]


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_f1_is_that_of_a_plain_count():
    torch.manual_seed(0)
    logits, labels = torch.randn(23, 2), torch.randint(2, (23,))
    guesses = [int(b > a) for a, b in logits.tolist()]
    right = sum(g == t for g, t in zip(guesses, labels.tolist()))
    both = sum(g == t == 1 for g, t in zip(guesses, labels.tolist()))
    precision, recall = both / sum(guesses), both / int(labels.sum())
    means = {}
    for part in (slice(0, 10), slice(10, 23)):  # as an evaluation in two batches weighs them
        share = len(labels[part]) / 23
        for name, value in confusion(logits[part], labels[part]).items():
            means[name] = means.get(name, 0) + float(value) * share
    metrics = pair_metrics(0.7, means)
    assert metrics["accuracy"] == pytest.approx(100 * right / 23)
    assert metrics["f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))


def test_f1_is_zero_without_paraphrases():
    means = confusion(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert pair_metrics(0.0, {k: float(v) for k, v in means.items()}) == {"accuracy": 100.0, "f1": 0.0}
