"""Batches for truncated back-propagation through time: rows continue from batch to batch of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

import torch

_SHORTEST = 5  # of the jittered lengths
_LONGEST_OVER_BASE = 10


class LanguageBatches:
    """A text cut into ``pipelines * batch_size`` contiguous rows, read segment by segment.

    Pipeline i owns rows ``i * batch_size`` to ``(i + 1) * batch_size - 1``. Batch j is segment ``j //
    pipelines`` of pipeline ``j % pipelines``, and row r of a pipeline's batch goes on where row r of its
    previous batch ended, so a recurrent layer can carry its state. Yields ``(inputs, targets)``, both int64
    [batch_size, T]; targets are the next tokens. What does not fill the rows, less than one token per row, is
    left out.

    Args:
        tokens: int64 [tokens].
        batch_size: rows of one pipeline's batch.
        length: the longest T; all T differ by at most one, so the mean of the batches' losses is the mean
            over tokens.
        pipelines: how many pipelines read side by side.
        jitter: vary T as in Merity, Keskar, Socher 2018, section 4.1; see :func:`jittered_lengths`.
        seed, epoch: of the jittered lengths.
        start: the first batch to yield, for going on in the middle of an epoch.
        name: of the text, for messages.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        batch_size: int,
        length: int,
        *,
        pipelines: int = 1,
        jitter: bool = False,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
        name: str = "text",
    ) -> None:
        for what, value in (("batch_size", batch_size), ("length", length), ("pipelines", pipelines)):
            if value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        row_count = batch_size * pipelines
        row_length = tokens.numel() // row_count
        if row_length < 2:
            raise ValueError(
                f"{name} has {tokens.numel()} tokens, but {pipelines} pipeline(s) x {batch_size} rows "
                f"need at least {2 * row_count}; use a smaller batch size, fewer pipelines or more text"
            )
        self.batch_size = batch_size
        self.pipelines = pipelines
        self.lengths = segment_lengths(row_length - 1, length, jitter=jitter, seed=seed, epoch=epoch)
        self._rows = tokens[: row_count * row_length].view(row_count, row_length)
        self._offsets = [0, *accumulate(self.lengths)]
        total = len(self.lengths) * pipelines
        if not 0 <= start <= total:
            raise ValueError(f"start must be a batch of the epoch, 0 to {total}, got {start}")
        self.start = start
        self.total = total

    def __len__(self) -> int:
        return self.total - self.start

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in range(self.start, self.total):
            segment, pipeline = divmod(batch, self.pipelines)
            rows = self._rows[pipeline * self.batch_size : (pipeline + 1) * self.batch_size]
            begin, end = self._offsets[segment], self._offsets[segment + 1]
            yield rows[:, begin:end].contiguous(), rows[:, begin + 1 : end + 1].contiguous()


def segment_lengths(
    total: int, base: int, *, jitter: bool = False, seed: int = 0, epoch: int = 0
) -> list[int]:
    """Lengths that sum to ``total``: as even as possible and at most ``base``, or jittered around it."""
    if jitter:
        return jittered_lengths(total, base, seed=seed, epoch=epoch)
    count = -(-total // base)
    short, longer = divmod(total, count)
    return [short + 1] * longer + [short] * (count - longer)


def jittered_lengths(total: int, base: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    """Random segment lengths that sum to ``total``, so that epochs cut a text at different places.

    Each is drawn around ``base`` with probability 0.95, else around ``base / 2``, from a normal distribution
    of deviation 5 (Merity, Keskar, Socher 2018, section 4.1), and kept between 5 and ``base + 10``; the last
    is what remains.
    """
    draw = random.Random(f"segment lengths {seed} {epoch}")
    lengths: list[int] = []
    left = total
    while left > 0:
        centre = base if draw.random() < 0.95 else base / 2
        length = int(draw.gauss(centre, 5))
        length = min(max(length, min(_SHORTEST, base)), base + _LONGEST_OVER_BASE, left)
        lengths.append(length)
        left -= length
    return lengths
