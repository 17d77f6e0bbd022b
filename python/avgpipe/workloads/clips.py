"""Synthetic clips with captions: made from a seed, for want of a video data set that everyone may have.

No frame of any video is in here. Behind a clip stands a script of a few events in order, each with a subject, what
kind of subject it is, an action and, for some actions, an object. A frame's features are a random projection of the
event that it shows, the same projection for the whole data set, with much noise added; an event lasts several
frames. The caption tells the script: "a red dog chases the ball then it sleeps slowly then a small cat eats".

So each word but the function words is in the frames, and in the right order there: the subject is "it" when it is
the one of the event before, and an event that lasts twice as long is done "slowly". Guessing by word frequencies
cannot find that out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from avgpipe.workloads.samples import generator

PAD, BOS, EOS = 0, 1, 2  # numbers of the words that are none

_KINDS = ("red", "blue", "green", "small", "big", "old")
_SUBJECTS = ("dog", "cat", "boy", "girl", "man", "woman", "horse", "bird", "robot", "monkey")
_ON_OBJECTS = (
    "chases",
    "carries",
    "kicks",
    "throws",
    "washes",
    "paints",
    "lifts",
    "drops",
    "opens",
    "watches",
)
_ALONE = ("sleeps", "jumps", "dances", "sings", "eats", "runs")
_OBJECTS = ("ball", "box", "car", "chair", "book", "hat", "drum", "bike", "lamp", "boat")
_FUNCTION_WORDS = ("a", "the", "it", "then", "slowly")
_VOCABULARY = (
    *("<pad>", "<bos>", "<eos>"),
    *(*_FUNCTION_WORDS, *_KINDS, *_SUBJECTS, *_ON_OBJECTS, *_ALONE, *_OBJECTS),
)
_NUMBER = {word: number for number, word in enumerate(_VOCABULARY)}
_ROLES = 4  # words of an event that a frame shows; PAD where it has no object
_PROJECTION, _NOISE, _SCRIPT = 11, 12, 13  # what a generator is for


class Event(NamedTuple):
    """What a clip shows for some frames. ``object`` is PAD's word where the action has none."""

    kind: str
    subject: str
    action: str
    object: str
    slow: bool
    frames: int

    @property
    def shown(self) -> tuple[str, str, str, str]:
        return self.kind, self.subject, self.action, self.object


