"""S2VT, sequence to sequence, video to text, as a list of layers (Venugopalan et al., ICCV 2015, arXiv 1505.00487).

Two LSTMs run over one stretch of time (section 3.2, figure 2). The first reads the frames and then zeros; the second
reads what the first says next to a word's embedding, zeros while there are frames and the caption's words
afterwards, and what it says then gives the next word. Each clip's words begin right after *its own* last frame, so
what pads a shorter clip or caption comes after everything that counts, where no LSTM has been yet.

b clips, F frames of the longest, D features of a frame, T words of the longest caption, H features of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Uniform = Callable[..., nn.Parameter]

_BOUND = 0.08  # of the initial weights, as in the authors' configuration
_FORGET_BIAS = 1.0  # so that what was seen is still there some ten frames later from the beginning


@dataclass(frozen=True)
class S2VTConfig:
    """Sizes; the defaults are the paper's for frames described by VGG's fc7 (sections 3.3 and 4.2).

    Attributes:
        vocabulary: words that can be said.
        features: D, numbers that describe a frame.
        embedding: features of an embedded frame, and of an embedded word.
        hidden: H, features of each LSTM.
        video_lstms: LSTMs that see the frames alone; published: 1.
        language_lstms: LSTMs that see the words too, the first of them directly; published: 1.
        dropout: of what each LSTM is given, and of the last one's output.
    """

    vocabulary: int
    features: int = 4096
    embedding: int = 500
    hidden: int = 1000
    video_lstms: int = 1
    language_lstms: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "features", "embedding", "hidden", "video_lstms", "language_lstms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


def s2vt_layers(config: S2VTConfig, *, seed: int = 0) -> list[nn.Module]:
    """[frame embedding, LSTMs over the video, LSTMs with the words, word output].

    Input: a dict of ``frames`` float [b, F, D], ``lengths`` int64 [b] (frames of each clip, 1 to F) and ``words``
    int64 [b, T], what was said so far, the first of which begins a sentence. What ``frames`` has after a clip's last
    frame is not looked at. Output: logits [b, T, vocabulary] of the word that follows each. With the plain int ``at``
    in the input: only the logits [b, vocabulary] of the word that follows ``words[:, at]``.

    Initial weights depend on the seed alone; the caller's random state stays as it is.
    """
    draw = torch.Generator("cpu").manual_seed(seed)

    def uniform(*shape: int, bound: float = _BOUND) -> nn.Parameter:
        weight = torch.empty(shape)
        # on the meta device there is nothing to draw, and its tensors would not take a CPU generator
        return nn.Parameter(weight if weight.is_meta else weight.uniform_(-bound, bound, generator=draw))

    video = [VideoLSTM(config, uniform, first=n == 0) for n in range(config.video_lstms)]
    final = config.language_lstms - 1
    language = [LanguageLSTM(config, uniform, first=n == 0, last=n == final) for n in range(final + 1)]
    return [FrameEmbedding(config, uniform), *video, *language, WordOutput(config, uniform)]


def s2vt_costs(config: S2VTConfig, frames: float, words: float) -> list[float]:
    """Multiply-adds of each layer for a clip of so many frames and a caption of so many words."""
    H, E = config.hidden, config.embedding
    steps = frames + words
    video = [steps * 4 * H * ((E if n == 0 else H) + H) for n in range(config.video_lstms)]
    language = [steps * 4 * H * (H + (E if n == 0 else 0) + H) for n in range(config.language_lstms)]
    return [frames * config.features * E, *video, *language, words * H * config.vocabulary]


class LSTM(nn.Module):
    """One LSTM over [b, steps, inputs], from zero, to [b, steps, hidden]; one bias per gate as in the paper."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform) -> None:
        super().__init__()
        # gates in torch's order: input, forget, cell, output
        self.weight_ih = uniform(4 * hidden, inputs)
        self.weight_hh = uniform(4 * hidden, hidden)
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        with torch.no_grad():
            self.bias[hidden : 2 * hidden] = _FORGET_BIAS

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(1, x.shape[0], self.weight_hh.shape[1])
        weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        # nn.LSTM calls the same operator, but always learns two biases
        output: Tensor = torch.lstm(x, (state, state), weights, True, 1, 0.0, self.training, False, True)[0]
        return output


class FrameEmbedding(nn.Module):
    """Replaces ``frames`` [b, F, D] by ``x`` [b, F, embedding], zero after a clip's last frame."""

    def __init__(self, config: S2VTConfig, uniform: Uniform) -> None:
        super().__init__()
        # so an embedding's features begin as large as a frame's
        self.weight = uniform(config.embedding, config.features, bound=(3 / config.features) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(config.embedding))

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        rest = dict(inputs)
        frames, lengths = rest.pop("frames"), rest["lengths"]
        x = F.linear(frames, self.weight, self.bias)
        real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        return {"x": x.masked_fill(~real.unsqueeze(-1), 0), **rest}


class VideoLSTM(nn.Module):
    """``x`` [b, F, embedding], or from another of its kind [b, F + T, H], to ``x`` [b, F + T, H]."""

    def __init__(self, config: S2VTConfig, uniform: Uniform, *, first: bool) -> None:
        super().__init__()
        self.lstm = LSTM(config.embedding if first else config.hidden, config.hidden, uniform)
        self.dropout = nn.Dropout(config.dropout)
        self.first = first

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        if self.first:  # no more frames while the caption is said
            x = F.pad(x, (0, 0, 0, inputs["words"].shape[1]))
        return {**inputs, "x": self.lstm(self.dropout(x))}


class LanguageLSTM(nn.Module):
    """``x`` [b, F + T, H] to the same; the first of them joins the words, the last keeps the steps of words alone.

    The last one's output is the tensor [b, T, H], or with ``at`` that step's [b, H].
    """

    def __init__(self, config: S2VTConfig, uniform: Uniform, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = uniform(config.vocabulary, config.embedding) if first else None
        inputs = config.hidden + (config.embedding if first else 0)
        self.lstm = LSTM(inputs, config.hidden, uniform)
        self.dropout = nn.Dropout(config.dropout)
        self.last = last

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any] | Tensor:
        x, words = inputs["x"], inputs["words"]
        steps = inputs["lengths"].unsqueeze(1) + torch.arange(words.shape[1], device=words.device)
        if self.embedding is not None:
            x = torch.cat((x, self._placed(words, steps, x.shape[1])), 2)
        x = self.lstm(self.dropout(x))
        if not self.last:
            return {**inputs, "x": x}
        if "at" in inputs:
            steps = steps[:, inputs["at"]].unsqueeze(1)
        said: Tensor = x.gather(1, _per_feature(steps, x.shape[2]))
        return said.squeeze(1) if "at" in inputs else said

    def _placed(self, words: Tensor, steps: Tensor, total: int) -> Tensor:
        """Embedded words at their steps, [b, total, embedding], and zeros at the others."""
        assert self.embedding is not None
        embedded = F.embedding(words, self.embedding)
        empty = embedded.new_zeros(words.shape[0], total, embedded.shape[2])
        return empty.scatter(1, _per_feature(steps, embedded.shape[2]), embedded)


class WordOutput(nn.Module):
    """Features [..., H] to logits [..., vocabulary]."""

    def __init__(self, config: S2VTConfig, uniform: Uniform) -> None:
        super().__init__()
        self.weight = uniform(config.vocabulary, config.hidden)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.dropout(x), self.weight, self.bias)


def _per_feature(steps: Tensor, features: int) -> Tensor:
    return steps.unsqueeze(-1).expand(-1, -1, features)
