"""The workload ``gnmt``: translation from English to German with Google's model, in three sizes.

Wu et al. 2016, arXiv 1609.08144, section 3, in the usual form: the first encoder layer is bidirectional,
residual connections begin with the third layer of either side, and the decoder's first layer queries the
encoder by normalised additive attention (Bahdanau, Cho, Bengio, ICLR 2015, arXiv 1409.0473; weight norm as in
Luong, Brevdo, Zhao 2017). The result, the context, is an input of every later decoder layer; it is not fed
back into the first, so that layer needs no loop over time.

Batch first everywhere: b sentence pairs, S source pieces, T target pieces, H features. Between layers passes
a dict with the values that later layers need:

| after | ``x`` | and |
|---|---|---|
| an encoder layer | [b, S, H] (of the first LSTM [b, S, 2H]) | ``lengths`` [b], ``target`` [b, T] |
| a decoder layer | [b, T, H] | ``context`` [b, T, H], unless it is the last |

and ``at``, if the input has it. Padding never influences a real position: the backward direction runs over
each sentence reversed by its own length, attention ignores source padding, and everything else is causal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe.tasks import DEFAULT_PRESET, BuildOptions, DataNotFound, Predict
from avgpipe_lab.workloads import library, tokens
from avgpipe_lab.workloads.batches import RaggedRows, by_length
from avgpipe_lab.workloads.data import TRANSLATIONS_FOLDER, find_translations, read_translations
from avgpipe_lab.workloads.huggingface import Subwords
from avgpipe_lab.workloads.recipe import Built, Recipe, Samples
from avgpipe_lab.workloads.tokens import LSTM, Uniform

Value = dict[str, Any]
Pairs = list[tuple[str, str]]  # sentences and their translations


@dataclass(frozen=True)
class GNMTConfig:
    """Sizes; the defaults are GNMT with 8 LSTM layers, 4 on each side.

    Attributes:
        vocabulary: pieces, of both languages together; their embeddings are shared.
        hidden: H.
        encoder_layers, decoder_layers: LSTM layers on each side.
        dropout: of the inputs of every LSTM.
        tied_output: the output projection shares the embedding's weight, which reduces the weights for a
            small data set.
        embedding_bound: the embedding's initial values are uniform within it. 0.1 is published for H = 1024;
            with it, small models spend most of a short run on learning to distinguish words.
    """

    vocabulary: int
    hidden: int = 1024
    encoder_layers: int = 4
    decoder_layers: int = 4
    dropout: float = 0.2
    tied_output: bool = False
    embedding_bound: float = 0.1


@dataclass(frozen=True)
class TranslationPreset:
    """A size of model, its training and its evaluation.

    Attributes:
        model: its vocabulary is that of the pieces.
        training: batches are of sentence pairs.
        vocabulary: pieces to learn from both languages of the training text together.
        pairs: number of sentence pairs to train on, from the beginning of the data; None: all.
        max_length: pieces of the longest sentence to train on. Longer pairs are left out and counted in the
            workload's title; evaluation takes all.
        unigram_bias: initialise the output's bias with the pieces' frequencies, which a short run would
            otherwise spend most of its steps on learning.
        decoded: number of validation sentences that are translated for BLEU, from the first on; None: all.
        beam: beam of that translation, see :func:`beam_search`.
    """

    model: GNMTConfig
    training: Recipe
    vocabulary: int
    decoded: int | None
    beam: int
    pairs: int | None = None
    max_length: int = 60
    unigram_bias: bool = True


_ADAM = partial(Recipe, optimizer="adam", clip_grad_norm=5.0)
_STEPS = partial(_ADAM, warmup=0.01, decay="steps", milestones=(0.67, 0.83))
_SMALL = partial(GNMTConfig, 0, encoder_layers=2, decoder_layers=2, tied_output=True, embedding_bound=1.0)

PRESETS = {
    "gnmt": {
        "tiny": TranslationPreset(
            _SMALL(128, dropout=0.1), _ADAM(32, 2, lr=8e-3, warmup=0.05), 2000, 64, beam=1, pairs=12000
        ),
        "small": TranslationPreset(
            _SMALL(192, dropout=0.2), _ADAM(32, 4, lr=4e-3, warmup=0.02), 4000, 300, beam=2
        ),
        # Sizes, Adam, clipping, label smoothing, dropout and beam as NVIDIA publishes its GNMT v2 for WMT16; the
        # halvings of the learning rate in the last third are two steps of a tenth here.
        "paper": TranslationPreset(
            GNMTConfig(0), _STEPS(128, 6, lr=1e-3), 32000, None, beam=5, max_length=50, unigram_bias=False
        ),
    }
}


def check(name: str, preset: TranslationPreset, options: BuildOptions) -> tuple[int, Recipe]:
    if options.data is None:
        raise DataNotFound(f"{name} needs a data folder: {TRANSLATIONS_FOLDER}")
    find_translations(options.data)
    for needed in ("tokenizers", "sacrebleu"):
        library(needed, name)
    return preset.model.encoder_layers + preset.model.decoder_layers + 2, preset.training


def build(name: str, preset: TranslationPreset, options: BuildOptions) -> Built:
    pairs, subwords = read(name, options)
    rows = {split: [subwords.encode(side) for side in zip(*found)] for split, found in pairs.items()}
    kept = [pair for pair in zip(*rows["train"]) if max(map(len, pair)) <= preset.max_length]
    if not kept:
        raise ValueError(f"every training pair is longer than {preset.max_length} pieces")
    train, valid = (PairBatch(*map(ended, sides)) for sides in (zip(*kept), rows["valid"]))
    config = replace(preset.model, vocabulary=len(subwords))
    bias = tokens.log_frequencies(train.target.values, len(subwords)) if preset.unigram_bias else None
    left_out = len(pairs["train"]) - len(kept)
    without = f", {left_out} longer than {preset.max_length} pieces left out" if left_out else ""
    order, valid_order = partial(by_length, train.lengths), valid.lengths.argsort(stable=True)
    return Samples(order, train, valid, valid_order), {
        "layers": gnmt_layers(config, seed=options.seed, output_bias=bias),
        "loss_fn": tokens.TokenLoss(subwords.pad, smoothing=0.1),
        "metrics": lambda loss, _: {"perplexity": tokens.perplexity(loss)},
        "metric_name": "bleu",
        "decode": partial(bleu, pairs["valid"][: preset.decoded], subwords, preset.beam),
        "title": f"translation from English to German, {len(kept):,} sentence pairs{without}",
    }


def read(name: str, options: BuildOptions) -> tuple[dict[str, Pairs], Subwords]:
    """Read the sentence pairs, and learn pieces from them: the same for all runs with these options."""
    preset = PRESETS[name][options.preset or DEFAULT_PRESET]
    check(name, preset, options)
    assert options.data is not None
    pairs = read_translations(options.data)
    pairs["train"] = pairs["train"][: preset.pairs]
    lines = [sentence for side in zip(*pairs["train"]) for sentence in side]
    return pairs, Subwords.learn(lines, preset.vocabulary)


@dataclass(frozen=True)
class PairBatch:
    """Makes padded batches of sentence pairs, whose rows in both languages end with EOS.

    The inputs: ``source`` int64 [b, S], its ``lengths`` int64 [b], and ``target`` int64 [b, T], which begins
    with BOS. The targets: int64 [b, T], the pieces that follow, with EOS.
    """

    source: RaggedRows
    target: RaggedRows

    @property
    def lengths(self) -> Tensor:
        """Return the pieces of each pair in both languages, with EOS."""
        return self.source.lengths + self.target.lengths

    def __call__(self, indices: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        target = self.target.padded(indices)
        source = {"source": self.source.padded(indices), "lengths": self.source.lengths[indices]}
        return {**source, "target": tokens.shifted(target, Subwords.begin)}, target


def ended(rows: Iterable[list[int]]) -> RaggedRows:
    """Append EOS to each row."""
    return RaggedRows.of([[*row, Subwords.end] for row in rows])


def translate(
    predict: Predict, sentences: Sequence[str], subwords: Subwords, *, beam: int = 5, batch_size: int = 64
) -> list[str]:
    """Translate any number of sentences of any length.

    Args:
        predict: ``Pipeline.predict`` (then every rank must call this, and gets the same), or a module of
            :func:`gnmt_layers` in evaluation mode, such as ``nn.Sequential(*layers).eval()``.
        sentences: sentences to translate.
        subwords: the pieces that the model was trained with.
        beam: hypotheses kept per sentence, see :func:`beam_search`.
        batch_size: sentences to translate together, which have similar lengths.
    """
    if not sentences:
        return []
    source = ended(subwords.encode(sentences))
    search = partial(tokens.beam_search, predict, begin=subwords.begin, end=subwords.end, beam=beam)
    pieces: dict[int, list[int]] = {}
    for chunk in torch.split(source.lengths.argsort(stable=True), batch_size):
        inputs = {"source": source.padded(chunk), "lengths": source.lengths[chunk]}
        longest = int(inputs["lengths"][-1]) - 1
        most = longest + longest // 2 + 5  # half more pieces, plus five
        pieces.update(zip(chunk.tolist(), (found.pieces for found in search(inputs, max_length=most))))
    return subwords.decode([pieces[row] for row in range(len(sentences))])


def bleu(pairs: Pairs, subwords: Subwords, beam: int, predict: Predict) -> dict[str, float]:
    """Translate the first of each pair, and compare with the second."""
    sources, references = zip(*pairs)
    translations = translate(predict, sources, subwords, beam=beam)
    score = library("sacrebleu", "the workload gnmt").corpus_bleu(translations, [references]).score
    return {"bleu": float(score)}


# ---- the model -----------------------------------------------------------------------------------------------------


def gnmt_layers(config: GNMTConfig, *, seed: int = 0, output_bias: Tensor | None = None) -> list[nn.Module]:
    """Make [embedding, encoder LSTMs, decoder LSTMs, output]: a dict of tokens to logits [b, T, vocabulary].

    The input has ``source`` int64 [b, S], with any values beyond ``lengths`` int64 [b] (1 to S), and
    ``target`` int64 [b, T], the pieces before those to be predicted. With an int ``at`` only the logits of
    that target position are made, [b, vocabulary]. The decoder's embedding is the encoder's, the same
    Parameter, and so is the projection with ``tied_output``. Initial weights, uniform within 1 / sqrt(H)
    except for the embedding, depend on the seed only; the caller's random state is unchanged.

    ``output_bias``: initial bias of the projection, [vocabulary]; None: zero.
    """
    H, p = config.hidden, config.dropout
    uniform = tokens.uniform_from(seed)
    embedding = uniform(config.vocabulary, H, bound=config.embedding_bound)
    encoder: list[nn.Module] = [BidirectionalLSTM(H, H, uniform, p, residual=False)]
    # features of the encoder's output, and of the contexts
    memory = 2 * H if config.encoder_layers == 1 else H
    inputs = [2 * H, *[H] * config.encoder_layers][: config.encoder_layers - 1]
    encoder += [ResidualLSTM(n, H, uniform, p, residual=at >= 2) for at, n in enumerate(inputs, 1)]
    attention = AttentionLSTM(embedding, memory, uniform, p)
    lstm = partial(ResidualLSTM, H + memory, H, uniform, p)
    D = config.decoder_layers
    decoder = [lstm(residual=at >= 2, last=at == D - 1) for at in range(1, D)]
    weight = embedding if config.tied_output else uniform(config.vocabulary, H, bound=H**-0.5)
    return [SourceEmbedding(embedding), *encoder, attention, *decoder, Output(weight, output_bias)]


# Each layer's ``compute_cost`` is its multiply-adds per token. Element-wise work counts as the multiply-adds
# that take a CPU as long, forward and backward, as it is a third of a small model's time: measured with H =
# 128, a vocabulary of 2,000 and sentences of 17 pieces, on one core.
_PER_DROPPED, _PER_ATTENTION_UNIT, _PER_LOGIT = 100.0, 115.0, 50.0
_LENGTH = 20  # pieces of a sentence


def _lstm_cost(inputs: int, hidden: int) -> float:
    return 4.0 * hidden * (inputs + hidden) + _PER_DROPPED * inputs


class SourceEmbedding(nn.Module):
    """Maps ``source`` [b, S] to ``x`` [b, S, H]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.compute_cost = weight, float(weight.shape[1])

    def forward(self, value: Value) -> Value:
        rest = {name: part for name, part in value.items() if name != "source"}
        return {**rest, "x": F.embedding(value["source"], self.weight)}


