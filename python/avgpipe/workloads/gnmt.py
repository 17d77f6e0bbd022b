"""Google's neural machine translation model as a list of layers (Wu et al. 2016, arXiv 1609.08144, section 3).

In the form that most train: the first encoder layer is bidirectional, residual connections begin with the third
layer of either side, and the decoder's first layer asks the encoder by normalised additive attention (Bahdanau,
Cho, Bengio, ICLR 2015, arXiv 1409.0473; weight norm as in Luong, Brevdo, Zhao 2017). The answer, the context, is
an input of every later decoder layer; it is not fed back into the first, so that layer needs no loop over time.

Batch first everywhere: b sentence pairs, S source pieces, T target pieces, H features. Between layers travels a
dict with what later layers need:

| after | ``x`` | and |
|---|---|---|
| an encoder layer | [b, S, H] (of the first LSTM [b, S, 2H]) | ``lengths`` [b], ``target`` [b, T] |
| a decoder layer | [b, T, H] | ``context`` [b, T, H], unless it is the last |

and ``at``, if the input has it. No padding reaches a real position: the backward direction runs over each
sentence reversed by its own length, the attention sees no source padding, and all else looks back only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Uniform = Callable[[tuple[int, ...]], nn.Parameter]
Value = dict[str, Any]


@dataclass(frozen=True)
class GNMTConfig:
    """Sizes; the defaults are GNMT with 8 LSTM layers, 4 on each side.

    Attributes:
        vocabulary: pieces, of both languages together; their embeddings are shared.
        hidden: H.
        encoder_layers, decoder_layers: LSTM layers on each side.
        dropout: of the inputs of every LSTM.
        tied_output: the output projection is the embedding too; it saves a small data set many weights.
        embedding_bound: the embedding's initial values are uniform within it. 0.1 is published for H = 1024; small
            models with it spend most of a short run on learning to tell words apart.
    """

    vocabulary: int
    hidden: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    dropout: float = 0.2
    tied_output: bool = False
    embedding_bound: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 1), ("hidden", 1), ("encoder_layers", 1), ("decoder_layers", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not self.embedding_bound > 0:
            raise ValueError(f"embedding_bound must be positive, got {self.embedding_bound}")

    def encoder_inputs(self) -> list[int]:
        """Input features of each encoder layer."""
        return [self.hidden, 2 * self.hidden, *[self.hidden] * self.encoder_layers][: self.encoder_layers]

    def memory(self) -> int:
        """Features of the encoder's output, and of the contexts."""
        return self.hidden * (2 if self.encoder_layers == 1 else 1)


def gnmt_layers(config: GNMTConfig, *, seed: int = 0, output_bias: Tensor | None = None) -> list[nn.Module]:
    """[embedding, encoder LSTMs, decoder LSTMs, output]: a dict of tokens to logits [b, T, vocabulary].

    The input has ``source`` int64 [b, S], whatever beyond ``lengths`` int64 [b] (1 to S), and ``target`` int64
    [b, T], the pieces before those to be predicted. With an int ``at`` only the logits of that target position
    are made, [b, vocabulary]. The decoder's embedding is the encoder's, the same Parameter, and so is the
    projection with ``tied_output``. Initial weights, uniform within 1 / sqrt(H) but for the embedding, depend on
    the seed alone; the caller's random state stays as it is.

    ``output_bias``: where the projection's bias begins, [vocabulary]; None: zero.
    """
    H, p = config.hidden, config.dropout
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(config.vocabulary) if output_bias is None else output_bias

    def uniform(shape: tuple[int, ...], bound: float = H**-0.5) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    embedding = uniform((config.vocabulary, H), config.embedding_bound)
    layers: list[nn.Module] = [SourceEmbedding(embedding)]
    for index, inputs in enumerate(config.encoder_inputs()):
        kind = EncoderLSTM if index else BidirectionalLSTM
        layers.append(kind(inputs, H, uniform, dropout=p, residual=index >= 2))
    layers.append(AttentionLSTM(embedding, config.memory(), uniform, dropout=p))
    for index in range(1, config.decoder_layers):
        last = index == config.decoder_layers - 1
        layers.append(DecoderLSTM(H, config.memory(), uniform, dropout=p, residual=index >= 2, last=last))
    weight = embedding if config.tied_output else uniform((config.vocabulary, H))
    return [*layers, Output(weight, bias)]


