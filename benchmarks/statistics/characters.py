"""A workload that is not of the papers: a small decoder that predicts characters of Multi30k's German.

Text that begins on a plateau, at a rate that stays as it is and is the best for one device: what late gradients cost
at the beginning of training shows here most.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from avgpipe.tasks import BuildOptions, Workload
from avgpipe_lab.workloads.batches import TensorRows, shuffled
from avgpipe_lab.workloads.data import read_bytes
from avgpipe_lab.workloads.gpt import Pieces, segments
from avgpipe_lab.workloads.recipe import Recipe, Samples, make_workload
from avgpipe_lab.workloads.tokens import TokenLoss, perplexity

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
RECIPE = Recipe(batch_size=16, epochs=1, optimizer="adamw", lr=0.0015, weight_decay=0.01, decay="none")
UNKNOWN = 0  # the number of characters that the training text lacks


class Begin(nn.Module):
    """Numbers of characters to features, those of their places added."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(torch.empty(LENGTH, WIDTH))
        for weight in (self.embedding.weight, self.places):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x) + self.places


class Block(nn.TransformerEncoderLayer):
    """A layer whose places see none behind them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)


def built(folder: Path, seed: int, batch_size: int) -> Workload:
    """Read the texts and make the model, with initial weights and an order of samples of the seed."""
    texts = {split: read_bytes(folder / f"{split}.de.gz").decode() for split in ("train", "val")}
    known = {c: n for n, c in enumerate(sorted(set(texts["train"])), UNKNOWN + 1)}
    rows = {split: _rows(text, known) for split, text in texts.items()}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        ends = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(known) + 1))
        layers = [Begin(len(known) + 1), *(Block() for _ in range(LAYERS)), nn.Sequential(*ends)]
    loss, options = TokenLoss(), BuildOptions(seed=seed, batch_size=batch_size)
    fields = {
        "layers": layers,
        "loss_fn": loss,
        "metrics": lambda loss, means: {"perplexity": perplexity(loss)},
        "metric_name": "perplexity",
        "lower_is_better": True,
    }
    samples = Samples(
        partial(shuffled, len(rows["train"].data[0])),
        rows["train"],
        rows["val"],
        torch.arange(len(rows["val"].data[0])),
    )
    return make_workload("char", options, RECIPE.with_options(options), samples, fields)


def _rows(text: str, known: dict[str, int]) -> TensorRows:
    numbers = torch.tensor([known.get(c, UNKNOWN) for c in text])
    inputs, targets, _ = segments(Pieces(numbers, torch.ones(len(numbers))), LENGTH)
    return TensorRows((inputs, targets))
