"""The workload ``awd-lstm``: a word-level language model on a text, in three sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from avgpipe.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_costs, awd_lstm_layers
from avgpipe.workloads.batches import LanguageBatches, segment_lengths
from avgpipe.workloads.ntasgd import NTASGD
from avgpipe.workloads.text import Corpus, find_text, load_text
from avgpipe.workloads.workload import Workload, WorkloadFacts


@dataclass(frozen=True)
class LanguagePreset:
    """A size of model and how it is trained.

    Attributes:
        model: makes the configuration of a vocabulary size.
        batch_size, length: rows and tokens per row of one pipeline's batch.
        jitter: vary the length as in the paper, and the learning rate with it.
        optimizer, lr, weight_decay: lr is that of one pipeline.
        lr_scaling: how lr grows with the number of pipelines.
        warmup_steps, decay: linear warm-up, and linear decay to zero at the end of the last epoch.
        unigram_bias: begin with the words' frequencies in the decoder's bias. From zero the bias takes some
            thousand small steps to get there, and meanwhile the LSTMs saturate to do its work; in a short run
            that is most of the loss.
        source_bytes, source_vocabulary: how much of the standard library to read when there is no data
            folder.
    """

    model: Callable[..., AWDLSTMConfig]
    batch_size: int
    length: int
    jitter: bool
    optimizer: Literal["adamw", "nt-asgd"]
    lr: float
    lr_scaling: Literal["none", "sqrt", "linear"]
    weight_decay: float
    clip_grad_norm: float
    warmup_steps: int
    decay: bool
    epochs: int
    unigram_bias: bool
    source_bytes: int
    source_vocabulary: int

    def learning_rate(self, pipelines: int) -> float:
        """The learning rate of each of N pipelines.

        The reference moves by the mean of N updates, so N pipelines want a learning rate like that of an
        N-fold batch.
        """
        factor = {"none": 1.0, "sqrt": math.sqrt(pipelines), "linear": float(pipelines)}[self.lr_scaling]
        return self.lr * factor


PRESETS: dict[str, LanguagePreset] = {
    "tiny": LanguagePreset(
        model=partial(
            AWDLSTMConfig,
            embedding=128,
            hidden=256,
            lstm_layers=2,
            embedding_dropout=0.0,
            input_dropout=0.1,
            hidden_dropout=0.1,
            output_dropout=0.1,
            weight_dropout=0.1,
        ),
        batch_size=16,
        length=35,
        jitter=False,
        optimizer="adamw",
        lr=0.02,
        lr_scaling="sqrt",
        weight_decay=0.01,
        clip_grad_norm=0.25,
        warmup_steps=3,
        decay=True,
        epochs=1,
        unigram_bias=True,
        source_bytes=2_000_000,
        source_vocabulary=5_000,
    ),
    "small": LanguagePreset(
        model=partial(
            AWDLSTMConfig,
            embedding=128,
            hidden=640,
            lstm_layers=2,
            embedding_dropout=0.0,
            input_dropout=0.1,
            hidden_dropout=0.1,
            output_dropout=0.1,
            weight_dropout=0.1,
        ),
        batch_size=24,
        length=35,
        jitter=False,
        optimizer="adamw",
        lr=0.007,
        lr_scaling="sqrt",
        weight_decay=0.01,
        clip_grad_norm=0.25,
        warmup_steps=20,
        decay=True,
        epochs=1,
        unigram_bias=True,
        source_bytes=8_000_000,
        source_vocabulary=10_000,
    ),
    # The values of the paper's WikiText-2 model, 33.6 M parameters.
    "paper": LanguagePreset(
        model=partial(AWDLSTMConfig, embedding=400, hidden=1150, lstm_layers=3),
        batch_size=80,
        length=70,
        jitter=True,
        optimizer="nt-asgd",
        lr=30.0,
        lr_scaling="none",
        weight_decay=1.2e-6,
        clip_grad_norm=0.25,
        warmup_steps=0,
        decay=False,
        epochs=750,
        unigram_bias=False,
        source_bytes=8_000_000,
        source_vocabulary=30_000,
    ),
}


def check(preset: str, data: str | Path | None, batch_size: int | None, epochs: int | None) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    chosen = PRESETS[preset]
    if data is not None:
        find_text(data)
    return WorkloadFacts(
        name="awd-lstm",
        preset=preset,
        layers=chosen.model(vocabulary=1).lstm_layers + 2,
        batch_size=batch_size or chosen.batch_size,
        epochs=epochs or chosen.epochs,
    )


def build(
    preset: str,
    data: str | Path | None,
    pipelines: int,
    batch_size: int | None,
    seed: int,
    epochs: int | None,
    max_batches: int | None,
) -> Workload:
    chosen = PRESETS[preset]
    rows = batch_size or chosen.batch_size
    epochs = epochs or chosen.epochs
    corpus = _corpus(chosen, data)
    config = chosen.model(vocabulary=len(corpus.vocabulary))

    def train_batches(epoch: int, start: int = 0) -> LanguageBatches:
        return LanguageBatches(
            corpus.train,
            rows,
            chosen.length,
            pipelines=pipelines,
            jitter=chosen.jitter,
            seed=seed,
            epoch=epoch,
            start=start,
            name="train",
        )

    def held_out(name: str) -> LanguageBatches:
        return LanguageBatches(getattr(corpus, name), rows, chosen.length, name=name)

    row_tokens = sum(train_batches(0).lengths)
    for name in ("valid", "test"):
        held_out(name)  # too short a text is refused now, not after an epoch
    steps = None if max_batches is None else -(-max_batches // pipelines)
    bias = log_frequencies(corpus.train, config.vocabulary) if chosen.unigram_bias else None
    factor = lr_factor(chosen, row_tokens, epochs=epochs, steps=steps, seed=seed)
    return Workload(
        name="awd-lstm",
        preset=preset,
        layers=awd_lstm_layers(config, seed=seed, decoder_bias=bias),
        loss_fn=AWDLSTMLoss(config.alpha, config.beta),
        optimizer=partial(_optimizer, chosen, pipelines),
        lr_scheduler=None if factor is None else lambda optimizer: LambdaLR(optimizer, factor),
        clip_grad_norm=chosen.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(held_out, "valid"),
        test_batches=partial(held_out, "test"),
        metric_name="perplexity",
        metric_from_loss=perplexity,
        lower_is_better=True,
        batch_size=rows,
        epochs=epochs,
        layer_costs=awd_lstm_costs(config),
        after_validation=_observe if chosen.optimizer == "nt-asgd" else None,
        averaged=_averaged if chosen.optimizer == "nt-asgd" else None,
    )


def log_frequencies(tokens: Tensor, vocabulary: int) -> Tensor:
    """The logarithm of each token's share of a text, with one added to every count; float [vocabulary]."""
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log().float()


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)


