"""The workload ``bert``: transformers' BERT, trained to recognise paraphrases or to fill in masked text.

The data folder decides: sentence pairs are classified; a text, or this Python's own source, is learnt with
masks. Model and sizes: Devlin, Chang, Lee, Toutanova, NAACL 2019, arXiv 1810.04805.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.tasks import BuildOptions
from avgpipe_lab.workloads import data, huggingface, library, tokens
from avgpipe_lab.workloads.batches import RaggedRows, TensorRows, by_length, generator, shuffled
from avgpipe_lab.workloads.huggingface import Encode, Subwords, Vocabulary
from avgpipe_lab.workloads.recipe import Built, Recipe, Samples
from avgpipe_lab.workloads.tokens import IGNORED

PRETRAINED = True
PAIRS_MODEL, MASKED_MODEL = "BertForSequenceClassification", "BertForMaskedLM"

# The share of pieces that are masked, and of these the shares that become <mask> and any piece.
_MASKED, _MASK, _RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class BertTask:
    """A size of model and its training for one task.

    Attributes:
        model: sizes of the encoder, fields of ``transformers.BertConfig``; feed-forward layers are four times as wide.
        training: batches are of segments of text, or of pairs.
        pieces: number of subwords to learn from the training text.
        length: pieces of a segment of text, or the most pieces of a pair.
        dropout: dropout rate, everywhere.
        max_bytes: bytes of a text to read, None: all.
        frequency_bias: initialise the decoder's bias with the pieces' frequencies. From zero, a short run
            spends most of its steps on learning them.
    """

    model: dict[str, int]
    training: Recipe
    pieces: int
    length: int
    dropout: float = 0.1
    max_bytes: int | None = None
    frequency_bias: bool = False

    def config(self, pieces: int) -> Any:
        """Make the ``transformers.BertConfig`` for ``pieces`` pieces."""
        return library("transformers", "bert").BertConfig(
            **self.model,
            vocab_size=pieces,
            intermediate_size=4 * self.model["hidden_size"],
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            # the paper's 0.02 at its width of 768, scaled so that a narrower model's attention begins as
            # sharp
            initializer_range=0.02 * math.sqrt(768 / self.model["hidden_size"]),
            pad_token_id=Subwords.pad,
        )


@dataclass(frozen=True)
class BertPreset:
    """``pairs``: the task if the data are sentence pairs. ``masked``: the task if they are a text."""

    pairs: BertTask
    masked: BertTask


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_TINY = dict(zip(_SIZES, (128, 2, 4, 128)))
_SMALL = dict(zip(_SIZES, (256, 4, 4, 128)))
_BASE = dict(zip(_SIZES, (768, 12, 12, 512)))
_ADAMW = partial(Recipe, optimizer="adamw", weight_decay=0.01, clip_grad_norm=1.0, warmup=0.1)
_PAIRS = partial(BertTask, pieces=12_000, length=128, dropout=0.2)
_TEXT = partial(BertTask, dropout=0.0, frequency_bias=True)

PRESETS = {
    "bert": {
        "tiny": BertPreset(
            _PAIRS(_TINY, _ADAMW(batch_size=32, epochs=4, lr=5e-4)),
            _TEXT(_TINY, _ADAMW(16, 1, lr=2e-3), pieces=1_000, length=64, max_bytes=2_000_000),
        ),
        "small": BertPreset(
            _PAIRS(_SMALL, _ADAMW(batch_size=32, epochs=4, lr=3e-4)),
            _TEXT(_SMALL, _ADAMW(16, 1, lr=1e-3), pieces=4_000, length=128, max_bytes=8_000_000),
        ),
        # BERT-base. Fine-tuning: appendix A.3, with the settings that were published beside the code. Pre-training:
        # appendix A.2, all of it at the full length and without next sentences, as a plain text has no documents.
        "paper": BertPreset(
            BertTask(_BASE, _ADAMW(32, 3, lr=2e-5), pieces=30_522, length=128),
            BertTask(_BASE, _ADAMW(256, 40, lr=1e-4, warmup=0.01), pieces=30_522, length=512),
        ),
    }
}


def check(name: str, preset: BertPreset, options: BuildOptions) -> tuple[int, Recipe]:
    library("transformers", name)
    if options.data is not None and data.has_paraphrases(options.data):
        task = preset.pairs
        data.find_paraphrases(options.data)
    else:
        task = preset.masked
        works = f"{data.TEXT_FOLDER}, or with sentence pairs: {', '.join(data.MRPC_FILES)}"
        data.find_text(options.data, works)
    layers = int(huggingface.config_of(options.pretrained, "bert", task.model)["num_hidden_layers"])
    return layers + 2, task.training  # with embeddings before and a head after the encoder


def build(name: str, preset: BertPreset, options: BuildOptions) -> Built:
    if options.data is not None and data.has_paraphrases(options.data):
        return _pairs(options, options.data, preset.pairs)
    return _masked(options, preset.masked)


def _pairs(options: BuildOptions, folder: Path, task: BertTask) -> Built:
    pairs = data.read_paraphrases(folder)
    lines = [sentence for pair in pairs["train"] for sentence in (pair.first, pair.second)]
    model, encode, vocabulary = _model(PAIRS_MODEL, task, lines, options)
    length = min(task.length, model.config.max_position_embeddings)
    train, valid = (PairRows.of(pairs[s], encode, vocabulary, length) for s in ("train", "valid"))
    return Samples(partial(by_length, train.pieces.lengths), train, valid, torch.arange(len(valid.labels))), {
        "layers": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "metrics": pair_metrics,
        "metric_fn": confusion,
        "metric_name": "accuracy",
        "title": f"paraphrases among {len(train.labels):,} sentence pairs of {folder.resolve().name}",
        "trivial": ("always a paraphrase", 100 * float(valid.labels.double().mean())),
    }


def _masked(options: BuildOptions, task: BertTask) -> Built:
    texts = data.read_text(options.data, task.max_bytes)
    lines = {split: text.split("\n") for split, text in texts.items()}
    model, encode, vocabulary = _model(MASKED_MODEL, task, lines["train"], options)
    length = min(task.length, model.config.max_position_embeddings)
    rows, valid_rows = (segments(encode(lines[split]), length, vocabulary) for split in ("train", "valid"))
    log_shares = tokens.log_frequencies(rows[:, 1:-1].flatten(), vocabulary.size)
    if task.frequency_bias and options.pretrained is None:
        model.cls.predictions.bias.data.copy_(log_shares)
    source = "Python's standard library" if options.data is None else options.data.resolve().name
    loss = tokens.TokenLoss()
    order, valid_order = partial(shuffled, len(rows)), torch.arange(len(valid_rows))
    # the same for any seed and batch size
    masked = mask_pieces(valid_rows, vocabulary, valid_order, generator(0))
    blind = -float(log_shares[masked[1][masked[1] != IGNORED]].double().mean())
    train = partial(mask_pieces, rows, vocabulary)  # different pieces each time
    return Samples(order, train, TensorRows(masked), valid_order), {
        "layers": model,
        "loss_fn": loss,
        "metrics": tokens.token_metrics,
        "metric_fn": loss.correct,
        "metric_name": "perplexity",
        "lower_is_better": True,
        "title": f"masked pieces of the text of {source}",
        "trivial": ("the pieces' frequencies", tokens.perplexity(blind)),
    }


# ---- the model and its pieces --------------------------------------------------------------------------------------


def _model(
    kind: str, task: BertTask, lines: Sequence[str], options: BuildOptions
) -> tuple[Any, Encode, Vocabulary]:
    if options.pretrained is not None:
        return pretrained_model(kind, options.pretrained, options.seed)
    learnt = Subwords.learn(lines, task.pieces, lowercase=True)
    model = huggingface.new_model(kind, task.config(len(learnt)), options.seed)
    return model, learnt.encode, learnt.vocabulary


def pretrained_model(kind: str, folder: Path, seed: int = 0) -> tuple[Any, Encode, Vocabulary]:
    """Load a model of class ``kind`` with a folder's weights, the function from lines to pieces, and its vocabulary.

    Raises:
        ValueError: see :func:`load_pretrained`, and for a tokenizer without the pieces that BERT needs.
    """
    head = {"num_labels": 2} if kind == PAIRS_MODEL else {}
    model, tokenizer = huggingface.load_pretrained(kind, folder, "bert", seed=seed, **head)
    names = ("pad_token", "cls_token", "sep_token", "mask_token")
    numbers: list[Any] = [getattr(tokenizer, f"{name}_id", None) for name in names]
    if None in numbers:
        raise ValueError(f"the tokenizer in {folder} has no {names[numbers.index(None)]}")
    encode = partial(tokenizer, add_special_tokens=False)
    return model, lambda lines: encode(list(lines))["input_ids"], Vocabulary(len(tokenizer), *numbers)


# ---- masked text (section 3.1 and appendix A.1) --------------------------------------------------------------------


def segments(lines: Iterable[list[int]], length: int, vocabulary: Vocabulary) -> Tensor:
    """Cut a text's pieces, line after line, into rows ``<s> piece ... piece </s>``; int64 [rows, length].

    A rest that fills no row is left out: so nothing is padded, and no attention needs a mask. Raises
    ValueError for a text that fills no row.
    """
    pieces = torch.tensor([piece for line in lines for piece in line], dtype=torch.int64)
    room = length - 2
    count = pieces.numel() // room
    if count == 0:
        raise ValueError(f"a text of {pieces.numel()} pieces fills no segment of {room}: give a longer one")
    ends = torch.tensor([vocabulary.begin, vocabulary.end]).expand(count, 2)
    return torch.cat([ends[:, :1], pieces[: count * room].view(count, room), ends[:, 1:]], 1)


def mask_pieces(
    rows: Tensor, vocabulary: Vocabulary, indices: Tensor, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Make a batch of rows in which 15 % of each row's pieces are masked, rounded and at least one.

    80 % of them become ``<mask>``, 10 % any piece, 10 % are unchanged.

    Args:
        rows: int64 [rows, T] with at least one piece each.
        vocabulary: the pieces.
        indices: int64 [n], the rows of the batch.
        draw: the generator of all random numbers.

    Returns:
        Inputs and targets [n, T]; targets are the masked pieces, elsewhere ``IGNORED``.
    """
    rows = rows[indices]
    special = torch.isin(rows, torch.tensor([vocabulary.pad, vocabulary.begin, vocabulary.end]))
    # Distinct pieces of a row: those with the smallest of its random numbers.
    order = torch.rand(rows.shape, generator=draw).masked_fill(special, 2.0).argsort(1)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(rows.shape[1]).expand_as(order))
    wanted = ((~special).sum(1, keepdim=True) * _MASKED).round().clamp(min=1)
    masked = (rank < wanted) & ~special
    fate = torch.rand(rows.shape, generator=draw)
    any_piece = torch.randint(vocabulary.size, rows.shape, generator=draw)
    read = rows.masked_fill(masked & (fate < _MASK), vocabulary.mask)
    read = torch.where(masked & (fate >= 1 - _RANDOM), any_piece, read)
    return read, rows.masked_fill(~masked, IGNORED)


