"""Pairs of sentences that are paraphrases or not: the Microsoft Research Paraphrase Corpus, in GLUE's splits.

Dolan and Brockett, 2005; GLUE: Wang et al., 2018 (arXiv 1804.07461).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from avgpipe.workloads.masked import Vocabulary
from avgpipe.workloads.text import DataNotFound

Encode = Callable[[Sequence[str]], list[list[int]]]

TRAIN_FILE = "msr_paraphrase_train.txt"
TEST_FILE = "msr_paraphrase_test.txt"
DEV_FILE = "dev_ids.tsv"
PAIR_FILES = (TRAIN_FILE, TEST_FILE, DEV_FILE)

_HEADER = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]


class SentencePair(NamedTuple):
    """Two sentences; ``label`` is 1 where the one is a paraphrase of the other, else 0."""

    first: str
    second: str
    label: int


@dataclass(frozen=True)
class SentencePairs:
    """The splits, in the order of their files. ``valid`` is GLUE's dev split: the training file's rows that
    ``dev_ids.tsv`` names.
    """

    train: tuple[SentencePair, ...]
    valid: tuple[SentencePair, ...]
    test: tuple[SentencePair, ...]


def has_pairs(folder: str | Path) -> bool:
    """Whether a folder holds any of the corpus's files."""
    return any((Path(folder) / name).is_file() for name in PAIR_FILES)


def find_pairs(folder: str | Path) -> dict[str, Path]:
    """The corpus's files by name, without reading them. Raises DataNotFound."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(f"data folder {folder} {what}; give a folder with {', '.join(PAIR_FILES)}")
    found = {name: folder / name for name in PAIR_FILES}
    missing = [name for name, file in found.items() if not file.is_file()]
    if missing:
        raise DataNotFound(
            f"data folder {folder} lacks {', '.join(missing)}; sentence pairs need {', '.join(PAIR_FILES)}"
        )
    return found


def read_pairs(folder: str | Path) -> SentencePairs:
    """Read the corpus as it is distributed: UTF-8 with or without a byte-order mark, tab-separated, without
    quoting, one header line.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: a file is of another format or truncated (the message names file and line), or a split is empty.
    """
    files = find_pairs(folder)
    rows = _read_rows(files[TRAIN_FILE])
    dev = _read_ids(files[DEV_FILE])
    absent = sorted(dev - rows.keys())
    if absent:
        raise ValueError(
            f"{files[TRAIN_FILE]} lacks {len(absent)} of the {len(dev)} pairs that {DEV_FILE} names, such as "
            f"{' '.join(absent[0])}: one of the two files is truncated or of another data set"
        )
    pairs = SentencePairs(
        train=tuple(pair for ids, pair in rows.items() if ids not in dev),
        valid=tuple(pair for ids, pair in rows.items() if ids in dev),
        test=tuple(_read_rows(files[TEST_FILE]).values()),
    )
    for split in ("train", "valid", "test"):
        if not getattr(pairs, split):
            raise ValueError(f"the {split} split in {folder} is empty: it has no pair")
    return pairs


def _read_rows(file: Path) -> dict[tuple[str, str], SentencePair]:
    header, *lines = _lines(file) or [""]
    if header.split("\t") != _HEADER:
        raise ValueError(
            f"{file} does not begin with the header {', '.join(_HEADER)}, tab-separated: it begins with "
            f"{header[:60]!r}"
        )
    rows: dict[tuple[str, str], SentencePair] = {}
    for number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != len(_HEADER):
            raise ValueError(
                f"{file}, line {number}: {len(fields)} tab-separated fields instead of {len(_HEADER)}: "
                "the file is truncated or of another format"
            )
        label, first_id, second_id, first, second = fields
        if label not in ("0", "1"):
            raise ValueError(f"{file}, line {number}: the label must be 0 or 1, got {label!r}")
        if (first_id, second_id) in rows:
            raise ValueError(f"{file}, line {number}: the pair {first_id} {second_id} occurs twice")
        rows[first_id, second_id] = SentencePair(first.strip(), second.strip(), int(label))
    return rows


def _read_ids(file: Path) -> set[tuple[str, str]]:
    ids = set()
    for number, line in enumerate(_lines(file), start=1):
        fields = line.split("\t")
        if len(fields) != 2:
            raise ValueError(
                f"{file}, line {number}: {len(fields)} tab-separated fields instead of two ids: "
                "the file is truncated or of another format"
            )
        ids.add((fields[0], fields[1]))
    return ids


def _lines(file: Path) -> list[str]:
    """Split at line ends alone: a sentence may hold other signs that str.splitlines takes for one."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