def lr_factor(
    preset: LanguagePreset, row_tokens: int, *, epochs: int, steps: int | None = None, seed: int = 0
) -> Callable[[int], float] | None:
    """What to multiply the learning rate with at a step of one pipeline; None when it stays as it is.

    Warm-up, decay to zero over ``steps`` (None: over ``epochs`` of ``row_tokens`` tokens per row), and with
    jittered lengths the segment's length over the preset's: a longer segment has more tokens for its mean
    gradient.
    """
    if not (preset.jitter or preset.decay or preset.warmup_steps):
        return None
    if steps is None:
        steps = epochs * len(segment_lengths(row_tokens, preset.length))
    lengths: list[int] = []
    epochs_known = 0

    def factor(step: int) -> float:
        nonlocal epochs_known
        value = min(1.0, (step + 1) / (preset.warmup_steps + 1))
        if preset.decay:
            value *= max(0.0, 1 - step / steps)
        if preset.jitter:
            while len(lengths) <= step:
                lengths.extend(
                    segment_lengths(row_tokens, preset.length, jitter=True, seed=seed, epoch=epochs_known)
                )
                epochs_known += 1
            value *= lengths[step] / preset.length
        return value

    return factor


def _corpus(preset: LanguagePreset, data: str | Path | None) -> Corpus:
    if data is not None:
        return load_text(data)
    return load_text(None, vocabulary_size=preset.source_vocabulary, max_bytes=preset.source_bytes)


def _optimizer(preset: LanguagePreset, pipelines: int, params: Iterable[nn.Parameter]) -> Optimizer:
    lr = preset.learning_rate(pipelines)
    if preset.optimizer == "nt-asgd":
        return NTASGD(params, lr=lr, weight_decay=preset.weight_decay)
    return AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=preset.weight_decay)


def _observe(optimizer: Optimizer, loss: float) -> bool:
    return _own(optimizer).observe(loss)


def _averaged(optimizer: Optimizer) -> AbstractContextManager[None] | None:
    own = _own(optimizer)
    return own.averaged() if own.triggered else None


def _own(optimizer: Optimizer) -> NTASGD:
    if not isinstance(optimizer, NTASGD):
        raise TypeError(f"expected the workload's own NTASGD optimizer, got {type(optimizer).__name__}")
    return optimizer