# ---- sentence pairs ------------------------------------------------------------------------------------------------


def joined(
    first: list[int], second: list[int], vocabulary: Vocabulary, length: int
) -> tuple[list[int], list[int]]:
    """Make pieces ``<s> first </s> second </s>``, and for each 0 or 1, the number of its sentence.

    The result has at most ``length`` (5 or more) pieces. A pair that is too long loses pieces from the end of
    its longer sentence, one at a time, as in BERT's own fine-tuning: so each sentence keeps a part.
    """
    room = length - 3
    n = min(len(first), max(room - len(second), (room + 1) // 2))
    m = min(len(second), room - n)
    pieces = [vocabulary.begin, *first[:n], vocabulary.end, *second[:m], vocabulary.end]
    return pieces, [0] * (n + 2) + [1] * (m + 1)


@dataclass(frozen=True)
class PairRows:
    """Makes batches of joined pairs, padded to the longest of the batch.

    Inputs: BERT's ``input_ids``, ``attention_mask`` and ``token_type_ids``, int64 [n, T]. Targets: the
    labels, int64 [n].
    """

    pieces: RaggedRows
    types: RaggedRows
    labels: Tensor
    pad: int

    @classmethod
    def of(
        cls, pairs: Sequence[data.Paraphrase], encode: Encode, vocabulary: Vocabulary, length: int
    ) -> PairRows:
        firsts, seconds, labels = zip(*pairs)
        both = zip(encode(firsts), encode(seconds))
        pieces, types = zip(*(joined(first, second, vocabulary, length) for first, second in both))
        return cls(RaggedRows.of(pieces), RaggedRows.of(types), torch.tensor(labels), vocabulary.pad)

    def __call__(self, indices: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, types = self.pieces.padded(indices, self.pad), self.types.padded(indices)
        inputs = {"input_ids": rows, "attention_mask": (rows != self.pad).long(), "token_type_ids": types}
        return inputs, self.labels[indices]


def confusion(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return shares of the pairs for accuracy and F1; logits [n, 2], labels [n]."""
    predicted, true = logits.argmax(-1) == 1, labels == 1
    shares = {"correct": predicted == true, "predicted": predicted, "true": true, "both": predicted & true}
    return {name: share.double().mean() for name, share in shares.items()}


def pair_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Make accuracy and F1 of the paraphrases, in percent; F1 is 0 if there are none and none is predicted."""
    either = means["predicted"] + means["true"]
    return {"accuracy": 100 * means["correct"], "f1": 200 * means["both"] / either if either else 0.0}
