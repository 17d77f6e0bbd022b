"""Shared parts of models of token sequences: initial weights, LSTMs, loss and metrics per token, and beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avgpipe.tasks import Predict

IGNORED = -100  # target that losses ignore


Uniform = Callable[..., nn.Parameter]  # maps a shape and ``bound`` to weights between -bound and bound


def uniform_from(seed: int) -> Uniform:
    """Return a function that draws initial weights from the seed only; the caller's random state is unchanged."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def uniform(*shape: int, bound: float) -> nn.Parameter:
        weight = torch.empty(shape)
        # on the meta device nothing is drawn, and its tensors would not accept a CPU generator
        return nn.Parameter(weight if weight.is_meta else weight.uniform_(-bound, bound, generator=generator))

    return uniform


def run_lstm(
    x: Tensor, weights: list[Tensor], training: bool, state: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one LSTM layer over x [b, T, inputs] with the operator that nn.LSTM also calls.

    Args:
        x: the inputs.
        weights: input-to-hidden [4 hidden, inputs] and hidden-to-hidden [4 hidden, hidden] weights and both biases
            [4 hidden], the gates in torch's order: input, forget, cell, output. They may be masked or derived.
        training: whether a backward follows.
        state: initial h and c [1, b, hidden]; none: zero.

    Returns:
        The outputs [b, T, hidden], and h and c after them.
    """
    state = state or [x.new_zeros(1, x.shape[0], weights[1].shape[1])] * 2
    return torch.lstm(x, state, weights, True, 1, 0.0, training, False, True)


class LSTM(nn.Module):
    """One LSTM layer from a zero state, [b, T, inputs] to [b, T, hidden], with dropout of its input."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, *, dropout: float = 0.0) -> None:
        super().__init__()
        drawn = partial(uniform, 4 * hidden, bound=hidden**-0.5)
        self.weight_ih, self.weight_hh = drawn(inputs), drawn(hidden)
        self.bias_ih, self.bias_hh = drawn(), drawn()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(x, self.dropout, self.training)
        return run_lstm(x, [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh], self.training)[0]


class Projection(nn.Module):
    """Maps features [..., n] to [..., m] by a weight [m, n], possibly shared with a layer, and a bias [m]; None: 0."""

    def __init__(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(len(weight)) if bias is None else bias.clone())

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight, self.bias)