class ResidualLSTM(nn.Module):
    """Maps ``x`` [b, S or T, inputs] to [b, S or T, H], with ``x`` added if ``residual``.

    The decoder's ``context`` is an input, too, and the ``last`` layer drops it.
    """

    def __init__(
        self, inputs: int, hidden: int, uniform: Uniform, dropout: float, residual: bool, last: bool = False
    ) -> None:
        super().__init__()
        self.lstm = LSTM(inputs, hidden, uniform, dropout=dropout)
        self.residual, self.last = residual, last
        self.compute_cost = _lstm_cost(inputs, hidden)

    def forward(self, value: Value) -> Value:
        x, context = value["x"], value.get("context")
        x = self.lstm(x if context is None else torch.cat((x, context), -1))
        kept = {name: part for name, part in value.items() if not (self.last and name == "context")}
        return {**kept, "x": x + value["x"] if self.residual else x}


class BidirectionalLSTM(ResidualLSTM):
    """Maps ``x`` [b, S, H] to [b, S, 2H]: one LSTM over the sentence, another over the sentence reversed."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, dropout: float, residual: bool) -> None:
        super().__init__(inputs, hidden, uniform, dropout, residual)
        self.backward_lstm = LSTM(inputs, hidden, uniform, dropout=dropout)
        self.compute_cost *= 2

    def forward(self, value: Value) -> Value:
        x, lengths = value["x"], value["lengths"]
        backward = reverse(self.backward_lstm(reverse(x, lengths)), lengths)
        return {**value, "x": torch.cat((self.lstm(x), backward), -1)}


def reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """Reverse the first ``lengths`` [b] positions of [b, S, features]; the others are unchanged."""
    at = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths[:, None] - 1 - at
    index = torch.where(mirrored >= 0, mirrored, at)
    return x.gather(1, index[:, :, None].expand_as(x))


class Attention(nn.Module):
    """Normalised additive attention of queries over a memory.

    score = g v / |v| . tanh(W q + U m + c); the weights are its softmax over the memory's real positions.
    """

    def __init__(self, queries: int, memory: int, units: int, uniform: Uniform) -> None:
        super().__init__()
        bound = units**-0.5
        self.query_weight = uniform(units, queries, bound=bound)
        self.memory_weight = uniform(units, memory, bound=bound)
        self.v = uniform(units, bound=bound)
        self.g = nn.Parameter(torch.full((1,), bound))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, queries: Tensor, memory: Tensor, lengths: Tensor) -> Any:
        """Map queries [b, T, queries], memory [b, S, memory] and lengths [b] to contexts [b, T, memory]."""
        keys = F.linear(memory, self.memory_weight, self.bias)
        sums = F.linear(queries, self.query_weight)[:, :, None] + keys[:, None]  # [b, T, S, units]
        scores = torch.tanh(sums) @ (self.g * self.v / self.v.norm())
        padding = torch.arange(memory.shape[1], device=lengths.device) >= lengths[:, None]
        return scores.masked_fill(padding[:, None], -torch.inf).softmax(-1) @ memory


class AttentionLSTM(nn.Module):
    """The decoder's first layer: embeds ``target``, and queries ``x``, the encoder's output, for the contexts."""

    def __init__(self, embedding: nn.Parameter, memory: int, uniform: Uniform, dropout: float) -> None:
        super().__init__()
        hidden = embedding.shape[1]
        self.embedding = embedding
        self.lstm = LSTM(hidden, hidden, uniform, dropout=dropout)
        self.attention = Attention(hidden, memory, hidden, uniform)
        asking = hidden * (hidden + memory) + _LENGTH * (_PER_ATTENTION_UNIT * hidden + memory)
        self.compute_cost = _lstm_cost(hidden, hidden) + asking

    def forward(self, value: Value) -> Value:
        x = self.lstm(F.embedding(value["target"], self.embedding))
        rest = {name: part for name, part in value.items() if name == "at"}
        return {**rest, "x": x, "context": self.attention(x, value["x"], value["lengths"])}


class Output(tokens.Projection):
    """Maps ``x`` [b, T, H] to logits [b, T, vocabulary], or for position ``at`` only to [b, vocabulary]."""

    def __init__(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.compute_cost = weight.numel() + _PER_LOGIT * len(weight)

    def forward(self, value: Value) -> Any:
        x = value["x"]
        return super().forward(x[:, value["at"]] if "at" in value else x)
