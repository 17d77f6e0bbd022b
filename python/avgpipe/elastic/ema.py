"""An exponential moving average of weights over updates, in memory laid out like theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class WeightAverage:
    """Averages flat weights by the rule of ``torch.optim.swa_utils``.

    The first update copies the weights; each later one moves the average by ``1 - decay`` of the way to them.

    Args:
        weights: the weights before the first update.
        decay: from 0 to 1.

    Attributes:
        flats: the average. Of weights in 16 bits it is float32, as small changes would be lost otherwise.
        updates: the number of updates in it.
    """

    def __init__(self, weights: Sequence[torch.Tensor], decay: float) -> None:
        self._share = 1 - decay
        self._dtypes = [flat.dtype for flat in weights]
        self.flats = [flat.detach().to(_wide(flat.dtype), copy=True) for flat in weights]
        self.updates = 0

    @property
    def weights(self) -> list[torch.Tensor]:
        """The average in the dtypes of the weights."""
        return [flat.to(dtype) for flat, dtype in zip(self.flats, self._dtypes)]

    @torch.no_grad()
    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Add the weights after an update."""
        if self.updates == 0:
            self.restart(weights)
        elif self.flats:
            values = [w.to(flat.dtype) for w, flat in zip(weights, self.flats)]
            torch._foreach_lerp_(self.flats, values, self._share)
        self.updates += 1

    @torch.no_grad()
    def restart(self, weights: Sequence[torch.Tensor]) -> None:
        """Start again at ``weights``."""
        self.updates = 0
        for flat, value in zip(self.flats, weights):
            flat.copy_(value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