class TokenLoss(nn.Module):
    """Mean cross entropy in nats per token that counts, of logits [b, T, vocabulary] and targets int64 [b, T].

    The targets may be the first of a tuple, with further values for a metric.

    Args:
        ignored: the target of tokens that do not count.
        smoothing: the share of each label's probability that is spread over the vocabulary in training
            (Szegedy et al., CVPR 2016, section 7).
    """

    def __init__(self, ignored: int = IGNORED, smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignored, self.smoothing = ignored, smoothing

    def forward(self, output: Tensor, targets: Any) -> Tensor:
        logits, numbers = at_least_float32(output).flatten(0, 1), _first(targets).flatten()
        smoothing = self.smoothing if self.training else 0.0
        return F.cross_entropy(logits, numbers, ignore_index=self.ignored, label_smoothing=smoothing)

    def weight(self, targets: Any) -> float:
        """Return how many tokens the loss is the mean of."""
        return float((_first(targets) != self.ignored).sum())

    def correct(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return means per sample: tokens that count, and how many of them have the largest logit."""
        counted = targets != self.ignored
        correct = (output.argmax(-1) == targets) & counted
        return {"tokens": counted.sum() / len(targets), "correct": correct.sum() / len(targets)}


def _first(targets: Any) -> Tensor:
    return targets if isinstance(targets, Tensor) else targets[0]


def token_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Make the accuracy per token, in percent, from :meth:`TokenLoss.correct`, and the perplexity."""
    return {"perplexity": perplexity(loss), "accuracy": 100 * means["correct"] / means["tokens"]}


def at_least_float32(x: Tensor) -> Tensor:
    """Widen 16-bit results of autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)


def shifted(targets: Tensor, begin: int, pad: int = 0) -> Tensor:
    """Return the input of a decoder that predicts ``targets`` [b, T]: ``begin``, then the pieces before each."""
    return F.pad(targets[:, :-1], (1, 0), value=begin).masked_fill(targets == pad, pad)


def log_frequencies(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the logarithm of each token's share of a text, with one added to every count; float [vocabulary]."""
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log().float()


# ---- beam search ---------------------------------------------------------------------------------------------------


Source = Mapping[str, Tensor]  # input of a model; sentences are dimension 0 of every tensor


class Hypothesis(NamedTuple):
    """A found sequence, without begin and end, and its score: log-probability over length penalty."""

    pieces: list[int]
    score: float


def beam_search(
    predict: Predict,
    source: Source,
    *,
    begin: int,
    end: int,
    beam: int,
    max_length: int,
) -> list[Hypothesis]:
    """Find the best sequence for each sentence of a batch (Wu et al. 2016, section 7, without coverage penalty).

    ``predict`` is called once per step for all live hypotheses of all unfinished sentences: with ``source``'s
    tensors, a row per hypothesis, ``target`` int64 [rows, t] (begin and the pieces so far) and ``at`` = t - 1; it
    returns the logits of the next piece [rows, vocabulary]. A sentence is finished when ``beam`` hypotheses have
    ended, or when none can become better than the best ended one. With beam 1 this is greedy search.

    Args:
        predict: such as ``Pipeline.predict``, or a module in evaluation mode.
        source: other inputs of the model, by name; the sentences are dimension 0 of every tensor.
        begin, end: the pieces that begin and end a sequence.
        beam: hypotheses kept per sentence.
        max_length: pieces of the longest sequence, without begin and end.
    """
    samples = next(iter(source.values())).shape[0]
    best: dict[int, Hypothesis] = {}  # for sentences with an ended hypothesis
    ended = [0] * samples
    alive = torch.arange(samples)  # [n], the unfinished sentences, each with w hypotheses of equal length
    prefix = torch.full((samples, 1, 1), begin)  # [n, w, pieces]
    scores = torch.zeros(samples, 1, dtype=torch.float64)  # [n, w], log-probabilities, best first
    for length in range(1, max_length + 2):  # pieces of a hypothesis after this step, without begin
        if not len(alive):
            break
        total = scores[:, :, None] + _log_probabilities(predict, source, alive, prefix)
        if length > max_length:  # only the end may follow
            total[:, :, :end] = total[:, :, end + 1 :] = -torch.inf
        _, w, vocabulary = total.shape
        # Of 2 beam candidates at most w <= beam are ends, so enough others remain.
        scores, index = total.flatten(1).topk(min(2 * beam, w * vocabulary))
        origin, piece = index // vocabulary, index % vocabulary
        is_end = piece == end
        for row, rank in is_end[:, :beam].nonzero().tolist():
            sentence, score = int(alive[row]), float(scores[row, rank]) / penalty(length)
            ended[sentence] += 1
            if sentence not in best or score > best[sentence].score:
                best[sentence] = Hypothesis(prefix[row, int(origin[row, rank]), 1:].tolist(), score)
        others = is_end.int().argsort(dim=1, stable=True)[:, : min(beam, w * (vocabulary - 1))]
        scores, origin, piece = (part.gather(1, others) for part in (scores, origin, piece))
        prefix = _extended(prefix, origin, piece)
        unfinished = _unfinished(alive, scores[:, 0] / penalty(max_length + 1), best, ended, beam)
        alive, prefix, scores = alive[unfinished], prefix[unfinished], scores[unfinished]
    return [best[sentence] for sentence in range(samples)]


def _unfinished(
    alive: torch.Tensor, reachable: torch.Tensor, best: Mapping[int, Hypothesis], ended: list[int], beam: int
) -> list[int]:
    """Return the rows of ``alive`` whose sentences may still get a better hypothesis than the best ended one.

    ``reachable`` [n]: their best scores at the largest penalty. A log-probability only decreases.
    """
    rows = enumerate(zip(alive.tolist(), reachable.tolist()))
    return [n for n, (s, x) in rows if s not in best or (ended[s] < beam and not best[s].score >= x)]


def _extended(prefix: torch.Tensor, origin: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Return the prefixes [n, w, pieces] at ``origin`` [n, v], each with one more piece."""
    kept = prefix.gather(1, origin[:, :, None].expand(-1, -1, prefix.shape[2]))
    return torch.cat((kept, piece[:, :, None]), 2)


def penalty(length: int) -> float:
    """Return ((5 + length) / 6) ** 0.6 (equation 14), which divides a log-probability; ``length`` includes the end."""
    return float(((5 + length) / 6) ** 0.6)


@torch.no_grad()
def _log_probabilities(predict: Predict, source: Source, alive: Tensor, prefix: Tensor) -> Tensor:
    """Return the log-probabilities of the next piece, float64 [n, w, vocabulary]."""
    n, w, t = prefix.shape
    rows = alive.repeat_interleave(w)
    inputs = {name: part[rows.to(part.device)] for name, part in source.items()}
    target = prefix.flatten(0, 1).to(next(iter(inputs.values())).device)
    logits: Tensor = predict({**inputs, "target": target, "at": t - 1})
    return logits.cpu().double().log_softmax(-1).view(n, w, -1)