# ---- batches -------------------------------------------------------------------------------------------------------


def joined(
    first: list[int], second: list[int], vocabulary: Vocabulary, length: int
) -> tuple[list[int], list[int]]:
    """Pieces ``<s> first </s> second </s>``, at most ``length`` of them, and for each 0 or 1: which sentence it is of.

    A pair that is too long loses pieces from the end of its longer sentence, one at a time, as in BERT's own
    fine-tuning (Devlin et al., arXiv 1810.04805): so neither sentence is lost while both still fit in part.
    """
    if length < 5:
        raise ValueError(f"a pair needs at least 5 places, two pieces and three special ones, got {length}")
    room = length - 3
    n = min(len(first), max(room - len(second), (room + 1) // 2))
    m = min(len(second), room - n)
    pieces = [vocabulary.begin, *first[:n], vocabulary.end, *second[:m], vocabulary.end]
    return pieces, [0] * (n + 2) + [1] * (m + 1)


@dataclass(frozen=True)
class PairRows:
    """Makes batches of joined pairs, padded to the longest of the batch.

    Inputs: what BERT reads, ``input_ids``, ``attention_mask`` and ``token_type_ids``, int64 [n, T]. Targets: the
    labels, int64 [n].
    """

    pieces: (
        Tensor  # of all pairs, one after another: thousands of small tensors would be slow to hand to workers
    )
    types: Tensor
    lengths: Tensor  # pieces of each pair, int64 [pairs]
    labels: Tensor
    pad: int

    @classmethod
    def of(
        cls, pairs: Sequence[SentencePair], encode: Encode, vocabulary: Vocabulary, length: int
    ) -> PairRows:
        firsts, seconds = encode([pair.first for pair in pairs]), encode([pair.second for pair in pairs])
        rows = [joined(first, second, vocabulary, length) for first, second in zip(firsts, seconds)]
        return cls(
            torch.tensor([piece for pieces, _ in rows for piece in pieces]),
            torch.tensor([which for _, types in rows for which in types]),
            torch.tensor([len(pieces) for pieces, _ in rows]),
            torch.tensor([pair.label for pair in pairs]),
            vocabulary.pad,
        )

    def __call__(self, indices: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        ends = self.lengths.cumsum(0)[indices].tolist()
        places = [slice(end - n, end) for end, n in zip(ends, self.lengths[indices].tolist())]
        rows = pad_sequence([self.pieces[p] for p in places], batch_first=True, padding_value=self.pad)
        types = pad_sequence([self.types[p] for p in places], batch_first=True)
        inputs = {
            "input_ids": rows,
            "attention_mask": (rows != self.pad).long(),
            "token_type_ids": types,
        }
        return inputs, self.labels[indices]


def confusion(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Shares of the pairs that are told rightly, and of each kind that F1 is made of; logits [n, 2], labels [n]."""
    told, true = logits.argmax(-1) == 1, labels == 1
    shares = {
        "correct": told == true,
        "true_positive": told & true,
        "false_positive": told & ~true,
        "false_negative": ~told & true,
    }
    return {name: share.double().mean() for name, share in shares.items()}


def pair_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Accuracy and F1 of the paraphrases, in percent; F1 is 0 where there are none and none is told."""
    wrong = means["false_positive"] + means["false_negative"]
    counted = means["true_positive"] + wrong / 2
    return {
        "accuracy": 100 * means["correct"],
        "f1": 100 * means["true_positive"] / counted if counted else 0.0,
    }
