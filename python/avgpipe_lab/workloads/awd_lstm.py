"""The workload ``awd-lstm``: a word-level language model on a text, AWD-LSTM, in three sizes.

Merity, Keskar, Socher, ICLR 2018, arXiv 1708.02182. The model is a list of layers, batch first everywhere: T
is the length of a segment, b the rows. One tensor [b, T, features] passes between layers; only the last LSTM
adds its activation penalties, two numbers per row, which are smaller than the outputs that they are made
from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from avgpipe.model.context import Carry
from avgpipe.tasks import BuildOptions
from avgpipe_lab.workloads import tokens
from avgpipe_lab.workloads.batches import continued_batches, segment_lengths
from avgpipe_lab.workloads.data import find_text, load_text
from avgpipe_lab.workloads.recipe import Built, Recipe
from avgpipe_lab.workloads.tokens import TokenLoss, Uniform, at_least_float32, perplexity


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


@dataclass(frozen=True)
class LanguagePreset:
    """A size of model and its training.

    Attributes:
        model: its vocabulary is that of the data.
        training: batches are of rows.
        length: tokens per row of one pipeline's batch.
        published: train as in the paper: with segment lengths that vary, learning rates in proportion, and an
            initial decoder bias of zero. Otherwise the bias begins with the words' frequencies: from zero it
            takes thousands of small steps to reach them, and meanwhile the LSTMs saturate to replace it,
            which is most of the loss in a short run.
        source_bytes: bytes of the standard library to read if there is no data folder.
        vocabulary: number of types to keep; None: all.
        train_tokens, valid_tokens: tokens of each split to read, from its beginning; None: all.
    """

    model: AWDLSTMConfig
    training: Recipe
    length: int
    published: bool = False
    source_bytes: int = 8_000_000
    vocabulary: int | None = None
    train_tokens: int | None = None
    valid_tokens: int | None = None


# sizes, then dropout of embedding, input, hidden features, output and weights
_SMALL = AWDLSTMConfig(0, 128, 640, 2, 0.0, 0.1, 0.1, 0.1, 0.1)
_ADAMW = partial(Recipe, optimizer="adamw", betas=(0.9, 0.99), weight_decay=0.01, clip_grad_norm=0.25)
_NTASGD = partial(Recipe, optimizer="nt-asgd", lr_scaling="none", weight_decay=1.2e-6, clip_grad_norm=0.25)
_FEW: Any = {"source_bytes": 2_000_000, "vocabulary": 5_000, "train_tokens": 500_000, "valid_tokens": 50_000}

PRESETS = {
    "awd-lstm": {
        "tiny": LanguagePreset(
            replace(_SMALL, hidden=256), _ADAMW(16, 1, lr=0.02, warmup=0.01), length=35, **_FEW
        ),
        # With a warm-up of 1 % two pipelines at sqrt(2) times the rate learnt nothing.
        "small": LanguagePreset(_SMALL, _ADAMW(24, 1, lr=0.007, warmup=0.05), length=35),
        # The values of the paper's WikiText-2 model, 33.6 M parameters.
        "paper": LanguagePreset(
            AWDLSTMConfig(0, 400, 1150, 3), _NTASGD(80, 750, lr=30.0), length=70, published=True
        ),
    }
}


def check(name: str, preset: LanguagePreset, options: BuildOptions) -> tuple[int, Recipe]:
    find_text(options.data)
    return preset.model.lstm_layers + 2, preset.training


def build(name: str, preset: LanguagePreset, options: BuildOptions) -> Built:
    recipe, seed = preset.training.with_options(options), options.seed
    corpus = load_text(options.data, vocabulary_size=preset.vocabulary, max_bytes=preset.source_bytes)
    train, valid = corpus.train[: preset.train_tokens], corpus.valid[: preset.valid_tokens]
    config = replace(preset.model, vocabulary=len(corpus.vocabulary))
    log_shares = tokens.log_frequencies(train, config.vocabulary)
    even = partial(segment_lengths, base=preset.length)
    jittered = partial(even, jitter=preset.published, seed=seed)
    valid_batches = continued_batches(valid, recipe.batch_size, even, name="valid")

    def train_batches(epoch: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        lengths = partial(jittered, epoch=epoch)
        return continued_batches(train, recipe.batch_size, lengths, options.batches_per_round, "train")[
            start:
        ]

    published: dict[str, Any] = {}
    if preset.published:  # the mean gradient of a longer segment is over more tokens
        row = len(train) // (options.batches_per_round * recipe.batch_size)
        factors = [
            n / preset.length for epoch in range(recipe.epochs) for n in jittered(row - 1, epoch=epoch)
        ]
        published = {"lr_scheduler": partial(LambdaLR, lr_lambda=lambda n: factors[min(n, len(factors) - 1)])}
    source = "the standard library's source" if options.data is None else options.data.name
    return (train_batches, lambda: valid_batches), {
        "layers": awd_lstm_layers(config, seed=seed, decoder_bias=None if preset.published else log_shares),
        "loss_fn": AWDLSTMLoss(config.alpha, config.beta),
        "loss_weight": None,
        "metrics": lambda loss, _: {"perplexity": perplexity(loss)},
        "metric_name": "perplexity",
        "lower_is_better": True,
        "trivial": ("word frequencies", perplexity(-float(log_shares[valid].double().mean()))),
        "title": f"{source}, {train.numel():,} words of {len(corpus.vocabulary):,} types",
        **published,
    }


# ---- the model -----------------------------------------------------------------------------------------------------


def awd_lstm_layers(
    config: AWDLSTMConfig, *, seed: int = 0, decoder_bias: Tensor | None = None
) -> list[nn.Module]:
    """Make [embedding, LSTM, ..., LSTM, decoder]: int64 tokens [b, T] to logits [b, T, vocabulary].

    The decoder's weight is the embedding's weight, the same Parameter. In training, with alpha or beta, the
    output is ``(logits, penalties)`` for :class:`AWDLSTMLoss`. Initial weights depend on the seed only; the
    caller's random state is unchanged.

    ``decoder_bias``: initial bias of the decoder, [vocabulary]; None: zero, as in the paper.
    """
    uniform = tokens.uniform_from(seed)
    weight = uniform(config.vocabulary, config.embedding, bound=0.1)
    layers: list[nn.Module] = [DroppedEmbedding(weight, config.embedding_dropout, config.input_dropout)]
    # the output of the last LSTM is the input of the tied decoder
    sizes = [config.embedding, *[config.hidden] * (config.lstm_layers - 1), config.embedding]
    for inputs, hidden in pairwise(sizes):
        last = len(layers) == config.lstm_layers
        dropout = config.output_dropout if last else config.hidden_dropout
        penalties = last and (config.alpha != 0 or config.beta != 0)
        layers.append(WeightDropLSTM(inputs, hidden, uniform, config.weight_dropout, dropout, penalties))
    return [*layers, TiedDecoder(weight, decoder_bias)]


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Drop features of [b, T, features] with one mask [b, 1, features] for all T (variational dropout)."""
    return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), p) if training and p > 0 else x


