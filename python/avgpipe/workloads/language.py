"""The workload ``awd-lstm``: a word-level language model on a text, in three sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from avgpipe.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_costs, awd_lstm_layers
from avgpipe.workloads.batches import LanguageBatches, segment_lengths
from avgpipe.workloads.ntasgd import NTASGD
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.text import Corpus, find_text, load_text
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of, scaled_lr
from avgpipe.workloads.workload import Workload, WorkloadFacts


@dataclass(frozen=True)
class LanguagePreset:
    """A size of model and how it is trained.

    Attributes:
        model: makes the configuration of a vocabulary size.
        training: batches are of rows.
        length: tokens per row of one pipeline's batch.
        jitter: vary the length as in the paper, and the learning rate with it.
        averaged: train with NT-ASGD, the paper's optimizer, instead of the one that ``training`` names.
        unigram_bias: begin with the words' frequencies in the decoder's bias. From zero the bias takes some
            thousand small steps to get there, and meanwhile the LSTMs saturate to do its work; in a short run
            that is most of the loss.
        source_bytes: how much of the standard library to read when there is no data folder.
        vocabulary: how many types to keep; None: all.
        train_tokens, held_out_tokens: how many of each split to read, from its beginning; None: all.
    """

    model: Callable[..., AWDLSTMConfig]
    training: Training
    length: int
    jitter: bool
    averaged: bool
    unigram_bias: bool
    source_bytes: int
    vocabulary: int | None = None
    train_tokens: int | None = None
    held_out_tokens: int | None = None


_SHORT = partial(
    AWDLSTMConfig,
    embedding_dropout=0.0,
    input_dropout=0.1,
    hidden_dropout=0.1,
    output_dropout=0.1,
    weight_dropout=0.1,
)
_ADAMW = partial(Training, optimizer="adamw", betas=(0.9, 0.99), weight_decay=0.01, clip_grad_norm=0.25)

_AWD_LSTM: dict[str, LanguagePreset] = {
    "tiny": LanguagePreset(
        model=partial(_SHORT, embedding=128, hidden=256, lstm_layers=2),
        training=_ADAMW(batch_size=16, epochs=1, lr=0.02, warmup=0.01),
        length=35,
        jitter=False,
        averaged=False,
        unigram_bias=True,
        source_bytes=2_000_000,
        vocabulary=5_000,
        train_tokens=500_000,
        held_out_tokens=50_000,
    ),
    "small": LanguagePreset(
        model=partial(_SHORT, embedding=128, hidden=640, lstm_layers=2),
        # With a warm-up of 1 % two pipelines at sqrt(2) times the rate learnt nothing.
        training=_ADAMW(batch_size=24, epochs=1, lr=0.007, warmup=0.05),
        length=35,
        jitter=False,
        averaged=False,
        unigram_bias=True,
        source_bytes=8_000_000,
    ),
    # The values of the paper's WikiText-2 model, 33.6 M parameters.
    "paper": LanguagePreset(
        model=partial(AWDLSTMConfig, embedding=400, hidden=1150, lstm_layers=3),
        training=Training(
            batch_size=80,
            epochs=750,
            optimizer="sgd",
            momentum=0.0,
            lr=30.0,
            lr_scaling="none",
            weight_decay=1.2e-6,
            clip_grad_norm=0.25,
            decay="none",
        ),
        length=70,
        jitter=True,
        averaged=True,
        unigram_bias=False,
        source_bytes=8_000_000,
    ),
}
PRESETS = {"awd-lstm": _AWD_LSTM}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    if options.pretrained is not None:
        raise ValueError(f"{name} has no pretrained weights to begin with: leave pretrained out")
    if options.data is not None:
        find_text(options.data)
    return WorkloadFacts(
        name=name,
        preset=options.preset,
        layers=chosen.model(vocabulary=1, embedding=1, hidden=1).lstm_layers + 2,
        batch_size=training.batch_size,
        epochs=training.epochs,
    )


def build(name: str, options: BuildOptions) -> Workload:
    chosen = PRESETS[name][options.preset]
    training = chosen.training.asked(options)
    pipelines, seed = options.pipelines, options.seed
    corpus = _corpus(chosen, options.data)
    config = chosen.model(vocabulary=len(corpus.vocabulary))

    def train_batches(epoch: int, start: int = 0) -> LanguageBatches:
        return LanguageBatches(
            corpus.train,
            training.batch_size,
            chosen.length,
            pipelines=pipelines,
            jitter=chosen.jitter,
            seed=seed,
            epoch=epoch,
            start=start,
            name="train",
        )

    def held_out(split: str) -> LanguageBatches:
        return LanguageBatches(getattr(corpus, split), training.batch_size, chosen.length, name=split)

    first_epoch = train_batches(0)
    for split in ("valid", "test"):
        held_out(split)  # too short a text is refused now, not after an epoch
    log_shares = log_frequencies(corpus.train, config.vocabulary)
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None
    if chosen.jitter:
        lr_scheduler = partial(_follow_lengths, sum(first_epoch.lengths), chosen.length, seed)
    else:
        lr_scheduler = lr_scheduler_of(training, len(first_epoch), options)
    return Workload(
        name=name,
        preset=options.preset,
        layers=awd_lstm_layers(config, seed=seed, decoder_bias=log_shares if chosen.unigram_bias else None),
        loss_fn=AWDLSTMLoss(config.alpha, config.beta),
        optimizer=partial(_ntasgd, training, pipelines)
        if chosen.averaged
        else optimizer_of(training, pipelines),
        lr_scheduler=lr_scheduler,
        clip_grad_norm=training.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(held_out, "valid"),
        test_batches=partial(held_out, "test"),
        metrics=lambda loss, _: {"perplexity": perplexity(loss)},
        metric_name="perplexity",
        lower_is_better=True,
        batch_size=training.batch_size,
        epochs=training.epochs,
        layer_costs=awd_lstm_costs(config),
        trivial=_unigram(corpus, log_shares),
        title=_title(corpus, options.data),
        after_validation=_observe if chosen.averaged else None,
        averaged=_averaged if chosen.averaged else None,
    )


def log_frequencies(tokens: Tensor, vocabulary: int) -> Tensor:
    """The logarithm of each token's share of a text, with one added to every count; float [vocabulary]."""
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log().float()


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)


