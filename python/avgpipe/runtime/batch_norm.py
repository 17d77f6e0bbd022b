"""BatchNorm in a pipeline: micro-batches normalise themselves, whole batches update the running statistics.

The idea is that of torchgpipe's deferred batch normalisation (Kim et al. 2020, arXiv:2004.09910): evaluation
should read what training on one device gathers, which depends neither on the number of micro-batches nor on
how often a forward runs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from avgpipe.model.context import Position, position


class Moments(NamedTuple):
    """A layer's input in one micro-batch: values per channel, then [2, channels], mean and unbiased variance."""

    size: int
    values: torch.Tensor


_Seen: TypeAlias = "dict[tuple[DeferredBatchNorm, int], dict[int, Moments]]"


class BatchStatistics:
    """The moments that a stage's layers noted of batches in flight, by call in a forward and micro-batch."""

    def __init__(self) -> None:
        self.layers: list[DeferredBatchNorm] = []
        # Plain flags and lists, which torch.compile can include in its graph of a layer; positions in a run
        # it cannot.
        self.defers = False  # whether any batch is in flight
        self.notes = False  # whether a forward of one runs
        self._batches: defaultdict[int, _Seen] = defaultdict(dict)

    def begin_forward(self) -> None:
        self.notes = position().batch != -1
        self.defers = self.notes or bool(self._batches)
        for layer in self.layers:
            layer.seen.clear()

    def end_forward(self) -> None:
        """Keep what the layers noted of the micro-batch that :meth:`begin_forward` named.

        A forward that runs again, as in recomputation, notes the same values again.
        """
        _, batch, m = position()
        for layer in self.layers:
            for call, moments in enumerate(layer.seen):
                self._batches[batch].setdefault((layer, call), {})[m] = Moments(*moments)
            layer.seen.clear()
        self.notes = False

    def of(self, place: Position) -> list[tuple[DeferredBatchNorm, int, Moments]]:
        """Return what was noted of a micro-batch, for :meth:`put`."""
        seen, m = self._batches.get(place.batch, {}), place.micro_batch
        return [(*call, parts[m]) for call, parts in seen.items() if m in parts]

    def put(self, place: Position, noted: list[tuple[DeferredBatchNorm, int, Moments]]) -> None:
        for layer, call, moments in noted:
            self._batches[place.batch].setdefault((layer, call), {})[place.micro_batch] = moments

    def noted(self, batch: int) -> list[list[Any]]:
        """Return what was noted of a batch: layer's number, call, micro-batch, size and values."""
        seen = self._batches.get(batch, {})
        return [
            [layer.number, call, m, moments.size, moments.values]
            for (layer, call), parts in seen.items()
            for m, moments in parts.items()
        ]

    def add(self, batch: int, noted: list[list[Any]]) -> None:
        """Add what another replica noted of its micro-batches of a batch."""
        for number, call, m, size, values in noted:
            parts = self._batches[batch].setdefault((self.layers[number], call), {})
            parts[m] = Moments(size, values)

    def commit(self, batch: int, unless: torch.Tensor | None = None) -> None:
        """End a batch: update the running statistics, once for each call of a layer as one device does.

        ``unless``: keeps them if it is not 0, which only the device knows.
        """
        for (layer, _), parts in self._batches.pop(batch, {}).items():
            layer.move(*whole_batch([moments for _, moments in sorted(parts.items())]), unless)
        self.defers = bool(self._batches)

    def drop(self, batch: int) -> None:
        """End a batch that must not count."""
        self._batches.pop(batch, None)
        self.defers = bool(self._batches)


