"""Batches: of independent samples, or of rows of a text that continue from batch to batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from avgpipe.model.context import mix

MakeBatch = Callable[[Tensor, torch.Generator], tuple[Any, Any]]

_ORDER, _DRAW = 1, 2  # purposes of generators
_POOL_BATCHES = 50


@dataclass(frozen=True)
class SampleBatches(Dataset[tuple[Any, Any]]):
    """Batch j holds the samples ``order[j * batch_size : (j + 1) * batch_size]``; the last may be shorter.

    Attributes:
        order: int64 [samples], the indices of an epoch in their order; see :func:`shuffled` and :func:`by_length`.
        batch_size: samples in a batch.
        make: makes ``(inputs, targets)`` of indices, int64 [n], with a generator for random numbers. The generator
            depends on seed, epoch and batch only. With workers ``make`` must be picklable.
        seed, epoch: seeds of the generators.
        start: the first batch to yield, for resuming in the middle of an epoch.
        workers: processes that prepare batches in advance; 0: batches are made on request.
    """

    order: Tensor
    batch_size: int
    make: MakeBatch
    seed: int = 0
    epoch: int = 0
    start: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        if len(self.order) == 0:
            raise ValueError("there are no samples to make batches of")

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size) - self.start

    def __getitem__(self, batch: int) -> tuple[Any, Any]:
        """Make batch ``batch`` of the epoch, for any ``start``."""
        indices = self.order[batch * self.batch_size : (batch + 1) * self.batch_size]
        return self.make(indices, generator(_DRAW, self.seed, self.epoch, batch))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        wanted = range(self.start, self.start + len(self))
        if not self.workers:
            return map(self.__getitem__, wanted)
        # A batch here is a sample of the DataLoader, so its workers make whole batches, in order.
        workers = min(self.workers, max(1, len(wanted)))
        draw = generator(_DRAW, self.seed, self.epoch, -1)
        return iter(DataLoader(self, batch_size=None, sampler=wanted, num_workers=workers, generator=draw))


@dataclass(frozen=True)
class TensorRows:
    """Makes batches of the rows of tensors: ``data`` is a pytree ``(inputs, targets)``; draws nothing."""

    data: tuple[Any, Any]

    def __call__(self, indices: Tensor, draw: torch.Generator) -> Any:
        return tree_map(lambda tensor: tensor[indices], self.data)


@dataclass(frozen=True)
class RaggedRows:
    """Rows of different lengths, concatenated: thousands of small tensors would be slow to send to loader workers.

    Attributes:
        values: int64 [of all rows together, ...].
        lengths: int64 [rows].
    """

    values: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]]) -> RaggedRows:
        values, lengths = [v for row in rows for v in row], [len(row) for row in rows]
        return cls(torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))

    def padded(self, indices: Tensor, value: int = 0) -> Tensor:
        """Return the rows ``indices`` [n] as a tensor [n, length of the longest, ...]."""
        ends = self.lengths.cumsum(0)[indices].tolist()
        rows = [self.values[end - n : end] for end, n in zip(ends, self.lengths[indices].tolist())]
        return pad_sequence(rows, batch_first=True, padding_value=value)


def generator(*words: int) -> torch.Generator:
    """Return a generator seeded by these numbers only."""
    return torch.Generator().manual_seed(mix(*words))


def shuffled(samples: int, batch_size: int, seed: int, epoch: int, *, drop_last: bool = False) -> Tensor:
    """Return a permutation of ``range(samples)``, a different one in each epoch.

    ``drop_last``: leave out samples that do not fill a batch, unless there is no full batch.
    """
    kept = max(1, samples // batch_size) * batch_size if drop_last else samples
    return torch.randperm(samples, generator=generator(_ORDER, seed, epoch))[:kept]


def by_length(lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation in which a batch's samples are of similar length, so that little of it is padding.

    Samples are shuffled, those of 50 batches at a time are sorted by length, and then the batches are
    shuffled; samples that do not fill a batch are last.
    """
    draw = generator(_ORDER, seed, epoch)
    pools = torch.split(torch.randperm(len(lengths), generator=draw), _POOL_BATCHES * batch_size)
    order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    whole = order.numel() // batch_size * batch_size
    batches = order[:whole].view(-1, batch_size)
    shuffle = torch.randperm(batches.shape[0], generator=draw)
    return torch.cat([batches[shuffle].reshape(-1), order[whole:]])


def continued_batches(
    tokens: Tensor,
    batch_size: int,
    lengths: Callable[[int], list[int]],
    pipelines: int = 1,
    name: str = "text",
) -> list[tuple[Tensor, Tensor]]:
    """Cut a text into ``pipelines * batch_size`` contiguous rows, and these into batches, segment by segment.

    For truncated back-propagation through time. Pipeline i has rows ``i * batch_size`` to
    ``(i + 1) * batch_size - 1``. Batch j is segment ``j // pipelines`` of pipeline ``j % pipelines``, and row
    r of a pipeline's batch continues row r of its previous batch, so a recurrent layer can carry its state.
    Tokens that do not fill the rows, less than one per row, are left out.

    Args:
        tokens: int64 [tokens].
        batch_size: rows of one pipeline's batch.
        lengths: maps the number of tokens that a row predicts to the T of each segment, see
            :func:`segment_lengths`.
        pipelines: number of pipelines that train on batches in turn, each with its own rows.
        name: name of the text in the message.

    Returns:
        ``(inputs, targets)``, both int64 [batch_size, T]; targets are the next tokens.

    Raises:
        ValueError: the text is too short.
    """
    rows = pipelines * batch_size
    row_length = len(tokens) // rows
    if row_length < 2:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, but {pipelines} pipeline(s) x {batch_size} rows "
            f"need at least {2 * rows}; use a smaller batch size, fewer pipelines or more text"
        )
    text = tokens[: rows * row_length].view(pipelines, batch_size, row_length)
    cut = lengths(row_length - 1)
    inputs, targets = (torch.split(part, cut, -1) for part in (text[..., :-1], text[..., 1:]))
    return [(x.contiguous(), y.contiguous()) for pair in zip(inputs, targets) for x, y in zip(*pair)]


def segment_lengths(total: int, base: int, jitter: bool = False, seed: int = 0, epoch: int = 0) -> list[int]:
    """Return lengths that sum to ``total``: as even as possible and at most ``base``, or jittered around it.

    With jitter, epochs cut a text at different places: each length is drawn around ``base`` with probability
    0.95, else around ``base / 2``, from a normal distribution of deviation 5 (Merity, Keskar, Socher 2018,
    section 4.1), and limited to 5 to ``base + 10``; the last is the remainder.
    """
    if not jitter:
        count = -(-total // base)
        short, longer = divmod(total, count)
        return [short + 1] * longer + [short] * (count - longer)
    draw = random.Random(f"segment lengths {seed} {epoch}")
    lengths: list[int] = []
    while total > 0:
        length = int(draw.gauss(base if draw.random() < 0.95 else base / 2, 5))
        lengths.append(min(max(length, min(5, base)), base + 10, total))
        total -= lengths[-1]
    return lengths
