"""Autograd's engine, entered directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(edges: Sequence[GradientEdge], grads: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` without its checks of shapes, which take as long as a small layer's backward.

    The gradients were made by autograd itself for these very outputs, so they fit. ``_engine_run_backward`` is torch's
    own entry for this, and private: the tests run it under the oldest and the newest torch that we support.
    """
    _engine_run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