class DeferredBatchNorm(_BatchNorm):
    """A stage's BatchNorm, whose running statistics change once for each batch.

    In training, ``running_mean``, ``running_var`` and ``num_batches_tracked`` stay as they are until
    ``BatchStatistics.commit``. Outside of any pipeline, and in evaluation, it is the plain layer.
    """

    statistics: BatchStatistics
    number: int  # among the layers of ``statistics``
    seen: list[tuple[int, torch.Tensor]]  # like Moments, by call within the forward that is running

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.track_running_stats) or self.running_mean is None:
            return super().forward(input)
        if not self.statistics.defers:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        dtype = self.running_mean.dtype
        if dtype.itemsize < 4:
            # torch's statistics would be rounded to these buffers' 16 bits, too coarse to be combined.
            output = functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
            values = _moments(input.detach())
        else:
            # With momentum 1, running statistics are those of the input: torch has computed them anyway.
            values = torch.zeros(2, input.shape[1], dtype=dtype, device=input.device)
            mean, variance = values.unbind()
            output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        # Outside of a forward, in the middle of a batch, a layer recomputes by itself: it has been counted.
        if self.statistics.notes:
            self.seen.append((input.numel() // input.shape[1], values))
        return output

    @torch.no_grad()
    def move(self, mean: torch.Tensor, variance: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """Update the running statistics: a batch's ``mean`` and unbiased ``variance``, float64 [channels].

        ``unless``: see :meth:`BatchStatistics.commit`.
        """
        keeps = None if unless is None else unless.bool()
        factor: float | torch.Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1 if keeps is None else keeps.logical_not())
            if self.momentum is None:  # all batches count equally; computed on the device, without a wait
                factor = self.num_batches_tracked.double().reciprocal()
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                moved = torch.lerp(running.double(), batch, factor)
                running.copy_(moved if keeps is None else torch.where(keeps, running.double(), moved))


_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    kind: type(f"Deferred{kind.__name__}", (DeferredBatchNorm, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def defer_batch_norms(layers: nn.Module) -> BatchStatistics:
    """Turn the BatchNorms in ``layers`` into deferred ones, and return the object in which they note moments.

    Subclasses, such as SyncBatchNorm or a user's own, stay unchanged; layers that track nothing have nothing
    to defer.
    """
    statistics = BatchStatistics()
    for module in layers.modules():
        deferred = _DEFERRED.get(type(module))
        if deferred is not None and module.track_running_stats:
            # The object stays: its tensors, flags and hooks, and every place that holds it.
            module.__class__ = deferred
            module.__dict__["statistics"] = statistics
            module.__dict__["number"] = len(statistics.layers)
            module.__dict__["seen"] = []
            statistics.layers.append(cast(DeferredBatchNorm, module))
    return statistics


@torch.no_grad()
def whole_batch(parts: list[Moments]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased variance, float64, of a batch whose micro-batches have the moments ``parts``.

    With n_m values in micro-batch m and n in all (Chan, Golub, LeVeque 1979):
    mean = sum_m n_m mean_m / n,  variance = sum_m ((n_m - 1) variance_m + n_m (mean_m - mean)^2) / (n - 1).
    """
    if len(parts) == 1:
        mean, variance = parts[0].values.double().unbind()
        return mean, variance
    values = torch.stack([part.values for part in parts]).double()
    shares, within, between = _weights(tuple(part.size for part in parts), values.device)
    means, variances = values.unbind(1)
    mean = (shares * means).sum(0)
    return mean, torch.addcmul(within * variances, between, (means - mean).square()).sum(0)


@lru_cache(maxsize=64)  # every batch of a run needs the same, and a copy to a device is slow
def _weights(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return n_m / n, (n_m - 1) / (n - 1) and n_m / (n - 1), each [micro-batches, 1]."""
    n = sum(sizes)
    rows = [[c / n for c in sizes], [(c - 1) / (n - 1) for c in sizes], [c / (n - 1) for c in sizes]]
    return torch.tensor(rows, dtype=torch.float64, device=device).unsqueeze(-1).unbind()


def _moments(input: torch.Tensor) -> torch.Tensor:
    """Return the values of :class:`Moments`, of at least 32 bits."""
    dims = [0, *range(2, input.dim())]
    variance, mean = torch.var_mean(input.to(torch.promote_types(input.dtype, torch.float32)), dims)
    return torch.stack((mean, variance))
