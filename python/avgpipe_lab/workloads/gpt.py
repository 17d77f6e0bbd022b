"""The workload ``gpt``: transformers' GPT-2, a decoder-only language model over pieces of words, in three sizes.

Radford, Narasimhan, Salimans, Sutskever, 2018 (GPT) and Radford, Wu, Child, Luan, Amodei, Sutskever, 2019
(GPT-2). The embedding is also the output layer's weight, the same Parameter in the first and in the last
layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avgpipe.tasks import BuildOptions
from avgpipe_lab.workloads import library
from avgpipe_lab.workloads.batches import RaggedRows, TensorRows, shuffled
from avgpipe_lab.workloads.data import find_text, read_text, split_words
from avgpipe_lab.workloads.huggingface import Encode, Subwords, config_of, load_pretrained, new_model
from avgpipe_lab.workloads.recipe import Built, Recipe, Samples
from avgpipe_lab.workloads.tokens import IGNORED, TokenLoss, log_frequencies, perplexity

PRETRAINED = True
MODEL = "GPT2LMHeadModel"


@dataclass(frozen=True)
class GPTPreset:
    """A size of model and its training.

    Attributes:
        model: fields of ``transformers.GPT2Config``. As many pieces as its vocabulary are learnt from the
            training text, or fewer if it is short; a segment has as many as the model has positions.
        training: batches are of segments.
        max_bytes: bytes of the text to read, None: all.
    """

    model: dict[str, Any]
    training: Recipe
    max_bytes: int | None = None

    def config(self) -> Any:
        """Make the ``transformers.GPT2Config``."""
        ends = {"bos_token_id": Subwords.begin, "eos_token_id": Subwords.end, "pad_token_id": Subwords.pad}
        return library("transformers", "gpt").GPT2Config(**self.model, **ends, use_cache=False)


_TINY = {"n_embd": 64, "n_layer": 4, "n_head": 2, "vocab_size": 4096, "n_positions": 64}
_SMALL = {"n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 128}
_PAPER = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_COSINE = partial(Recipe, optimizer="adamw", clip_grad_norm=1.0, warmup=0.05, decay="cosine")
_ONCE = partial(_COSINE, batch_size=16, epochs=1, weight_decay=0.1, betas=(0.9, 0.95))

PRESETS = {
    "gpt": {
        # One pass over little text: the number of pieces trained in the time decides, so the models are
        # narrow. They need larger initial weights than the 0.02 that suits GPT-2's width, and no dropout.
        "tiny": GPTPreset(
            {**_TINY, **_NO_DROPOUT, "initializer_range": 0.06}, _ONCE(lr=8e-3), max_bytes=4_000_000
        ),
        "small": GPTPreset({**_SMALL, **_NO_DROPOUT, "initializer_range": 0.04}, _ONCE(lr=2e-3)),
        # GPT-2's smallest model, 124.4 M parameters. GPT-2's training is not published in full; this is GPT's (section
        # 4.1): batches of 32,768 pieces, Adam at 2.5e-4 with decoupled decay 0.01, dropout 0.1 and a cosine to zero.
        # Its warm-up of 2,000 steps and its 100 epochs were for a far longer text than WikiText-2.
        "paper": GPTPreset(_PAPER, _COSINE(32, 20, lr=2.5e-4, weight_decay=0.01)),
    }
}


def check(name: str, preset: GPTPreset, options: BuildOptions) -> tuple[int, Recipe]:
    layers = int(config_of(options.pretrained, "gpt2", preset.model)["n_layer"])
    find_text(options.data)
    return layers + 2, preset.training  # with the embedding before and the output layer after the blocks


def build(name: str, preset: GPTPreset, options: BuildOptions) -> Built:
    texts = read_text(options.data, preset.max_bytes)
    model, encode = _model(preset, options, texts["train"])
    train, valid = (pieces_of(texts[s], encode, source=options.data is None) for s in ("train", "valid"))
    length = min(preset.model["n_positions"], model.config.n_positions)
    (inputs, targets, _), (valid_inputs, *valid_targets) = segments(train, length), segments(valid, length)
    train_rows, valid_rows = TensorRows((inputs, targets)), TensorRows((valid_inputs, tuple(valid_targets)))
    order, valid_order = partial(shuffled, len(inputs)), torch.arange(len(valid_inputs))
    return Samples(order, train_rows, valid_rows, valid_order), {
        "layers": model,
        "loss_fn": TokenLoss(),
        "metrics": word_perplexity,
        "metric_fn": pieces_and_words,
        "metric_name": "perplexity",
        "lower_is_better": True,
        "autocast": {"cuda": torch.bfloat16},  # CPUs gain only if they have instructions for it
        "trivial": ("the pieces' frequencies", baseline_perplexity(train, valid)),
        "title": f"the next piece of the text of {'Python' if options.data is None else options.data.name}",
    }


def _model(preset: GPTPreset, options: BuildOptions, train: str) -> tuple[Any, Encode]:
    """Return the model, and the function from lines, each with its end, to pieces."""
    if options.pretrained is None:
        subwords = Subwords.learn(train.split("\n"), preset.model["vocab_size"])
        model = new_model(MODEL, preset.config(), options.seed)
        return model, lambda lines: [[*row, Subwords.end] for row in subwords.encode(lines)]
    model, tokenizer = load_pretrained(MODEL, options.pretrained, "gpt2", use_cache=False)

    plain = partial(tokenizer, add_special_tokens=False)
    return model, lambda lines: plain([f"{line}\n" for line in lines])["input_ids"]


# ---- a text as segments of a fixed number of pieces ----------------------------------------------------------------


class Pieces(NamedTuple):
    """A text as numbers of pieces.

    Attributes:
        numbers: int64 [pieces].
        words: float32 [pieces], the words of a piece's line, its end among them, over its pieces: the sum is the
            number of words in the text.
    """

    numbers: Tensor
    words: Tensor


def pieces_of(text: str, encode: Encode, *, source: bool = False) -> Pieces:
    """Encode a text by the lines with ``encode``, with each line's end.

    ``source``: words are counted as in a program, see :func:`avgpipe_lab.workloads.data.split_words`.
    """
    lines = text.removesuffix("\n").split("\n")
    rows = RaggedRows.of(encode(lines))
    counted = [line + "\n" if line.strip() or not source else "" for line in lines]
    words = torch.tensor([float(len(split_words(line, source=source))) for line in counted])
    return Pieces(rows.values, (words / rows.lengths.clamp(min=1)).repeat_interleave(rows.lengths))


def segments(pieces: Pieces, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a text into segments: segment s reads the pieces ``s T`` to ``(s + 1) T - 1`` and predicts each one's next.

    So every piece but the very first is predicted once. The last segment is filled up with targets
    ``IGNORED``.

    Returns:
        Inputs and targets, int64 [segments, T], and the words of the predicted pieces, float32 [segments].

    Raises:
        ValueError: the text has less than two pieces.
    """
    numbers, words = pieces
    if len(numbers) < 2:
        raise ValueError(f"a text needs at least 2 pieces to predict one, and this has {len(numbers)}")
    fill = (0, -(len(numbers) - 1) % length)
    inputs = F.pad(numbers[:-1], fill, value=int(numbers[-1])).view(-1, length)
    targets = F.pad(numbers[1:], fill, value=IGNORED).view(-1, length)
    return inputs, targets, F.pad(words[1:], fill).view(-1, length).sum(1)


# ---- loss and metric -----------------------------------------------------------------------------------------------


def pieces_and_words(output: Tensor, targets: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the number of predicted pieces, and of their words, per segment."""
    numbers, words = targets
    return {"pieces": (numbers != IGNORED).sum(1).double().mean(), "words": words.double().mean()}


def word_perplexity(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Make the perplexity per word, with a word for each line's end: exp of all nats over all words.

    So texts in other pieces, or in whole words, have comparable values. ``piece_perplexity`` is that per
    piece.
    """
    per_word = loss * means["pieces"] / means["words"]
    return {"perplexity": perplexity(per_word), "piece_perplexity": perplexity(loss)}


def baseline_perplexity(train: Pieces, valid: Pieces) -> float:
    """Return the perplexity per word of predicting the frequencies of pieces in ``train``, with one added to each."""
    size = 1 + int(max(train.numbers.max(), valid.numbers.max()))
    nats = -log_frequencies(train.numbers, size)[valid.numbers].double().sum()
    return perplexity(float(nats / valid.words.double().sum()))
