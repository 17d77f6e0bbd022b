"""Eight small models, each with its data and its loss: a script that has no slip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.slips.script import BATCHES, SAMPLES, Script

WIDTH, WORDS, LENGTH, CLASSES = 8, 11, 5, 4


class Block(nn.Module):
    """A residual block over features: a norm and two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Attention(nn.Module):
    """Causal self-attention with one head, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mixed = functional.scaled_dot_product_attention(
            self.query(y), self.key(y), self.value(y), is_causal=True
        )
        return x + self.out(mixed)


class LanguageModel(nn.Module):
    """A transformer of four blocks, whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList([Attention(), Block(), Attention(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """An encoder and a decoder of recurrent layers, with attention between them. Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, state = self.encoder(self.embedding(source))
        memory = self.blocks[0](memory)
        x, _ = self.decoder(self.embedding(target), state)
        x = self.blocks[2](self.blocks[1](x))
        seen = torch.softmax(x @ memory.transpose(1, 2), -1) @ memory
        return self.head(torch.cat((x, seen), -1))


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class TwoTasks(nn.Module):
    """A trunk with two heads, which returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.classes, self.number = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"class": self.classes(x), "number": self.number(x)[:, 0]}


class Rounded(torch.autograd.Function):
    """Rounds to eighths, and lets half of the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad / (1 + x.square())


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(self.block(x))


class Counting(nn.Module):
    """Counts samples, and sums what they were, in buffers. Training does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += len(x)
                self.total += x.sum(0)
        return self.block(x)


class TwoInputs(nn.Module):
    """Joins a vector and a word in the middle of its way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.words = nn.Linear(6, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        x = x + self.words(word)
        return self.head(self.blocks[3](self.blocks[2](x)))


# ---- losses ----------------------------------------------------------------------------------------------------------


def next_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def two_losses(output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    named = functional.cross_entropy(output["class"], target["class"])
    return named + 0.5 * functional.mse_loss(output["number"], target["number"])


# ---- scripts ---------------------------------------------------------------------------------------------------------

_Draw = Callable[..., torch.Tensor]


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(WORDS, shape)


def _classes() -> torch.Tensor:
    return torch.randint(CLASSES, (SAMPLES,))


def _lm() -> Script:
    batches = [
        (words[:, :-1], words[:, 1:]) for words in (_words(SAMPLES, LENGTH + 1) for _ in range(BATCHES))
    ]
    names = [f"blocks.{n}" for n in range(4)]
    return Script(LanguageModel(), batches, next_words, names, input_is_float=False)


def _cnn() -> Script:
    def convolution(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())

    model = nn.Sequential(
        convolution(3),
        *(convolution(6) for _ in range(3)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )
    batches = [(torch.randn(SAMPLES, 3, 4, 4), _classes()) for _ in range(BATCHES)]
    return Script(model, batches, nn.CrossEntropyLoss(), ["1", "2", "3"])


def _seq2seq() -> Script:
    batches = []
    for _ in range(BATCHES):
        source, target = _words(SAMPLES, LENGTH), _words(SAMPLES, LENGTH + 2)
        batches.append(((source, target[:, :-1]), target[:, 1:]))
    names = [f"blocks.{n}" for n in range(3)]
    return Script(Translator(), batches, next_words, names, input_is_float=False)


def _chain(make: Callable[[], nn.Module], count: int = 4) -> Script:
    head = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(nn.Linear(6, WIDTH), *(make() for _ in range(count)), head)
    batches = [(torch.randn(SAMPLES, 6), _classes()) for _ in range(BATCHES)]
    return Script(model, batches, nn.CrossEntropyLoss(), [f"{n + 1}" for n in range(count)])


def _lora() -> Script:
    script = _chain(Adapted)
    script.model[0].requires_grad_(False)
    return script


def _multitask() -> Script:
    batches = [
        (torch.randn(SAMPLES, 6), {"class": _classes(), "number": torch.randn(SAMPLES)})
        for _ in range(BATCHES)
    ]
    names = [f"blocks.{n}" for n in range(4)]
    return Script(TwoTasks(), batches, two_losses, names, output_is_tensor=False)


def _two_inputs() -> Script:
    batches = [((torch.randn(SAMPLES, 6), _words(SAMPLES)), _classes()) for _ in range(BATCHES)]
    names = [f"blocks.{n}" for n in range(4)]
    return Script(TwoInputs(), batches, nn.CrossEntropyLoss(), names, input_is_float=False)


MODELS: dict[str, Callable[[], Script]] = {
    "lm": _lm,
    "cnn": _cnn,
    "seq2seq": _seq2seq,
    "lora": _lora,
    "multitask": _multitask,
    "function": lambda: _chain(Rounding),
    "buffer": lambda: _chain(Counting),
    "two-inputs": _two_inputs,
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Script:
    """Return a script without a slip; the same seed gives the same weights and batches."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(before)
