"""The workload ``gpt``: transformers' GPT-2, a decoder-only language model over pieces of words, in three sizes.

Radford, Narasimhan, Salimans, Sutskever, 2018 (GPT) and Radford, Wu, Child, Luan, Amodei, Sutskever, 2019 (GPT-2). The
embedding is the output layer's weight too, the same Parameter in the first and in the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.workloads.language import log_frequencies, perplexity
from avgpipe.workloads.libraries import library
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.pretrained import GPT2, check_pretrained, load_pretrained, new_model
from avgpipe.workloads.samples import SampleBatches, in_order, shuffled
from avgpipe.workloads.segments import IGNORED, Pieces, Segments, load_pieces, pieces_of
from avgpipe.workloads.subwords import Subwords
from avgpipe.workloads.text import find_text, read_text
from avgpipe.workloads.training import Training, lr_scheduler_of, optimizer_of
from avgpipe.workloads.workload import Workload, WorkloadFacts

MODEL = "GPT2LMHeadModel"
_HELD_OUT = ("valid", "test")


@dataclass(frozen=True)
class GPTPreset:
    """A size of model and how it is trained.

    Attributes:
        hidden, layers, heads: of the decoder; its feed-forward layers are four times as wide.
        vocabulary: pieces of the model; as many are learnt from the training text, or fewer where it is short.
        length: T, pieces of a segment and the longest input.
        dropout: of embeddings, attention and residual branches.
        initializer_range: standard deviation of the initial weights; GPT-2's 0.02 suits its width, and small models
            want more.
        max_bytes: how much of the text to read, None: all.
        autocast: of a device type, the dtype of ``torch.autocast`` that makes training there faster. On CPUs bfloat16
            pays only where they have instructions for it.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    training: Training
    dropout: float = 0.0
    initializer_range: float = 0.02
    max_bytes: int | None = None
    autocast: Mapping[str, torch.dtype] = field(default_factory=lambda: {"cuda": torch.bfloat16})

    def config(self) -> Any:
        """The ``transformers.GPT2Config``."""
        return library("transformers", "gpt").GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.length,
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            initializer_range=self.initializer_range,
            bos_token_id=Subwords.begin,
            eos_token_id=Subwords.end,
            pad_token_id=Subwords.pad,
            use_cache=False,
        )


def _training(batch_size: int, lr: float) -> Training:
    return Training(
        batch_size,
        1,
        "adamw",
        lr=lr,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        clip_grad_norm=1.0,
        warmup=0.05,
        decay="cosine",
    )


_GPT: dict[str, GPTPreset] = {
    # One pass over little text: what counts is how many pieces are seen in the time, so the models are narrow.
    "tiny": GPTPreset(
        hidden=64,
        layers=4,
        heads=2,
        vocabulary=4096,
        length=64,
        training=_training(batch_size=16, lr=8e-3),
        initializer_range=0.06,
        max_bytes=4_000_000,
    ),
    "small": GPTPreset(
        hidden=192,
        layers=4,
        heads=4,
        vocabulary=8192,
        length=128,
        training=_training(batch_size=16, lr=2e-3),
        initializer_range=0.04,
    ),
    # GPT-2's smallest model, 124.4 M parameters. GPT-2's training is not published in full; this is GPT's (section
    # 4.1): batches of 32,768 pieces, Adam at 2.5e-4 with decoupled decay 0.01, dropout 0.1 and a cosine to zero. Its
    # warm-up of 2,000 steps and its 100 epochs were for a far longer text than WikiText-2.
    "paper": GPTPreset(
        hidden=768,
        layers=12,
        heads=12,
        vocabulary=50_257,
        length=1024,
        training=Training(
            32, 20, "adamw", lr=2.5e-4, weight_decay=0.01, clip_grad_norm=1.0, warmup=0.05, decay="cosine"
        ),
        dropout=0.1,
    ),
}
PRESETS = {"gpt": _GPT}


def check(name: str, options: BuildOptions) -> WorkloadFacts:
    """Refuse what cannot be built, without reading the data."""
    preset = PRESETS[name][options.preset]
    training = preset.training.asked(options)
    layers = preset.layers
    if options.pretrained is not None:
        layers = int(check_pretrained(GPT2, options.pretrained).get("n_layer", layers))
    if options.data is not None:
        find_text(options.data)
    return WorkloadFacts(
        name=name,
        preset=options.preset,
        layers=layers + 2,  # the embedding before the blocks, the output layer behind
        batch_size=training.batch_size,
        epochs=training.epochs,
    )


