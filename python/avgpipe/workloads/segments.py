"""A text as segments of a fixed number of pieces, for language models that read each segment by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from avgpipe.workloads.subwords import Subwords
from avgpipe.workloads.text import read_text, split_words

IGNORED = -100  # a target that no loss counts

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class Pieces:
    """A text as numbers of pieces.

    Attributes:
        numbers: int64 [pieces].
        words: float32 [pieces], the words of a piece's line, its end among them, over its pieces: the sum is the
            number of words in the text.
    """

    numbers: Tensor
    words: Tensor

    def __len__(self) -> int:
        return self.numbers.numel()


@dataclass(frozen=True)
class Segments:
    """Makes batches of segments: segment s reads the pieces ``s T`` to ``(s + 1) T - 1`` and predicts each one's next.

    So every piece but the very first is predicted once. The last segment is filled up with targets ``IGNORED``.

    Attributes:
        pieces: at least two.
        length: T.
        count_words: whether the words of the predicted pieces go with the targets.
    """

    pieces: Pieces
    length: int
    count_words: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a segment's length must be at least 1, got {self.length}")
        if len(self.pieces) < 2:
            raise ValueError(
                f"a text needs at least 2 pieces to predict one, and this has {len(self.pieces)}"
            )

    def __len__(self) -> int:
        return -(-(len(self.pieces) - 1) // self.length)

    def __call__(
        self, segments: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """Inputs and targets, int64 [n, T], of ``segments``, int64 [n]; nothing is drawn.

        With ``count_words`` the targets are ``(targets, words)``, words float32 [n].
        """
        read = segments[:, None] * self.length + torch.arange(self.length)
        last = len(self.pieces) - 1
        there = read < last
        following = (read + 1).clamp(max=last)
        inputs = self.pieces.numbers[read.clamp(max=last)]
        targets = self.pieces.numbers[following].masked_fill(~there, IGNORED)
        if not self.count_words:
            return inputs, targets
        return inputs, (targets, (self.pieces.words[following] * there).sum(1))


def load_pieces(
    path: str | Path | None, size: int, *, max_bytes: int | None = None
) -> tuple[Subwords, dict[str, Pieces]]:
    """A text in ``size`` pieces learnt from train, by split; every line ends with ``Subwords.end``.

    ``path``, ``max_bytes`` and errors as of :func:`avgpipe.workloads.text.read_text`.
    """
    texts = read_text(path, max_bytes)
    subwords = Subwords.learn(texts["train"].split("\n"), size)

    def encode(lines: Sequence[str]) -> list[list[int]]:
        return [[*numbers, Subwords.end] for numbers in subwords.encode(lines)]

    return subwords, {split: pieces_of(text, encode, source=path is None) for split, text in texts.items()}


def pieces_of(text: str, encode: Encode, *, source: bool = False) -> Pieces:
    """A text in the pieces that ``encode`` makes of its lines, each line's end among them.

    ``source``: words are counted as in a program, see :func:`avgpipe.workloads.text.split_words`.
    """
    lines = text.removesuffix("\n").split("\n")
    rows = encode(lines)
    counts = torch.tensor([len(row) for row in rows])
    words = torch.tensor([_words(line, source) for line in lines], dtype=torch.float32)
    numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int64)
    return Pieces(numbers, (words / counts.clamp(min=1)).repeat_interleave(counts))


def _words(line: str, source: bool) -> int:
    if source and not line.strip():
        return 0
    return len(split_words(line + "\n", source=source))
