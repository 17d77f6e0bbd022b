"""The workload ``bert``: transformers' BERT, taught to tell paraphrases or to fill in masked text.

The data folder decides: sentence pairs are classified; a text, or this Python's own source, is learnt from with masks.
Model and sizes: Devlin, Chang, Lee, Toutanova, NAACL 2019, arXiv 1810.04805.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.workloads.language import log_frequencies
from avgpipe.workloads.libraries import library
from avgpipe.workloads.masked import (
    HiddenAnew,
    HiddenOnce,
    MaskedLoss,
    Vocabulary,
    blind_perplexity,
    hidden_pieces,
    masked_metrics,
    segments,
    told_pieces,
)
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.pretrained import BERT, check_pretrained, load_pretrained, new_model
from avgpipe.workloads.samples import MakeBatch, SampleBatches, by_length, in_order, shuffled
from avgpipe.workloads.sentence_pairs import (
    PAIR_FILES,
    Encode,
    PairRows,
    confusion,
    find_pairs,
    has_pairs,
    pair_metrics,
    read_pairs,
)
from avgpipe.workloads.subwords import Subwords
from avgpipe.workloads.text import SPLITS, DataNotFound, find_text, read_text
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of
from avgpipe.workloads.workload import Workload, WorkloadFacts

Order = Callable[[int, int, int], Tensor]  # of batch size, seed and epoch

PAIRS_MODEL, MASKED_MODEL = "BertForSequenceClassification", "BertForMaskedLM"


@dataclass(frozen=True)
class BertTask:
    """A size of model and how it is trained for one task.

    Attributes:
        hidden, layers, heads: of the encoder; its feed-forward layers are four times as wide.
        pieces: how many subwords to learn from the training text.
        length: pieces of a segment of text, or of a pair at most.
        positions: the longest input that the model has embeddings for.
        dropout: everywhere.
        max_bytes: how much of a text to read, None: all.
        frequency_bias: begin with the pieces' frequencies in the decoder's bias. From zero, a short run spends most
            of its steps on learning them.
    """

    hidden: int
    layers: int
    heads: int
    pieces: int
    length: int
    positions: int
    training: Training
    dropout: float = 0.1
    max_bytes: int | None = None
    frequency_bias: bool = False

    def config(self, pieces: int, pad: int = 0) -> Any:
        """The ``transformers.BertConfig`` for so many pieces."""
        return library("transformers", "bert").BertConfig(
            vocab_size=pieces,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=self.positions,
            # the paper's 0.02 at its 768; so that a narrower model's attention begins as sharp as there
            initializer_range=0.02 * math.sqrt(768 / self.hidden),
            pad_token_id=pad,
        )


@dataclass(frozen=True)
class BertPreset:
    """``pairs``: when the data are sentence pairs. ``masked``: when they are a text."""

    pairs: BertTask
    masked: BertTask


_ADAMW = partial(Training, optimizer="adamw", weight_decay=0.01, clip_grad_norm=1.0, warmup=0.1)
_TINY = partial(BertTask, hidden=128, layers=2, heads=4, positions=128)
_SMALL = partial(BertTask, hidden=256, layers=4, heads=4, positions=128)
_BASE = partial(BertTask, hidden=768, layers=12, heads=12, positions=512, pieces=30_522)

_BERT: dict[str, BertPreset] = {
    "tiny": BertPreset(
        pairs=_TINY(
            pieces=12_000,
            length=128,
            training=_ADAMW(batch_size=32, epochs=4, lr=5e-4),
            dropout=0.2,
        ),
        masked=_TINY(
            pieces=1_000,
            length=64,
            training=_ADAMW(batch_size=16, epochs=1, lr=2e-3),
            dropout=0.0,
            max_bytes=2_000_000,
            frequency_bias=True,
        ),
    ),
    "small": BertPreset(
        pairs=_SMALL(
            pieces=12_000,
            length=128,
            training=_ADAMW(batch_size=32, epochs=4, lr=3e-4),
            dropout=0.2,
        ),
        masked=_SMALL(
            pieces=4_000,
            length=128,
            training=_ADAMW(batch_size=16, epochs=1, lr=1e-3),
            dropout=0.0,
            max_bytes=8_000_000,
            frequency_bias=True,
        ),
    ),
    # BERT-base. Fine-tuning: appendix A.3, with the settings that were published beside the code. Pre-training:
    # appendix A.2, all of it at the full length and without next sentences, for which a plain text has no documents.
    "paper": BertPreset(
        pairs=_BASE(length=128, training=_ADAMW(batch_size=32, epochs=3, lr=2e-5)),
        masked=_BASE(length=512, training=_ADAMW(batch_size=256, epochs=40, lr=1e-4, warmup=0.01)),
    ),
}
PRESETS = {"bert": _BERT}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    library("transformers", name)
    task = _task(name, options)
    training = task.training.asked(options)
    layers = task.layers
    if options.pretrained is not None:
        layers = int(check_pretrained(BERT, options.pretrained).get("num_hidden_layers", layers))
    if options.data is not None:
        _find(options.data)
    return WorkloadFacts(
        name=name,
        preset=options.preset,
        layers=layers + 2,  # embeddings before and a head behind the encoder
        batch_size=training.batch_size,
        epochs=training.epochs,
    )


def build(name: str, options: BuildOptions) -> Workload:
    """Read the data, learn the pieces and make the model, the same in every process."""
    check(name, options)
    return (_pairs if _is_pairs(options.data) else _masked)(name, options)


def _find(data: Path) -> None:
    if has_pairs(data):
        find_pairs(data)
        return
    try:
        find_text(data)
    except DataNotFound as error:
        raise DataNotFound(f"{error}; or give sentence pairs: {', '.join(PAIR_FILES)}") from None


def _task(name: str, options: BuildOptions) -> BertTask:
    preset = PRESETS[name][options.preset]
    return preset.pairs if _is_pairs(options.data) else preset.masked


def _is_pairs(data: Path | None) -> bool:
    return data is not None and has_pairs(data)


def _pairs(name: str, options: BuildOptions) -> Workload:
    task = _task(name, options)
    assert options.data is not None
    data = read_pairs(options.data)
    lines = [sentence for pair in data.train for sentence in (pair.first, pair.second)]
    model, encode, vocabulary = _model(PAIRS_MODEL, task, lines, options)
    length = min(task.length, model.config.max_position_embeddings)
    rows = {split: PairRows.of(getattr(data, split), encode, vocabulary, length) for split in SPLITS}
    order = partial(by_length, rows["train"].lengths)
    return Workload(
        layers=model,
        loss_fn=nn.CrossEntropyLoss(),
        metrics=pair_metrics,
        metric_fn=confusion,
        metric_name="accuracy",
        lower_is_better=False,
        title=f"paraphrases told among {len(data.train):,} sentence pairs of {options.data.resolve().name}",
        trivial=("always a paraphrase", 100 * float(rows["valid"].labels.double().mean())),
        **_course(name, task, options, order, {split: (len(r.labels), r) for split, r in rows.items()}),
    )


def _masked(name: str, options: BuildOptions) -> Workload:
    task = _task(name, options)
    texts = read_text(options.data, task.max_bytes)
    lines = {split: text.split("\n") for split, text in texts.items()}
    model, encode, vocabulary = _model(MASKED_MODEL, task, lines["train"], options)
    length = min(task.length, model.config.max_position_embeddings)
    rows = {split: segments(encode(lines[split]), length, vocabulary) for split in SPLITS}
    log_shares = log_frequencies(rows["train"][:, 1:-1].flatten(), vocabulary.size)
    if task.frequency_bias and options.pretrained is None:
        with torch.no_grad():
            model.cls.predictions.bias.copy_(log_shares)
    samples = rows["train"].shape[0]
    held_out = {split: HiddenOnce.of(rows[split], vocabulary) for split in ("valid", "test")}
    made: dict[str, tuple[int, MakeBatch]] = {
        "train": (samples, HiddenAnew(rows["train"], vocabulary)),
        **{split: (make.read.shape[0], make) for split, make in held_out.items()},
    }
    source = "Python's standard library" if options.data is None else options.data.resolve().name
    return Workload(
        layers=model,
        loss_fn=MaskedLoss(),
        loss_weight=hidden_pieces,
        metrics=masked_metrics,
        metric_fn=told_pieces,
        metric_name="perplexity",
        lower_is_better=True,
        title=f"masked pieces told in the text of {source}",
        trivial=("the pieces' frequencies", blind_perplexity(log_shares, held_out["valid"].targets)),
        **_course(name, task, options, lambda _, seed, epoch: shuffled(samples, seed, epoch), made),
    )


def _course(
    name: str, task: BertTask, options: BuildOptions, order: Order, made: dict[str, tuple[int, MakeBatch]]
) -> dict[str, Any]:
    """What both tasks have alike. ``made``: of each split, the samples and what makes batches of them."""
    training = task.training.asked(options)
    workers = options.loader_workers

    def train_batches(epoch: int, start: int = 0) -> SampleBatches:
        indices = order(training.batch_size, options.seed, epoch)
        return SampleBatches(
            indices,
            training.batch_size,
            made["train"][1],
            seed=options.seed,
            epoch=epoch,
            start=start,
            workers=workers,
        )

    def held_out(split: str) -> SampleBatches:
        samples, make = made[split]
        return SampleBatches(in_order(samples), training.batch_size, make, workers=workers)

    return {
        "name": name,
        "preset": options.preset,
        "optimizer": optimizer_of(training, options.pipelines),
        "lr_scheduler": lr_scheduler_of(training, len(train_batches(0)), options),
        "clip_grad_norm": training.clip_grad_norm,
        "train_batches": train_batches,
        "valid_batches": partial(held_out, "valid"),
        "test_batches": partial(held_out, "test"),
        "batch_size": training.batch_size,
        "epochs": training.epochs,
    }


# ---- the model and its pieces --------------------------------------------------------------------------------------


def _model(
    kind: str, task: BertTask, lines: Sequence[str], options: BuildOptions
) -> tuple[Any, Encode, Vocabulary]:
    if options.pretrained is not None:
        return pretrained_model(kind, options.pretrained, options.seed)
    learnt = Subwords.learn(lines, task.pieces, lowercase=True)
    vocabulary = Vocabulary(len(learnt), learnt.pad, learnt.begin, learnt.end, learnt.mask)
    return new_model(kind, task.config(len(learnt), learnt.pad), options.seed), learnt.encode, vocabulary


def pretrained_model(kind: str, folder: Path, seed: int = 0) -> tuple[Any, Encode, Vocabulary]:
    """A model of class ``kind`` with a folder's weights, what makes lines into its pieces, and which those are.

    Raises: as :func:`load_pretrained`, and ValueError for a tokenizer without the pieces that BERT needs.
    """
    head = {"num_labels": 2} if kind == PAIRS_MODEL else {}
    model, tokenizer = load_pretrained(BERT, kind, folder, seed=seed, **head)
    return model, partial(_encode, tokenizer), _vocabulary(tokenizer, folder)


def _vocabulary(tokenizer: Any, folder: Path) -> Vocabulary:
    names = ("pad_token", "cls_token", "sep_token", "mask_token")
    numbers: list[Any] = [getattr(tokenizer, f"{name}_id", None) for name in names]
    if None in numbers:
        raise ValueError(f"the tokenizer in {folder} has no {names[numbers.index(None)]}")
    return Vocabulary(len(tokenizer), *numbers)


def _encode(tokenizer: Any, lines: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(lines), add_special_tokens=False)["input_ids"] if lines else []
    return ids