@dataclass(frozen=True)
class ClipSet:
    """Some clips and their captions. Features are made when they are asked for, always the same.

    Attributes:
        shown: uint8 [clips, frames], for each frame the event it shows, from 0.
        events: uint8 [clips, events, 4], the words of each event that its frames show.
        lengths: int64 [clips], how many frames each clip has.
        captions: int64 [clips, words], each ends with EOS and is padded with PAD.
        projection: float32 [words, D], what each word adds to a frame's features.
        noise: standard deviation of what else is in each feature.
        seed, first: of the noise; the number of the first clip among those of all sets.
    """

    shown: Tensor
    events: Tensor
    lengths: Tensor
    captions: Tensor
    projection: Tensor
    noise: float
    seed: int
    first: int

    def __len__(self) -> int:
        return self.lengths.numel()

    @cached_property
    def caption_lengths(self) -> Tensor:
        """int64 [clips], words of each caption with its EOS."""
        return (self.captions != PAD).sum(1)

    def frames(self, indices: Tensor) -> Tensor:
        """Features of the clips ``indices``, float32 [n, longest of them, D]; zero after a clip's last frame."""
        lengths = self.lengths[indices]
        frames = torch.zeros(len(indices), int(lengths.max()), self.projection.shape[1])
        for row, (index, length) in enumerate(zip(indices.tolist(), lengths.tolist())):
            words = self.events[index].long()
            meaning = (self.projection[words] * (words != PAD).unsqueeze(-1)).sum(1)  # [events, D]
            draw = generator(_NOISE, self.seed, self.first + index)
            noise = torch.randn(length, frames.shape[2], generator=draw)
            frames[row, :length] = meaning[self.shown[index, :length].long()] + self.noise * noise
        return frames

    def words(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """What a decoder reads and what it should say next, int64 [n, T] each, T words of the longest caption.

        The first is BOS and the caption without its last word; both are padded with PAD.
        """
        said = self.captions[indices, : int(self.caption_lengths[indices].max())]
        read = torch.full_like(said, BOS)
        read[:, 1:] = said[:, :-1]
        return read.masked_fill(said == PAD, PAD), said


@dataclass(frozen=True)
class Clips:
    """A synthetic data set, see :func:`make_clips`; ``vocabulary`` has the word of each number."""

    vocabulary: tuple[str, ...]
    train: ClipSet
    valid: ClipSet
    test: ClipSet

    def sentence(self, words: Sequence[int] | Tensor) -> str:
        """Words up to the first EOS, as text."""
        numbers = [int(word) for word in words]
        end = numbers.index(EOS) if EOS in numbers else len(numbers)
        return " ".join(self.vocabulary[word] for word in numbers[:end])


def make_clips(
    train: int,
    valid: int,
    test: int,
    *,
    features: int,
    events: tuple[int, int] = (1, 3),
    frames: tuple[int, int] = (3, 5),
    noise: float = 2.0,
    seed: int = 0,
) -> Clips:
    """Make a data set; it depends on the arguments alone. No two clips, of whatever sets, have the same script.

    Args:
        train, valid, test: clips of each set.
        features: D, numbers that describe a frame.
        events: fewest and most events of a clip, equally often.
        frames: fewest and most frames of an event; one that is slow, every third or so, has twice as many.
        noise: standard deviation of each feature's noise; that of what a word adds to it is 1.
        seed: of everything that is drawn.

    Raises:
        ValueError: a number or range is out of bounds.
    """
    counts = {"train": train, "valid": valid, "test": test}
    for name, value in {**counts, "features": features}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, (low, high) in {"events": events, "frames": frames}.items():
        if not 1 <= low <= high:
            raise ValueError(f"{name} must be a range of numbers from 1 on, got {(low, high)}")
    if not 0 <= noise < float("inf"):
        raise ValueError(f"noise must be finite and not negative, got {noise}")
    distinct = _distinct_scripts(events[1])
    if sum(counts.values()) > distinct // 2:  # beyond, drawing what is new takes long
        raise ValueError(
            f"{sum(counts.values())} clips are too many of up to {events[1]} events: "
            f"at most {distinct // 2}, or allow more events"
        )
    scripts = _draw_scripts(sum(counts.values()), events, frames, seed)
    projection = torch.randn(len(_VOCABULARY), features, generator=generator(_PROJECTION, seed))
    firsts = [0, *accumulate(counts.values())]
    sets = {
        name: _clip_set(scripts[first : first + counts[name]], projection, noise, seed, first)
        for name, first in zip(counts, firsts)
    }
    return Clips(_VOCABULARY, **sets)


def _distinct_scripts(events: int) -> int:
    """A number that there are at least, of scripts with so many events."""
    one: int = len(_KINDS) * len(_SUBJECTS) * (len(_ON_OBJECTS) * len(_OBJECTS) + len(_ALONE))
    return one * math.prod([one - 1] * (events - 1))


def _draw_scripts(
    count: int, events: tuple[int, int], frames: tuple[int, int], seed: int
) -> list[tuple[Event, ...]]:
    draw = random.Random(f"{_SCRIPT} {seed}")
    scripts: list[tuple[Event, ...]] = []
    known: set[tuple[tuple[str, ...], ...]] = set()
    while len(scripts) < count:
        script: list[Event] = []
        for _ in range(draw.randint(*events)):
            event = _draw_event(draw, frames, script[-1] if script else None)
            while script and event.shown == script[-1].shown:  # nobody could see where it ends
                event = _draw_event(draw, frames, script[-1])
            script.append(event)
        told = tuple(event.shown for event in script)
        if told not in known:
            known.add(told)
            scripts.append(tuple(script))
    return scripts


def _draw_event(draw: random.Random, frames: tuple[int, int], before: Event | None) -> Event:
    if before is not None and draw.random() < 0.4:
        kind, subject = before.kind, before.subject
    else:
        kind, subject = draw.choice(_KINDS), draw.choice(_SUBJECTS)
    action = draw.choice(_ON_OBJECTS + _ALONE)
    acted_on = draw.choice(_OBJECTS) if action in _ON_OBJECTS else _VOCABULARY[PAD]
    slow = draw.random() < 1 / 3
    return Event(kind, subject, action, acted_on, slow, draw.randint(*frames) * (2 if slow else 1))


def _tell(script: Sequence[Event]) -> list[str]:
    words: list[str] = []
    before: Event | None = None
    for event in script:
        if before is not None:
            words.append("then")
        same = before is not None and before[:2] == event[:2]
        words += ["it"] if same else ["a", event.kind, event.subject]
        words.append(event.action)
        if event.action in _ON_OBJECTS:
            words += ["the", event.object]
        if event.slow:
            words.append("slowly")
        before = event
    return words


def _clip_set(
    scripts: Sequence[Sequence[Event]], projection: Tensor, noise: float, seed: int, first: int
) -> ClipSet:
    captions = [[*(_NUMBER[word] for word in _tell(script)), EOS] for script in scripts]
    shown = [[n for n, event in enumerate(script) for _ in range(event.frames)] for script in scripts]
    events = torch.full((len(scripts), max(map(len, scripts)), _ROLES), PAD, dtype=torch.uint8)
    for index, script in enumerate(scripts):
        for n, event in enumerate(script):
            events[index, n] = torch.tensor([_NUMBER[word] for word in event.shown])
    return ClipSet(
        shown=_padded(shown, 0).to(torch.uint8),
        events=events,
        lengths=torch.tensor([len(row) for row in shown]),
        captions=_padded(captions, PAD),
        projection=projection,
        noise=noise,
        seed=seed,
        first=first,
    )


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
