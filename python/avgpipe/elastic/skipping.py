"""Steps that an optimizer leaves out by itself, by a flag that only the device knows.

The protocol is that of torch.amp.GradScaler, for optimizers of torch with ``fused=True`` and for
:class:`avgpipe.ElasticAveraging`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FUSED = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of torch leaves a step out by itself, with all of its state as before."""
    if type(optimizer) not in _FUSED or not all(group["fused"] for group in optimizer.param_groups):
        return False
    # The first step of a momentum makes its memory, and would leave it without values.
    return not isinstance(optimizer, torch.optim.SGD) or all(
        not group["momentum"] or optimizer.state[p].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
    )


@contextmanager
def skipping(optimizer: Any, found_inf: torch.Tensor) -> Iterator[None]:
    """Have an optimizer leave out its step inside if ``found_inf``, float32 on its device, is 1."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