def gnmt_costs(config: GNMTConfig, length: int = 20) -> list[float]:
    """Work per token of each layer in multiply-adds, when sentences have ``length`` pieces in both languages.

    Element-wise work counts as the multiply-adds that take a CPU as long, forward and backward: it is a third of
    a small model's time.
    """
    H, memory = config.hidden, config.memory()

    def lstm(inputs: int) -> float:
        return 4.0 * H * (inputs + H) + _PER_DROPPED * inputs

    encoder = [lstm(inputs) for inputs in config.encoder_inputs()]
    encoder[0] *= 2
    attention = H * (H + memory) + length * (_PER_ATTENTION_UNIT * H + memory)
    decoder = [lstm(H) + attention, *[lstm(H + memory)] * (config.decoder_layers - 1)]
    return [float(H), *encoder, *decoder, float((H + _PER_LOGIT) * config.vocabulary)]


# Measured with H = 128, a vocabulary of 2,000 and sentences of 17 pieces, on one core.
_PER_DROPPED, _PER_ATTENTION_UNIT, _PER_LOGIT = 100.0, 115.0, 50.0


class LSTM(nn.Module):
    """One LSTM layer from a zero state, [b, T, inputs] to [b, T, hidden]; dropout of its input."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, *, dropout: float) -> None:
        super().__init__()
        # gates in torch's order: input, forget, cell, output
        self.weight_ih = uniform((4 * hidden, inputs))
        self.weight_hh = uniform((4 * hidden, hidden))
        self.bias_ih = uniform((4 * hidden,))
        self.bias_hh = uniform((4 * hidden,))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        zero = x.new_zeros(1, x.shape[0], self.weight_hh.shape[1])
        weights: list[Tensor] = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        output, _, _ = torch.lstm(x, (zero, zero), weights, True, 1, 0.0, self.training, False, True)
        return output


class SourceEmbedding(nn.Module):
    """``source`` [b, S] to ``x`` [b, S, H]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.compute_cost = float(weight.shape[1])

    def forward(self, value: Value) -> Value:
        rest = {name: part for name, part in value.items() if name != "source"}
        return {**rest, "x": F.embedding(value["source"], self.weight)}


class EncoderLSTM(nn.Module):
    """``x`` [b, S, inputs] to [b, S, H], with itself added where ``residual``."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, *, dropout: float, residual: bool) -> None:
        super().__init__()
        self.lstm = LSTM(inputs, hidden, uniform, dropout=dropout)
        self.residual = residual

    def forward(self, value: Value) -> Value:
        x = self.lstm(value["x"])
        return {**value, "x": x + value["x"] if self.residual else x}


class BidirectionalLSTM(EncoderLSTM):
    """``x`` [b, S, H] to [b, S, 2H]: one LSTM over the sentence, another over the sentence reversed."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, *, dropout: float, residual: bool) -> None:
        super().__init__(inputs, hidden, uniform, dropout=dropout, residual=residual)
        self.backward_lstm = LSTM(inputs, hidden, uniform, dropout=dropout)

    def forward(self, value: Value) -> Value:
        x, lengths = value["x"], value["lengths"]
        backward = reverse(self.backward_lstm(reverse(x, lengths)), lengths)
        return {**value, "x": torch.cat((self.lstm(x), backward), -1)}


def reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """The first ``lengths`` [b] positions of [b, S, features] in reverse order; the others stay."""
    at = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - at
    index = torch.where(mirrored >= 0, mirrored, at)
    return x.gather(1, index[:, :, None].expand_as(x))


