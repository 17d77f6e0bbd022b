"""Text from a language model, one piece after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def generate(
    predict: Callable[[Any], Tensor],
    prompt: Tensor,
    *,
    length: int,
    window: int,
    temperature: float = 0.0,
    seed: int = 0,
    end: int | None = None,
    at: bool = True,
) -> Tensor:
    """Go on from a prompt.

    Args:
        predict: a model or ``Pipeline.predict``: of ``{"input_ids": x, "at": t}``, x int64 [b, T], to the logits of
            the piece after position t, [b, V]; or of all positions, [b, T, V], of which the last is used.
        prompt: int64 [b, T0], T0 at least 1.
        length: how many pieces to add.
        window: how many pieces the model can read; the last ones are given to it.
        temperature: 0 takes the likeliest piece, else it is drawn from softmax(logits / temperature).
        seed: of what is drawn; the caller's random state stays as it is.
        end: a row that has this piece is at its end: it goes on with it, and all stop when the last row has it.
        at: False for a model that takes x alone.

    Returns:
        int64 [b, T0 + n], the prompt and the n pieces added, n at most ``length``.

    Raises:
        ValueError: a number out of range, or a prompt of another shape.
        TypeError: a prompt that is not int64.
    """
    _check(prompt, length, window, temperature)
    draw = torch.Generator().manual_seed(seed)
    text = prompt
    ended = torch.zeros(prompt.shape[0], dtype=torch.bool)
    for _ in range(length):
        x = text[:, -window:]
        output = predict({"input_ids": x, "at": x.shape[1] - 1} if at else x)
        logits = output if output.dim() == 2 else output[:, -1]
        # in float64 and on the host: what is drawn is the same on every device
        following = _choose(logits.detach().to("cpu", torch.float64), temperature, draw)
        if end is not None:
            following[ended] = end
            ended |= following == end
        text = torch.cat([text, following.to(text.device)[:, None]], 1)
        if ended.all():
            break
    return text


def _choose(logits: Tensor, temperature: float, draw: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(1)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=draw)[:, 0]


def _check(prompt: Tensor, length: int, window: int, temperature: float) -> None:
    if prompt.dtype != torch.int64:
        raise TypeError(f"a prompt holds numbers of pieces, int64, got {prompt.dtype}")
    if prompt.dim() != 2 or prompt.shape[0] < 1 or prompt.shape[1] < 1:
        raise ValueError(f"a prompt must be [rows, pieces], one of each at least, got {list(prompt.shape)}")
    for name, value in (("length", length), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
