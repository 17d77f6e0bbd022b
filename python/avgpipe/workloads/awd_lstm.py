"""The AWD-LSTM language model as a list of layers (Merity, Keskar, Socher, ICLR 2018, arXiv 1708.02182).

Batch first everywhere: T is the length of a segment, b the rows. Between layers travels one tensor [b, T,
features]; only the last LSTM adds its activation penalties, two numbers per row, which take less room than
the outputs from which they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe.runtime.context import Carry

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AWDLSTMConfig:
    """Sizes and regularisation; the defaults are the paper's for WikiText-2 (section 5)."""

    vocabulary: int
    embedding: int
    hidden: int
    lstm_layers: int
    embedding_dropout: float = 0.1  # of whole words
    input_dropout: float = 0.65  # of the first LSTM's input features
    hidden_dropout: float = 0.25  # of the features between LSTMs
    output_dropout: float = 0.4  # of the last LSTM's features
    weight_dropout: float = 0.5  # of the hidden-to-hidden weights
    alpha: float = 2.0  # activation regularisation
    beta: float = 1.0  # temporal activation regularisation

    def __post_init__(self) -> None:
        for name in ("vocabulary", "embedding", "hidden", "lstm_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("embedding", "input", "hidden", "output", "weight"):
            p = getattr(self, f"{name}_dropout")
            if not 0 <= p < 1:
                raise ValueError(f"{name}_dropout must be in [0, 1), got {p}")

    def lstm_sizes(self) -> list[tuple[int, int]]:
        """Input and hidden features of each LSTM; the last gives the tied decoder its input."""
        widths = [self.embedding, *[self.hidden] * (self.lstm_layers - 1), self.embedding]
        return list(pairwise(widths))


def awd_lstm_layers(
    config: AWDLSTMConfig, *, seed: int = 0, decoder_bias: Tensor | None = None
) -> list[nn.Module]:
    """[embedding, LSTM, ..., LSTM, decoder]: int64 tokens [b, T] to logits [b, T, vocabulary].

    The decoder's weight is the embedding's weight, the same Parameter. In training, with alpha or beta, the
    output is ``(logits, penalties)`` as :class:`AWDLSTMLoss` wants it. Initial weights depend on the seed
    alone; the caller's random state stays as it is.

    ``decoder_bias``: where the decoder's bias begins, [vocabulary]; None: zero, as in the paper.
    """
    if decoder_bias is None:
        decoder_bias = torch.zeros(config.vocabulary)
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], bound: float) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    embedding = DroppedEmbedding(
        uniform((config.vocabulary, config.embedding), 0.1),
        word_dropout=config.embedding_dropout,
        dropout=config.input_dropout,
    )
    layers: list[nn.Module] = [embedding]
    for index, (inputs, hidden) in enumerate(config.lstm_sizes()):
        last = index == config.lstm_layers - 1
        layers.append(
            WeightDropLSTM(
                inputs,
                hidden,
                uniform,
                weight_dropout=config.weight_dropout,
                dropout=config.output_dropout if last else config.hidden_dropout,
                penalties=last and (config.alpha != 0 or config.beta != 0),
            )
        )
    return [*layers, TiedDecoder(embedding.weight, decoder_bias)]