class Attention(nn.Module):
    """Normalised additive attention: which parts of a memory answer a query.

    score = g v / |v| . tanh(W q + U m + c); the weights are its softmax over the memory's real positions.
    """

    def __init__(self, queries: int, memory: int, units: int, uniform: Uniform) -> None:
        super().__init__()
        self.query_weight = uniform((units, queries))
        self.memory_weight = uniform((units, memory))
        self.v = uniform((units,))
        self.g = nn.Parameter(torch.full((1,), units**-0.5))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, queries: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """queries [b, T, queries], memory [b, S, memory], lengths [b] to contexts [b, T, memory]."""
        keys = F.linear(memory, self.memory_weight, self.bias)
        sums = F.linear(queries, self.query_weight)[:, :, None] + keys[:, None]  # [b, T, S, units]
        scores = torch.tanh(sums) @ (self.g * self.v / self.v.norm())
        padding = torch.arange(memory.shape[1], device=lengths.device) >= lengths[:, None]
        weights = scores.masked_fill(padding[:, None], -torch.inf).softmax(-1)
        contexts: Tensor = weights @ memory
        return contexts


class AttentionLSTM(nn.Module):
    """The decoder's first layer: embeds ``target``, and asks ``x``, the encoder's output, for the contexts."""

    def __init__(self, embedding: nn.Parameter, memory: int, uniform: Uniform, *, dropout: float) -> None:
        super().__init__()
        hidden = embedding.shape[1]
        self.embedding = embedding
        self.lstm = LSTM(hidden, hidden, uniform, dropout=dropout)
        self.attention = Attention(hidden, memory, hidden, uniform)
        own = (p.numel() for p in (*self.lstm.parameters(), *self.attention.parameters()))
        self.compute_cost = float(sum(own))  # not the embedding, which is only looked up

    def forward(self, value: Value) -> Value:
        x = self.lstm(F.embedding(value["target"], self.embedding))
        rest = {name: part for name, part in value.items() if name == "at"}
        return {**rest, "x": x, "context": self.attention(x, value["x"], value["lengths"])}


class DecoderLSTM(nn.Module):
    """``x`` and ``context`` [b, T, H] to ``x`` [b, T, H], with itself added where ``residual``."""

    def __init__(
        self, hidden: int, memory: int, uniform: Uniform, *, dropout: float, residual: bool, last: bool
    ) -> None:
        super().__init__()
        self.lstm = LSTM(hidden + memory, hidden, uniform, dropout=dropout)
        self.residual = residual
        self.last = last

    def forward(self, value: Value) -> Value:
        x = self.lstm(torch.cat((value["x"], value["context"]), -1))
        kept = {name: part for name, part in value.items() if not (self.last and name == "context")}
        return {**kept, "x": x + value["x"] if self.residual else x}


class Output(nn.Module):
    """``x`` [b, T, H] to logits [b, T, vocabulary], or of position ``at`` alone [b, vocabulary]."""

    def __init__(self, weight: nn.Parameter, bias: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(bias.clone())

    def forward(self, value: Value) -> Tensor:
        x: Tensor = value["x"]
        return F.linear(x[:, value["at"]] if "at" in value else x, self.weight, self.bias)


class TranslationLoss(nn.Module):
    """Mean cross entropy in nats per piece of the target; padding does not count.

    Training smooths the labels: so much of each label's probability is spread over the vocabulary (Szegedy et
    al., CVPR 2016, section 7). ``output``: logits [b, T, vocabulary]; ``target``: int64 [b, T].
    """

    def __init__(self, pad: int, smoothing: float = 0.1) -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
        self.pad = pad
        self.smoothing = smoothing

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            output.flatten(0, 1).to(torch.promote_types(output.dtype, torch.float32)),
            target.flatten(),
            ignore_index=self.pad,
            label_smoothing=self.smoothing if self.training else 0.0,
        )

    def weight(self, target: Tensor) -> float:
        """How many pieces a loss is the mean of."""
        return float((target != self.pad).sum())