def length_factor(row_tokens: int, length: int, seed: int) -> Callable[[int], float]:
    """What to multiply the learning rate with at a step of one pipeline when lengths are jittered.

    A segment's length over the preset's: a longer segment has more tokens for its mean gradient.
    """
    lengths: list[int] = []
    epochs_known = 0

    def factor(step: int) -> float:
        nonlocal epochs_known
        while len(lengths) <= step:
            lengths.extend(segment_lengths(row_tokens, length, jitter=True, seed=seed, epoch=epochs_known))
            epochs_known += 1
        return lengths[step] / length

    return factor


def _follow_lengths(row_tokens: int, length: int, seed: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, length_factor(row_tokens, length, seed))


def _corpus(preset: LanguagePreset, data: Path | None) -> Corpus:
    whole = load_text(data, vocabulary_size=preset.vocabulary, max_bytes=preset.source_bytes)
    return replace(
        whole,
        train=whole.train[: preset.train_tokens],
        valid=whole.valid[: preset.held_out_tokens],
        test=whole.test[: preset.held_out_tokens],
    )


def _title(corpus: Corpus, data: Path | None) -> str:
    source = "the standard library's source" if data is None else data.name
    return f"{source}, {corpus.train.numel():,} words of {len(corpus.vocabulary):,} types"


def _unigram(corpus: Corpus, log_shares: Tensor) -> tuple[str, float]:
    return "word frequencies", perplexity(-float(log_shares[corpus.valid].double().mean()))


def _ntasgd(training: Training, pipelines: int, params: Iterable[nn.Parameter]) -> Optimizer:
    lr = scaled_lr(training.lr, training.lr_scaling, pipelines)
    return NTASGD(params, lr=lr, weight_decay=training.weight_decay)


def _observe(optimizer: Optimizer, loss: float) -> bool:
    return _own(optimizer).observe(loss)


def _averaged(optimizer: Optimizer) -> AbstractContextManager[None] | None:
    own = _own(optimizer)
    return own.averaged() if own.triggered else None


def _own(optimizer: Optimizer) -> NTASGD:
    if not isinstance(optimizer, NTASGD):
        raise TypeError(f"expected the workload's own NTASGD optimizer, got {type(optimizer).__name__}")
    return optimizer
