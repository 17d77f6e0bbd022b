"""Models that torch.fx cannot trace: their forwards ask for sizes and values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal, with a mask in a buffer and a probability of dropout that goes by the mode."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.all, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), dropout
        self.register_buffer("seen", torch.ones(context, context).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in self.all(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // 2)
        shares = scores.masked_fill(~self.seen[:T, :T], float("-inf")).softmax(-1)
        shares = functional.dropout(shares, self.dropout, self.training)
        return self.out((shares @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, context, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """As people write it: an assert, a branch without targets, and a head that is tied to the embedding."""

    def __init__(self, blocks: int = 4, width: int = 8, context: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(context, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(width, context, dropout) for _ in range(blocks)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        _, T = idx.size()
        assert self.context >= T, f"a sequence of {T} is longer than {self.context}"
        at = torch.arange(T, dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](at))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NormTanh(nn.BatchNorm1d):
    """A BatchNorm of somebody's own that does more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Checked(nn.Module):
    """Asserts that look at values, BatchNorms, values that are changed in place, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(CheckedBlock() for _ in range(3))
        self.norm = NormTanh(8)
        self.head = nn.Linear(8, 3)
        self.stem.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all(), "inputs must be finite"
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class CheckedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.abs().max() < 1e6, "values explode"
        h = self.norm(self.lin(x))
        h[:, :4].mul_(0.5)
        h += x
        return h.tanh_()


def transformer(dropout: float = 0.0) -> nn.Transformer:
    return nn.Transformer(8, 2, 2, 3, 16, dropout=dropout, batch_first=True)
