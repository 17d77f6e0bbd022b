import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from avgpipe_lab.workloads.huggingface import Subwords

LINES = [f"The {a} dog sees {b} cats in the garden of house {a * b}." for a in range(9) for b in range(9)]

_PROGRAM = """
from avgpipe_lab.workloads.huggingface import Subwords
from tests.lab.workloads.test_huggingface import LINES
print(Subwords.learn(LINES, 320).encode(LINES))
"""


@pytest.fixture(scope="module")
def subwords():
    return Subwords.learn(LINES, 320)


def test_special_pieces_come_first(subwords):
    assert (subwords.pad, subwords.begin, subwords.end, subwords.mask) == (0, 1, 2, 3)
    assert subwords.SPECIAL == ("<pad>", "<s>", "</s>", "<mask>")
    assert min(min(row) for row in subwords.encode(LINES)) >= 4


def test_frequent_words_are_single_pieces(subwords):
    assert len(subwords) == 320
    rows = subwords.encode(["The dog", "dog", "dog dog", ""])
    assert [len(row) for row in rows] == [2, 1, 2, 0]
    assert rows[0][1] == rows[1][0] == rows[2][0]


def test_a_short_text_gives_fewer_pieces():
    assert len(Subwords.learn(["ab ab"], 1000)) < 270


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=3))
def test_any_text_comes_back(subwords, lines):
    assert subwords.decode(subwords.encode(lines)) == lines


@pytest.mark.parametrize(
    "line", ["<s> a </s>", "x<pad>", "<mask>", "  two  spaces ", "Grüße, 你好 \U0001f600"]
)
def test_names_of_special_pieces_and_odd_signs_are_text(subwords, line):
    rows = subwords.encode([line])
    assert min(rows[0]) >= 4
    assert subwords.decode(rows) == [line]


def test_special_pieces_are_left_out_of_the_text(subwords):
    row = subwords.encode(["The cats"])[0]
    assert subwords.decode([[1, *row, 2, 0, 0], [2], []]) == ["The cats", "", ""]


def test_half_a_character_is_replaced(subwords):
    row = subwords.encode(["ü"])[0]
    assert subwords.decode([row[:-1]]) == ["\ufffd"]


def test_lower_case():
    subwords = Subwords.learn(LINES, 300, lowercase=True)
    assert subwords.decode(subwords.encode(["The DOG"])) == ["the dog"]


@pytest.mark.ranks
@pytest.mark.slow
def test_every_process_learns_the_same(subwords):
    output = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == str(subwords.encode(LINES))