def build(name: str, options: BuildOptions) -> Workload:
    """Read the data, learn the pieces and make the model, the same in every process."""
    check(name, options)
    preset = PRESETS[name][options.preset]
    training = preset.training.asked(options)
    model, pieces = _model_and_pieces(preset, options)
    length = min(preset.length, model.config.n_positions)
    train = Segments(pieces["train"], length)
    held_out = {split: Segments(pieces[split], length, count_words=True) for split in _HELD_OUT}

    def train_batches(epoch: int, start: int = 0) -> SampleBatches:
        order = shuffled(len(train), options.seed, epoch)
        return SampleBatches(
            order, training.batch_size, train, epoch=epoch, start=start, workers=options.loader_workers
        )

    def held_out_batches(split: str) -> SampleBatches:
        segments = held_out[split]
        order = in_order(len(segments))
        return SampleBatches(order, training.batch_size, segments, workers=options.loader_workers)

    return Workload(
        name=name,
        preset=options.preset,
        layers=model,
        loss_fn=PieceLoss(),
        loss_weight=predicted_pieces,
        optimizer=optimizer_of(training, options.pipelines),
        lr_scheduler=lr_scheduler_of(training, len(train_batches(0)), options),
        clip_grad_norm=training.clip_grad_norm,
        train_batches=train_batches,
        valid_batches=partial(held_out_batches, "valid"),
        test_batches=partial(held_out_batches, "test"),
        metrics=word_perplexity,
        metric_fn=pieces_and_words,
        metric_name="perplexity",
        lower_is_better=True,
        batch_size=training.batch_size,
        epochs=training.epochs,
        autocast=preset.autocast,
        trivial=("the pieces' frequencies", blind_perplexity(pieces["train"], pieces["valid"])),
        title=f"the next piece of the text of {'Python' if options.data is None else options.data.name}",
    )


# ---- loss and metric -----------------------------------------------------------------------------------------------


class PieceLoss(nn.CrossEntropyLoss):
    """Mean cross entropy in nats per predicted piece, of logits [b, T, V].

    ``target``: int64 [b, T], of which ``IGNORED`` does not count; or a pair of it and the words that it stands for.
    """

    def __init__(self) -> None:
        super().__init__(ignore_index=IGNORED)

    def forward(self, output: Tensor, target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        logits = output.to(torch.promote_types(output.dtype, torch.float32))  # autocast leaves 8 bits
        return super().forward(logits.flatten(0, 1), _numbers(target).flatten())


def predicted_pieces(target: Tensor | tuple[Tensor, Tensor]) -> float:
    """How many pieces the loss is the mean of."""
    return float((_numbers(target) != IGNORED).sum())


def pieces_and_words(output: Tensor, target: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Predicted pieces, and the words that they are, per segment."""
    numbers, words = target
    return {"pieces": (numbers != IGNORED).sum(1).double().mean(), "words": words.double().mean()}


def word_perplexity(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Perplexity per word, each line's end one of them: exp of all nats over all words.

    So texts in other pieces, or in whole words, have comparable values. ``piece_perplexity`` is that per piece.
    """
    return {
        "perplexity": perplexity(loss * means["pieces"] / means["words"]),
        "piece_perplexity": perplexity(loss),
    }


def blind_perplexity(train: Pieces, held_out: Pieces) -> float:
    """Perplexity per word of always telling the frequencies of the pieces of ``train``, one added to each count."""
    size = 1 + int(max(train.numbers.max(), held_out.numbers.max()))
    nats = -log_frequencies(train.numbers, size)[held_out.numbers].double().sum()
    return perplexity(float(nats / held_out.words.double().sum()))


def _numbers(target: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return target if isinstance(target, Tensor) else target[0]


# ---- the model and its pieces --------------------------------------------------------------------------------------


def _model_and_pieces(preset: GPTPreset, options: BuildOptions) -> tuple[Any, dict[str, Pieces]]:
    if options.pretrained is None:
        _, pieces = load_pieces(options.data, preset.vocabulary, max_bytes=preset.max_bytes)
        return new_model(MODEL, preset.config(), options.seed), pieces
    model, tokenizer = load_pretrained(GPT2, MODEL, options.pretrained, use_cache=False)
    texts, encode = read_text(options.data, preset.max_bytes), partial(_encode, tokenizer)
    source = options.data is None
    return model, {split: pieces_of(text, encode, source=source) for split, text in texts.items()}


def _encode(tokenizer: Any, lines: Sequence[str]) -> list[list[int]]:
    rows: list[list[int]] = tokenizer([line + "\n" for line in lines], add_special_tokens=False)["input_ids"]
    return rows
