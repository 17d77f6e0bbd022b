"""The workload ``gnmt``: translation from English to German with GNMT, in three sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from avgpipe.workloads.beam import beam_search
from avgpipe.workloads.gnmt import GNMTConfig, TranslationLoss, gnmt_costs, gnmt_layers
from avgpipe.workloads.language import log_frequencies, perplexity
from avgpipe.workloads.libraries import library
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.parallel_text import Pairs, ParallelText, find_parallel, read_parallel, wanted
from avgpipe.workloads.samples import SampleBatches, by_length
from avgpipe.workloads.subwords import Subwords
from avgpipe.workloads.text import DataNotFound
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of
from avgpipe.workloads.workload import Predict, Workload, WorkloadFacts

_SOURCE, _TARGET = "en", "de"


@dataclass(frozen=True)
class TranslationPreset:
    """A size of model and how it is trained and judged.

    Attributes:
        model: makes the configuration of a vocabulary size.
        training: batches are of sentence pairs.
        vocabulary: pieces to learn from both languages of the training text together.
        pairs: how many sentence pairs to train on, from the beginning of the data; None: all.
        max_length: pieces of the longest sentence to train on. Longer pairs are left out and counted in the
            workload's title; evaluation takes all.
        smoothing: of the labels in training.
        unigram_bias: begin with the pieces' frequencies in the output's bias, which a short run would otherwise
            spend most of its steps on learning.
        decoded: how many validation sentences are translated for BLEU, from the first on; None: all.
        beam, length_penalty: of that translation, see :func:`beam_search`.
    """

    model: Callable[..., GNMTConfig]
    training: Training
    vocabulary: int
    pairs: int | None
    max_length: int
    smoothing: float
    unigram_bias: bool
    decoded: int | None
    beam: int
    length_penalty: float = 0.6


_ADAM = partial(Training, optimizer="adam", betas=(0.9, 0.999), clip_grad_norm=5.0)

_GNMT: dict[str, TranslationPreset] = {
    "tiny": TranslationPreset(
        model=partial(
            GNMTConfig,
            hidden=128,
            encoder_layers=2,
            decoder_layers=2,
            dropout=0.1,
            tied_output=True,
            embedding_bound=1.0,
        ),
        training=_ADAM(batch_size=32, epochs=2, lr=0.008, warmup=0.05),
        vocabulary=2_000,
        pairs=12_000,
        max_length=60,
        smoothing=0.1,
        unigram_bias=True,
        decoded=64,
        beam=1,
    ),
    "small": TranslationPreset(
        model=partial(
            GNMTConfig,
            hidden=192,
            encoder_layers=2,
            decoder_layers=2,
            dropout=0.2,
            tied_output=True,
            embedding_bound=1.0,
        ),
        training=_ADAM(batch_size=32, epochs=4, lr=0.004, warmup=0.02),
        vocabulary=4_000,
        pairs=None,
        max_length=60,
        smoothing=0.1,
        unigram_bias=True,
        decoded=300,
        beam=2,
    ),
    # Sizes, Adam, clipping, label smoothing, dropout and beam as NVIDIA publishes its GNMT v2 for WMT16; the
    # halvings of the learning rate in the last third are two steps of a tenth here.
    "paper": TranslationPreset(
        model=partial(GNMTConfig, hidden=1024, encoder_layers=4, decoder_layers=4, dropout=0.2),
        training=_ADAM(
            batch_size=128, epochs=6, lr=0.001, warmup=0.01, decay="steps", milestones=(0.67, 0.83)
        ),
        vocabulary=32_000,
        pairs=None,
        max_length=50,
        smoothing=0.1,
        unigram_bias=False,
        decoded=None,
        beam=5,
    ),
}
PRESETS = {"gnmt": _GNMT}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    if options.pretrained is not None:
        raise ValueError(f"{name} has no pretrained weights to begin with: leave pretrained out")
    find_parallel(_folder(name, options.data), source=_SOURCE, target=_TARGET)
    for needed in ("tokenizers", "sacrebleu"):
        library(needed, name)
    sizes = chosen.model(vocabulary=1)
    return WorkloadFacts(
        name=name,
        preset=options.preset,
        layers=sizes.encoder_layers + sizes.decoder_layers + 2,
        batch_size=training.batch_size,
        epochs=training.epochs,
    )


def build(name: str, options: BuildOptions) -> Workload:
    """Read the sentence pairs, learn the pieces, and make the model. Raises ValueError for data that cannot serve."""
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    text, subwords = read(name, options)
    encoded = _encoded(text.train, subwords)
    train = encoded.up_to(chosen.max_length)
    if not train.source:
        raise ValueError(f"every training pair is longer than {chosen.max_length} pieces")
    config = chosen.model(vocabulary=len(subwords))
    bias = log_frequencies(train.predicted(), config.vocabulary) if chosen.unigram_bias else None
    loss = TranslationLoss(subwords.pad, chosen.smoothing)
    lengths = train.lengths()

    def train_batches(epoch: int, start: int = 0) -> SampleBatches:
        order = by_length(lengths, training.batch_size, options.seed, epoch)
        return SampleBatches(
            order,
            training.batch_size,
            train,
            seed=options.seed,
            epoch=epoch,
            start=start,
            workers=options.loader_workers,
        )

    def held_out(pairs: Pairs) -> SampleBatches:
        rows = _encoded(pairs, subwords)
        return SampleBatches(rows.lengths().argsort(stable=True), training.batch_size, rows)

    return Workload(
        name=name,
        preset=options.preset,
        layers=gnmt_layers(config, seed=options.seed, output_bias=bias),
        loss_fn=loss,
        optimizer=optimizer_of(training, options.pipelines),
        lr_scheduler=lr_scheduler_of(training, len(train_batches(0)), options),
        clip_grad_norm=training.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(held_out, text.valid),
        test_batches=partial(held_out, text.test),
        metrics=lambda loss, _: {"perplexity": perplexity(loss)},
        metric_name="bleu",
        lower_is_better=False,
        batch_size=training.batch_size,
        epochs=training.epochs,
        layer_costs=gnmt_costs(config),
        loss_weight=loss.weight,
        decode=partial(_bleu, _first(text.valid, chosen.decoded), subwords, chosen),
        title=_title(len(train.source), len(text.train), chosen.max_length),
    )


def read(name: str, options: BuildOptions) -> tuple[ParallelText, Subwords]:
    """The sentence pairs, and the pieces learnt from them: those of any run with these options."""
    chosen = PRESETS[name][options.preset]
    text = read_parallel(_folder(name, options.data), chosen.pairs, source=_SOURCE, target=_TARGET)
    return text, Subwords.learn([*text.train.source, *text.train.target], chosen.vocabulary)


@dataclass(frozen=True)
class PairBatch:
    """Makes padded batches of sentence pairs, given as the numbers of their pieces.

    The inputs: ``source`` int64 [b, S], which ends with the end, ``lengths`` int64 [b] of it, and ``target``
    int64 [b, T], which begins with the begin. The targets: int64 [b, T], the pieces that follow, with the end.
    """

    source: list[list[int]]
    target: list[list[int]]

    def __call__(self, indices: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows = indices.tolist()
        targets = [self.target[row] for row in rows]
        inputs = source_batch([self.source[row] for row in rows])
        inputs["target"] = padded([[Subwords.begin, *row] for row in targets])
        return inputs, padded([[*row, Subwords.end] for row in targets])

    def lengths(self) -> Tensor:
        """Pieces of each pair in both languages, int64 [pairs]."""
        return torch.tensor([len(s) + len(t) for s, t in zip(self.source, self.target, strict=True)])

    def predicted(self) -> Tensor:
        """All pieces that are to be predicted, with the ends, int64 [pieces]."""
        return torch.tensor([piece for row in self.target for piece in (*row, Subwords.end)])

    def up_to(self, pieces: int) -> PairBatch:
        """Without the pairs of which a sentence has more than ``pieces``."""
        kept = [
            row
            for row, pair in enumerate(zip(self.source, self.target, strict=True))
            if max(map(len, pair)) <= pieces
        ]
        return PairBatch([self.source[row] for row in kept], [self.target[row] for row in kept])


def source_batch(rows: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """``source`` and ``lengths`` of sentences given as the numbers of their pieces."""
    ended = [[*row, Subwords.end] for row in rows]
    return {"source": padded(ended), "lengths": torch.tensor([len(row) for row in ended])}


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int64 [rows, the longest's length], filled up with padding."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[Subwords.pad] * (width - len(row))] for row in rows])


def translate(
    predict: Predict,
    sentences: Sequence[str],
    subwords: Subwords,
    *,
    beam: int = 5,
    length_penalty: float = 0.6,
    batch_size: int = 64,
) -> list[str]:
    """Translate any number of sentences of any length.

    Args:
        predict: ``Pipeline.predict`` (then every rank must call this, and gets the same), or a module of
            :func:`gnmt_layers` in evaluation mode, such as ``nn.Sequential(*layers).eval()``.
        subwords: the pieces that the model was trained with.
        beam, length_penalty: see :func:`beam_search`.
        batch_size: sentences that are translated together; similar lengths are.
    """
    rows = subwords.encode(sentences)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    pieces: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        chunk = order[first : first + batch_size]
        found = beam_search(
            predict,
            source_batch(rows[row] for row in chunk),
            begin=subwords.begin,
            end=subwords.end,
            beam=beam,
            max_length=longest_translation(len(rows[chunk[-1]])),
            length_penalty=length_penalty,
        )
        pieces.update((row, hypothesis.pieces) for row, hypothesis in zip(chunk, found, strict=True))
    return subwords.decode([pieces[row] for row in range(len(rows))])


def longest_translation(source: int) -> int:
    """How many pieces a translation of ``source`` pieces may have: half as many again, and five."""
    return source + source // 2 + 5


def _bleu(pairs: Pairs, subwords: Subwords, chosen: TranslationPreset, predict: Predict) -> dict[str, float]:
    sacrebleu = library("sacrebleu", "the workload gnmt")
    translations = translate(
        predict, pairs.source, subwords, beam=chosen.beam, length_penalty=chosen.length_penalty
    )
    return {"bleu": float(sacrebleu.corpus_bleu(translations, [list(pairs.target)]).score)}


def _encoded(pairs: Pairs, subwords: Subwords) -> PairBatch:
    return PairBatch(subwords.encode(pairs.source), subwords.encode(pairs.target))


def _first(pairs: Pairs, count: int | None) -> Pairs:
    return Pairs(pairs.source[:count], pairs.target[:count])


def _title(trained: int, pairs: int, max_length: int) -> str:
    left_out = pairs - trained
    without = f", {left_out} longer than {max_length} pieces left out" if left_out else ""
    return f"translation from English to German, {trained:,} sentence pairs{without}"


def _folder(name: str, data: Path | None) -> Path:
    if data is None:
        raise DataNotFound(f"{name} needs a data folder: {wanted(_SOURCE, _TARGET)}")
    return data