def awd_lstm_costs(config: AWDLSTMConfig) -> list[float]:
    """Multiply-adds per token of each layer; the embedding's look-up counts one per feature."""
    lstms = [4.0 * hidden * (inputs + hidden) for inputs, hidden in config.lstm_sizes()]
    return [float(config.embedding), *lstms, float(config.embedding * config.vocabulary)]


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of [b, T, features] with one mask [b, 1, features] for all T (variational dropout)."""
    if not training or p == 0:
        return x
    mask = x.new_empty(x.shape[0], 1, x.shape[2]).bernoulli_(1 - p).div_(1 - p)
    return x * mask


class DroppedEmbedding(nn.Module):
    """Tokens [b, T] to vectors [b, T, embedding]; training drops whole words, then features of each row.

    A word is dropped wherever it occurs, the others are scaled by 1 / (1 - p). Masking the looked-up vectors
    equals masking the rows of the weight, and touches T * b rows instead of the whole vocabulary.
    """

    def __init__(self, weight: nn.Parameter, *, word_dropout: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.word_dropout = word_dropout
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        if self.training and self.word_dropout > 0:
            kept = 1 - self.word_dropout
            words = self.weight.new_empty(self.weight.shape[0]).bernoulli_(kept).div_(kept)
            x = x * words[tokens].unsqueeze(-1)
        return locked_dropout(x, self.dropout, self.training)


class WeightDropLSTM(nn.Module):
    """One LSTM layer, [b, T, inputs] to [b, T, hidden], with DropConnect on its hidden-to-hidden weights.

    One weight mask serves a whole forward; locked dropout follows the output. The hidden state is carried
    from batch to batch without gradient. Evaluation carries a state of its own, which begins at zero when the
    layer is switched from training to evaluation. A batch with another number of rows begins at zero too.

    With ``penalties`` the output in training is ``(x, penalties)``: for each row the mean square of the
    dropped output and of the raw output's difference from one time step to the next, float [b, 2].
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        uniform: Callable[[tuple[int, ...], float], nn.Parameter],
        *,
        weight_dropout: float = 0.0,
        dropout: float = 0.0,
        penalties: bool = False,
    ) -> None:
        super().__init__()
        bound = hidden**-0.5
        # gates in torch's order: input, forget, cell, output
        self.weight_ih = uniform((4 * hidden, inputs), bound)
        self.weight_hh = uniform((4 * hidden, hidden), bound)
        self.bias_ih = uniform((4 * hidden,), bound)
        self.bias_hh = uniform((4 * hidden,), bound)
        self.weight_dropout = weight_dropout
        self.dropout = dropout
        self.penalties = penalties
        self.training_carry = Carry()
        self.evaluation_carry = Carry()

    def train(self, mode: bool = True) -> WeightDropLSTM:
        if self.training and not mode:
            self.evaluation_carry.reset()
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        carry = self.training_carry if self.training else self.evaluation_carry
        weight_hh = F.dropout(self.weight_hh, self.weight_dropout, self.training)
        weights = [self.weight_ih, weight_hh, self.bias_ih, self.bias_hh]
        # nn.LSTM calls the same operator; called here, it takes the masked weight as it is, with its gradient
        raw, h, c = torch.lstm(x, self._state(carry, x), weights, True, 1, 0.0, self.training, False, True)
        carry.set((h.detach(), c.detach()))
        dropped = locked_dropout(raw, self.dropout, self.training)
        if self.training and self.penalties:
            return dropped, _penalties(raw, dropped)
        return dropped

    def _state(self, carry: Carry, x: Tensor) -> State:
        state: State | None = carry.get()
        if state is None or state[0].shape[1] != x.shape[0]:
            zeros = x.new_zeros(1, x.shape[0], self.weight_hh.shape[1])
            return zeros, zeros
        return state[0].to(x), state[1].to(x)


def _penalties(raw: Tensor, dropped: Tensor) -> Tensor:
    dtype = torch.promote_types(raw.dtype, torch.float32)  # under autocast, squares want more than 8 bits
    activation = dropped.to(dtype).square().mean((1, 2))
    if raw.shape[1] == 1:
        return torch.stack((activation, torch.zeros_like(activation)), 1)
    raw = raw.to(dtype)
    return torch.stack((activation, (raw[:, 1:] - raw[:, :-1]).square().mean((1, 2))), 1)


class TiedDecoder(nn.Module):
    """Features [b, T, embedding] to logits [b, T, vocabulary] by the embedding's weight; penalties pass."""

    def __init__(self, weight: nn.Parameter, bias: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(x, Tensor):
            return F.linear(x, self.weight, self.bias)
        features, penalties = x
        return F.linear(features, self.weight, self.bias), penalties


class AWDLSTMLoss(nn.Module):
    """Mean cross entropy in nats per token; in training plus alpha AR and beta TAR (section 4.6).

    ``output``: logits [b, T, vocabulary] or ``(logits, penalties [b, 2])``. ``target``: int64 [b, T].
    Evaluation ignores penalties.
    """

    def __init__(self, alpha: float = 2.0, beta: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha
        self.beta = beta

    def forward(self, output: Any, target: Tensor) -> Tensor:
        logits, penalties = (output, None) if isinstance(output, Tensor) else output
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        if self.training and penalties is not None:
            activation, temporal = penalties.mean(0)
            loss = loss + self.alpha * activation + self.beta * temporal
        return loss
