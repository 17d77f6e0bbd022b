"""Beam search with any model that predicts the next piece of a sequence from those before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Hypothesis(NamedTuple):
    """A found sequence, without begin and end, and its score: log-probability over length penalty."""

    pieces: list[int]
    score: float


def beam_search(
    predict: Callable[[Any], Tensor],
    source: Mapping[str, Tensor],
    *,
    begin: int,
    end: int,
    beam: int,
    max_length: int,
    length_penalty: float = 0.6,
) -> list[Hypothesis]:
    """The best sequence found for each sentence of a batch (Wu et al. 2016, section 7, without coverage penalty).

    ``predict`` is called once per step for all live hypotheses of all unfinished sentences: with ``source``'s
    tensors, a row per hypothesis, ``target`` int64 [rows, t] (begin and the pieces so far) and ``at`` = t - 1; it
    returns the logits of the next piece [rows, vocabulary]. A sentence is finished when ``beam`` hypotheses have
    ended, or when none can become better than the best that has. With beam 1 this is greedy search.

    Args:
        predict: such as ``Pipeline.predict``, or a module in evaluation mode.
        source: what else the model is given, by name; the sentences are dimension 0 of every tensor.
        begin, end: the pieces that begin and end a sequence.
        beam: hypotheses kept per sentence.
        max_length: pieces of the longest sequence, without begin and end.
        length_penalty: a in :func:`penalty`; 0: log-probabilities are compared as they are.

    Raises:
        ValueError: beam, max_length or length_penalty out of range, or output that is not [rows, vocabulary].
    """
    for name, value, least in (
        ("beam", beam, 1),
        ("max_length", max_length, 0),
        ("length_penalty", length_penalty, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    search = _Search(dict(source), begin, end, beam, max_length, length_penalty)
    with torch.no_grad():
        while search.alive.numel():
            search.step(predict)
    return [found.best for found in search.found if found.best is not None]


def penalty(length: int, a: float) -> float:
    """((5 + length) / 6) ** a, by which a log-probability is divided; ``length`` counts the end (equation 14)."""
    return float(((5 + length) / 6) ** a)


@dataclass
class _Found:
    """What has ended for a sentence."""

    best: Hypothesis | None = None
    count: int = 0


@dataclass
class _Search:
    """The live hypotheses of the unfinished sentences, as many (w) for each; they all have t pieces."""

    source: dict[str, Tensor]
    begin: int
    end: int
    beam: int
    max_length: int
    length_penalty: float
    found: list[_Found] = field(init=False)
    alive: Tensor = field(init=False)  # int64 [n], which sentences are unfinished
    prefix: Tensor = field(init=False)  # int64 [n, w, t]
    scores: Tensor = field(init=False)  # float64 [n, w], log-probabilities, best first

    def __post_init__(self) -> None:
        samples = next(iter(self.source.values())).shape[0]
        self.found = [_Found() for _ in range(samples)]
        self.alive = torch.arange(samples)
        self.prefix = torch.full((samples, 1, 1), self.begin)
        self.scores = torch.zeros(samples, 1, dtype=torch.float64)

    def step(self, predict: Callable[[Any], Tensor]) -> None:
        """Make all live hypotheses a piece longer, and take out those that end and the sentences that are done."""
        total = self.scores[:, :, None] + self._log_probabilities(predict)
        n, w, vocabulary = total.shape
        length = self.prefix.shape[2]  # with the piece that comes now, without begin
        if length > self.max_length:  # nothing but the end may follow
            only = total[:, :, self.end]
            self._end(torch.ones_like(only, dtype=torch.bool), only, torch.arange(w).expand(n, w), length)
            self.alive = self.alive[:0]
            return
        # Of 2 beam candidates at most w <= beam are ends, so enough others are among them.
        scores, index = total.flatten(1).topk(min(2 * self.beam, w * vocabulary))
        origin, piece = index // vocabulary, index % vocabulary
        ended = piece == self.end
        self._end(ended[:, : self.beam], scores, origin, length)
        going_on = ended.int().argsort(dim=1, stable=True)[:, : min(self.beam, w * (vocabulary - 1))]
        origin, piece = origin.gather(1, going_on), piece.gather(1, going_on)
        kept = self.prefix.gather(1, origin[:, :, None].expand(-1, -1, length))
        self.prefix = torch.cat((kept, piece[:, :, None]), 2)
        self.scores = scores.gather(1, going_on)
        self._take_out_finished()

    def _log_probabilities(self, predict: Callable[[Any], Tensor]) -> Tensor:
        """Of the next piece, float64 [n, w, vocabulary]."""
        n, w, t = self.prefix.shape
        rows = self.alive.repeat_interleave(w)
        inputs: dict[str, Any] = {name: part[rows.to(part.device)] for name, part in self.source.items()}
        device = next(iter(inputs.values())).device
        logits = predict({**inputs, "target": self.prefix.flatten(0, 1).to(device), "at": t - 1})
        if logits.dim() != 2 or logits.shape[0] != n * w:
            raise ValueError(
                f"predict must return the logits of one position, [{n * w}, vocabulary], got {list(logits.shape)}"
            )
        return logits.cpu().double().log_softmax(-1).view(n, w, -1)

    def _end(self, ended: Tensor, scores: Tensor, origin: Tensor, length: int) -> None:
        """Note the hypotheses of ``length`` pieces that end, where ``ended`` [n, at most beam] says so."""
        for row, rank in ended.nonzero().tolist():
            found = self.found[int(self.alive[row])]
            found.count += 1
            score = float(scores[row, rank]) / penalty(length, self.length_penalty)
            if found.best is None or score > found.best.score:
                pieces: list[int] = self.prefix[row, int(origin[row, rank]), 1:].tolist()
                found.best = Hypothesis(pieces, score)

    def _take_out_finished(self) -> None:
        # A log-probability only falls, and no penalty is larger than that of the longest sequence.
        reachable = (self.scores[:, 0] / penalty(self.max_length + 1, self.length_penalty)).tolist()
        going_on = [
            row
            for row, sentence in enumerate(self.alive.tolist())
            if self._goes_on(self.found[sentence], reachable[row])
        ]
        if len(going_on) < len(reachable):
            self.alive = self.alive[going_on]
            self.prefix, self.scores = self.prefix[going_on], self.scores[going_on]

    def _goes_on(self, found: _Found, reachable: float) -> bool:
        return found.best is None or (found.count < self.beam and not found.best.score >= reachable)
