"""Beam search with any model that predicts the next piece of a sequence from those before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from avgpipe.workloads.workload import Predict


class Hypothesis(NamedTuple):
    """A found sequence, without begin and end, and its score: log-probability over length penalty."""

    pieces: list[int]
    score: float


def beam_search(
    predict: Predict,
    source: Mapping[str, Tensor],
    *,
    begin: int,
    end: int,
    beam: int,
    max_length: int,
    length_penalty: float = 0.6,
) -> list[Hypothesis]:
    """Find the best sequence for each sentence of a batch (Wu et al. 2016, section 7, without coverage penalty).

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
        ValueError: numbers out of range, or output that is not [rows, vocabulary].
    """
    if beam < 1 or max_length < 0 or length_penalty < 0:
        raise ValueError(
            "beam must be at least 1, max_length and length_penalty at least 0, got "
            f"{beam}, {max_length} and {length_penalty}"
        )
    samples = next(iter(source.values())).shape[0]
    best: dict[int, Hypothesis] = {}  # of the sentences in which a hypothesis has ended
    ended = [0] * samples
    alive = torch.arange(samples)  # [n], the unfinished sentences, each with w hypotheses of as many pieces
    prefix = torch.full((samples, 1, 1), begin)  # [n, w, pieces]
    scores = torch.zeros(samples, 1, dtype=torch.float64)  # [n, w], log-probabilities, best first
    for length in range(1, max_length + 2):  # of a hypothesis with the piece that comes now, without begin
        if not len(alive):
            break
        total = scores[:, :, None] + _log_probabilities(predict, source, alive, prefix)
        if length > max_length:  # nothing but the end may follow
            total[:, :, :end] = total[:, :, end + 1 :] = -torch.inf
        _, w, vocabulary = total.shape
        # Of 2 beam candidates at most w <= beam are ends, so enough others are among them.
        scores, index = total.flatten(1).topk(min(2 * beam, w * vocabulary))
        origin, piece = index // vocabulary, index % vocabulary
        is_end = piece == end
        for row, rank in is_end[:, :beam].nonzero().tolist():
            sentence, score = int(alive[row]), float(scores[row, rank]) / penalty(length, length_penalty)
            ended[sentence] += 1
            if sentence not in best or score > best[sentence].score:
                best[sentence] = Hypothesis(prefix[row, int(origin[row, rank]), 1:].tolist(), score)
        others = is_end.int().argsort(dim=1, stable=True)[:, : min(beam, w * (vocabulary - 1))]
        scores, origin, piece = (part.gather(1, others) for part in (scores, origin, piece))
        prefix = prefix.gather(1, origin[:, :, None].expand(-1, -1, length))
        prefix = torch.cat((prefix, piece[:, :, None]), 2)
        # A log-probability only falls, and no penalty is larger than that of the longest sequence.
        reachable = (scores[:, 0] / penalty(max_length + 1, length_penalty)).tolist()
        going_on = [
            row
            for row, sentence in enumerate(alive.tolist())
            if sentence not in best or (ended[sentence] < beam and not best[sentence].score >= reachable[row])
        ]
        alive, prefix, scores = alive[going_on], prefix[going_on], scores[going_on]
    return [best[sentence] for sentence in range(samples)]


def penalty(length: int, a: float) -> float:
    """Return ((5 + length) / 6) ** a (equation 14), which divides a log-probability; ``length`` counts the end."""
    return float(((5 + length) / 6) ** a)


@torch.no_grad()
def _log_probabilities(
    predict: Predict, source: Mapping[str, Tensor], alive: Tensor, prefix: Tensor
) -> Tensor:
    """Log-probabilities of the next piece, float64 [n, w, vocabulary]."""
    n, w, t = prefix.shape
    rows = alive.repeat_interleave(w)
    inputs = {name: part[rows.to(part.device)] for name, part in source.items()}
    target = prefix.flatten(0, 1).to(next(iter(inputs.values())).device)
    logits: Tensor = predict({**inputs, "target": target, "at": t - 1})
    if logits.dim() != 2 or len(logits) != n * w:
        raise ValueError(
            f"predict must return the logits of one position, [{n * w}, vocabulary], got {list(logits.shape)}"
        )
    return logits.cpu().double().log_softmax(-1).view(n, w, -1)