class DroppedEmbedding(nn.Module):
    """Tokens [b, T] to vectors [b, T, embedding]; training drops whole words, then features of each row.

    A word is dropped wherever it occurs, the others are scaled by 1 / (1 - p). Masking the looked-up vectors
    equals masking the rows of the weight, and touches T * b rows instead of the whole vocabulary.
    """

    def __init__(self, weight: nn.Parameter, word_dropout: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.word_dropout, self.dropout = word_dropout, dropout
        self.compute_cost = float(weight.shape[1])  # a lookup only

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        if self.training and self.word_dropout > 0:
            x = x * F.dropout(self.weight.new_ones(len(self.weight)), self.word_dropout)[tokens].unsqueeze(-1)
        return locked_dropout(x, self.dropout, self.training)


class WeightDropLSTM(tokens.LSTM):
    """One LSTM layer, [b, T, inputs] to [b, T, hidden], with DropConnect on its hidden-to-hidden weights.

    One weight mask serves a whole forward; locked dropout follows the output. The hidden state is carried
    from batch to batch without gradient. Evaluation carries a separate state, which begins at zero when the
    layer is switched from training to evaluation. A batch with another number of rows begins at zero, too.

    With ``penalties`` the output in training is ``(x, penalties)``: for each row the mean square of the
    dropped output and of the raw output's difference from one time step to the next, float [b, 2].
    """

    def __init__(
        self, inputs: int, hidden: int, uniform: Uniform, weight_drop: float, dropout: float, penalties: bool
    ) -> None:
        super().__init__(inputs, hidden, uniform, dropout=dropout)
        self.weight_drop, self.penalties = weight_drop, penalties
        self.training_carry, self.evaluation_carry = Carry(), Carry()

    def train(self, mode: bool = True) -> WeightDropLSTM:
        if self.training and not mode:
            self.evaluation_carry.reset()
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        carry = self.training_carry if self.training else self.evaluation_carry
        state = [part.to(x) for part in carry.get() or () if part.shape[1] == x.shape[0]]
        weight_hh = F.dropout(self.weight_hh, self.weight_drop, self.training)
        weights = [self.weight_ih, weight_hh, self.bias_ih, self.bias_hh]
        raw, *state = tokens.run_lstm(x, weights, self.training, state)
        carry.set(tuple(part.detach() for part in state))
        dropped = locked_dropout(raw, self.dropout, self.training)
        if self.training and self.penalties:
            return dropped, _penalties(raw, dropped)
        return dropped


def _penalties(raw: Tensor, dropped: Tensor) -> Tensor:
    activation = at_least_float32(dropped).square().mean((1, 2))
    changes = at_least_float32(raw).diff(dim=1)  # empty for a single step
    temporal = changes.square().mean((1, 2)) if changes.shape[1] else torch.zeros_like(activation)
    return torch.stack((activation, temporal), 1)


class TiedDecoder(tokens.Projection):
    """Map features [b, T, embedding] to logits [b, T, vocabulary] with the embedding's weight; pass penalties on."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Any:
        return super().forward(x) if isinstance(x, Tensor) else (super().forward(x[0]), x[1])


class AWDLSTMLoss(TokenLoss):
    """Mean cross entropy in nats per token; in training plus alpha AR and beta TAR (section 4.6).

    ``output``: logits [b, T, vocabulary] or ``(logits, penalties [b, 2])``. ``targets``: int64 [b, T].
    Evaluation ignores penalties.
    """

    def __init__(self, alpha: float = 2.0, beta: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def forward(self, output: Any, targets: Tensor) -> Tensor:
        logits, penalties = (output, None) if isinstance(output, Tensor) else output
        loss = super().forward(logits, targets)
        if self.training and penalties is not None:
            activation, temporal = penalties.mean(0)
            loss = loss + self.alpha * activation + self.beta * temporal
        return loss
