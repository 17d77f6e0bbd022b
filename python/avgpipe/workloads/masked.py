"""Masked language modelling: segments of a text in which some pieces are hidden and to be told (Devlin, Chang, Lee,
Toutanova, *BERT*, NAACL 2019, arXiv 1810.04805, section 3.1 and appendix A.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe.workloads.language import perplexity
from avgpipe.workloads.samples import generator
from avgpipe.workloads.segments import IGNORED

HIDDEN_SHARE = 0.15

_MASK, _RANDOM = 0.8, 0.1  # of the hidden pieces, those replaced by <mask> and by any piece; the others stay


@dataclass(frozen=True)
class Vocabulary:
    """How many pieces there are, and the numbers of the special ones."""

    size: int
    pad: int
    begin: int
    end: int
    mask: int


def segments(lines: Iterable[list[int]], length: int, vocabulary: Vocabulary) -> Tensor:
    """Cut a text's pieces, line after line, into rows ``<s> piece ... piece </s>``; int64 [rows, length].

    What is left at the end and fills no row is left out: so nothing is padded, and no attention needs a mask. Raises
    ValueError for a text that fills no row, and for rows too short to hold a piece.
    """
    if length < 3:
        raise ValueError(f"a segment needs at least 3 places, for <s>, a piece and </s>, got {length}")
    pieces = torch.tensor([piece for line in lines for piece in line], dtype=torch.int64)
    room = length - 2
    count = pieces.numel() // room
    if count == 0:
        raise ValueError(f"a text of {pieces.numel()} pieces fills no segment of {room}: give a longer one")
    ends = torch.tensor([vocabulary.begin, vocabulary.end]).expand(count, 2)
    return torch.cat([ends[:, :1], pieces[: count * room].view(count, room), ends[:, 1:]], 1)


def hide(rows: Tensor, vocabulary: Vocabulary, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hide 15 % of each row's pieces, rounded and at least one: 80 % of them become ``<mask>``, 10 % any piece, 10 %
    stay as they are.

    Args:
        rows: int64 [n, T] with at least one piece each.
        draw: all that is drawn comes from it.

    Returns:
        Of the same shape, the rows to read and the targets: the hidden pieces, elsewhere ``IGNORED``.
    """
    special = torch.tensor([vocabulary.pad, vocabulary.begin, vocabulary.end])
    is_special = torch.isin(rows, special)
    # Different pieces of a row: those with the smallest of its random numbers.
    order = torch.rand(rows.shape, generator=draw).masked_fill(is_special, 2.0).argsort(1)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(rows.shape[1]).expand_as(order))
    wanted = ((~is_special).sum(1, keepdim=True) * HIDDEN_SHARE).round().clamp(min=1)
    hidden = (rank < wanted) & ~is_special
    fate = torch.rand(rows.shape, generator=draw)
    any_piece = torch.randint(vocabulary.size, rows.shape, generator=draw)
    read = rows.masked_fill(hidden & (fate < _MASK), vocabulary.mask)
    read = torch.where(hidden & (fate >= 1 - _RANDOM), any_piece, read)
    return read, rows.masked_fill(~hidden, IGNORED)


@dataclass(frozen=True)
class HiddenAnew:
    """Makes training batches of segments, each time with other pieces hidden; inputs and targets int64 [n, T]."""

    rows: Tensor
    vocabulary: Vocabulary

    def __call__(self, indices: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return hide(self.rows[indices], self.vocabulary, draw)


@dataclass(frozen=True)
class HiddenOnce:
    """Makes batches in which a segment always has the same pieces hidden, whatever seed and batch size are."""

    read: Tensor
    targets: Tensor

    @classmethod
    def of(cls, rows: Tensor, vocabulary: Vocabulary) -> HiddenOnce:
        return cls(*hide(rows, vocabulary, generator(0)))

    def __call__(self, indices: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.read[indices], self.targets[indices]


class MaskedLoss(nn.Module):
    """Mean cross entropy in nats per hidden piece: of logits [n, T, pieces] and targets int64 [n, T]."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def hidden_pieces(targets: Tensor) -> float:
    """How many pieces the loss is the mean of."""
    return float((targets != IGNORED).sum())


def told_pieces(logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """Means per segment: hidden pieces, and how many of them have the largest logit."""
    hidden = targets != IGNORED
    told = (logits.argmax(-1) == targets) & hidden
    samples = targets.shape[0]
    return {"hidden": hidden.sum() / samples, "told": told.sum() / samples}


def masked_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Perplexity of the hidden pieces, and in percent how many of them are told."""
    return {"perplexity": perplexity(loss), "accuracy": 100 * means["told"] / means["hidden"]}


def blind_perplexity(log_shares: Tensor, targets: Tensor) -> float:
    """The perplexity of the hidden pieces by their shares of the training text; log_shares: float [pieces]."""
    return perplexity(-float(log_shares[targets[targets != IGNORED]].double().mean()))
