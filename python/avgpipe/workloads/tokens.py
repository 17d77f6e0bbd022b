"""What models of sequences of tokens share: initial weights, LSTMs, and loss and metrics per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a target that no loss counts


Uniform = Callable[..., nn.Parameter]  # of a shape and ``bound``: initial weights between -bound and bound


def uniform_from(seed: int) -> Uniform:
    """Return what draws initial weights, which depend on the seed alone; the caller's random state stays as it is."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def uniform(*shape: int, bound: float) -> nn.Parameter:
        weight = torch.empty(shape)
        # on the meta device there is nothing to draw, and its tensors would not take a CPU generator
        return nn.Parameter(weight if weight.is_meta else weight.uniform_(-bound, bound, generator=generator))

    return uniform


def run_lstm(
    x: Tensor, weights: list[Tensor], training: bool, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one LSTM layer over x [b, T, inputs] with the operator that nn.LSTM calls too.

    Args:
        x: the inputs.
        weights: input-to-hidden [4 hidden, inputs] and hidden-to-hidden [4 hidden, hidden] weights and both biases
            [4 hidden], the gates in torch's order: input, forget, cell, output. They may be masked or derived.
        training: whether a backward follows.
        state: h and c [1, b, hidden] to begin with; None: zero.

    Returns:
        The outputs [b, T, hidden], and the state after them.
    """
    if state is None:
        zero = x.new_zeros(1, x.shape[0], weights[1].shape[1])
        state = zero, zero
    output, h, c = torch.lstm(x, state, weights, True, 1, 0.0, training, False, True)
    return output, (h, c)


class LSTM(nn.Module):
    """One LSTM layer from a zero state, [b, T, inputs] to [b, T, hidden], with dropout of its input."""

    def __init__(self, inputs: int, hidden: int, uniform: Uniform, *, dropout: float = 0.0) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = uniform(4 * hidden, inputs, bound=bound)
        self.weight_hh = uniform(4 * hidden, hidden, bound=bound)
        self.bias_ih = uniform(4 * hidden, bound=bound)
        self.bias_hh = uniform(4 * hidden, bound=bound)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(x, self.dropout, self.training)
        return run_lstm(x, [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh], self.training)[0]


class Projection(nn.Module):
    """Features [..., n] to [..., m] by a weight [m, n], which may be another layer's too, and a bias [m]."""

    def __init__(self, weight: nn.Parameter, bias: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight, self.bias)


class TokenLoss(nn.Module):
    """Mean cross entropy in nats per token that counts, of logits [b, T, vocabulary] and targets int64 [b, T].

    Args:
        ignored: the target of tokens that do not count.
        smoothing: in training so much of each label's probability is spread over the vocabulary (Szegedy et al.,
            CVPR 2016, section 7).
    """

    def __init__(self, ignored: int = IGNORED, smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignored = ignored
        self.smoothing = smoothing

    def forward(self, output: Tensor, targets: Any) -> Tensor:
        return F.cross_entropy(
            at_least_float32(output).flatten(0, 1),
            targets.flatten(),
            ignore_index=self.ignored,
            label_smoothing=self.smoothing if self.training else 0.0,
        )

    def weight(self, targets: Any) -> float:
        """Return how many tokens the loss is the mean of."""
        return float((targets != self.ignored).sum())

    def correct(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return means per sample: tokens that count, and how many of them have the largest logit."""
        counted = targets != self.ignored
        correct = (output.argmax(-1) == targets) & counted
        return {"tokens": counted.sum() / len(targets), "correct": correct.sum() / len(targets)}


def token_metrics(loss: float, means: dict[str, float]) -> dict[str, float]:
    """Make the accuracy per token, in percent, from :meth:`TokenLoss.correct`, and the perplexity."""
    return {"perplexity": perplexity(loss), "accuracy": 100 * means["correct"] / means["tokens"]}


def at_least_float32(x: Tensor) -> Tensor:
    """Widen what autocast leaves with 8 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else (math.nan if math.isnan(loss) else math.inf)


def log_frequencies(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the logarithm of each token's share of a text, with one added to every count; float [vocabulary]."""
    counts = torch.bincount(tokens, minlength=vocabulary).double() + 1
    return (counts / counts.sum()).log().float()
