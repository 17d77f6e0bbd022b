"""A profile at one micro-batch size: what any run of its layers costs, in constant time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from avgpipe.planning.profile import LinkProfile, Profile


class Shared(NamedTuple):
    """Parameters of several layers, which a stage has once; bytes of each of them."""

    layers: tuple[int, ...]
    parameter_bytes: float
    optimizer_bytes: float


class Chain:
    """The layers of ``profile`` for micro-batches of ``micro_batch_size`` samples.

    Methods take a stage's first layer and the one after its last. Seconds are of one micro-batch on one device, and
    include what the runtime adds to each action; bytes are of one worker.

    boundary_bytes, transfer_s: for each place between two layers, what crosses it in one direction, skips included,
    and how long that takes on ``link``; without a link no time.
    """

    def __init__(self, profile: Profile, micro_batch_size: float, link: LinkProfile | None = None) -> None:
        layers = profile.layers
        costs = profile.at(micro_batch_size)
        self.profile, self.micro_batch_size, self.link = profile, micro_batch_size, link
        self.layers = len(layers)
        self.boundary_bytes = profile.boundary_bytes(micro_batch_size)
        self.transfer_s = [link.seconds(size) if link else 0.0 for size in self.boundary_bytes]
        self._forward_s = _sums(layer.forward_s for layer in costs)
        self._backward_s = _sums(layer.backward_s for layer in costs)
        self._input_backward_s = _sums(layer.input_backward_s for layer in costs)
        self._held_bytes = _sums(layer.held_bytes for layer in costs)
        self._handed_bytes = [layer.handed_bytes for layer in costs]
        self._working_bytes = [layer.working_bytes for layer in costs]
        self._update_s = _sums(layer.update_s for layer in layers)
        self._elastic_s = _sums(layer.elastic_s for layer in layers)
        self._accumulate_s = _sums(layer.accumulate_s for layer in layers)
        self._parameter_bytes = _sums(layer.parameter_bytes for layer in layers)
        self._optimizer_bytes = _sums(layer.optimizer_bytes for layer in layers)
        self._frozen_bytes = _sums(layer.frozen_bytes for layer in layers)
        self._shared = [_shared(profile, tie.layers, tie.parameter_bytes) for tie in profile.ties]

    def forward_s(self, first: int, last: int) -> float:
        return self._forward_s[last] - self._forward_s[first] + self.profile.action_s

    def backward_s(self, first: int, last: int) -> float:
        return self._backward_s[last] - self._backward_s[first] + self.profile.action_s

    def input_backward_s(self, first: int, last: int) -> float:
        """Of ``backward_s``, the part that makes the gradient of the stage's input."""
        part = self._input_backward_s[last] - self._input_backward_s[first] + self.profile.action_s / 2
        # Differences of sums may end a rounding error above the whole.
        return min(part, self.backward_s(first, last))

    def compute_s(self, first: int, last: int) -> float:
        """Forward and backward."""
        return self.forward_s(first, last) + self.backward_s(first, last)

    def update_s(self, first: int, last: int, elastic: bool = False) -> float:
        """The optimizer's step; ``elastic``: and the averaging."""
        step_s = self._update_s[last] - self._update_s[first] + self.profile.step_s
        return step_s + (self._elastic_s[last] - self._elastic_s[first] if elastic else 0.0)

    def accumulate_s(self, first: int, last: int) -> float:
        """Of ``backward_s``, what a batch's first micro-batch does without."""
        added_s = self._accumulate_s[last] - self._accumulate_s[first]
        # Measured apart, it may come out as more than the backward itself.
        return min(added_s, self.backward_s(first, last) - self.input_backward_s(first, last))

    def parameter_bytes(self, first: int, last: int) -> float:
        """Trained weights; what several of the layers share counts once."""
        total = self._parameter_bytes[last] - self._parameter_bytes[first]
        return total - sum(_repeats(s, first, last) * s.parameter_bytes for s in self._shared)

    def optimizer_bytes(self, first: int, last: int) -> float:
        total = self._optimizer_bytes[last] - self._optimizer_bytes[first]
        return total - sum(_repeats(s, first, last) * s.optimizer_bytes for s in self._shared)

    def frozen_bytes(self, first: int, last: int) -> float:
        """Weights that are not trained, and buffers."""
        return self._frozen_bytes[last] - self._frozen_bytes[first]

    def input_bytes(self, first: int) -> float:
        """What a stage that begins with layer ``first`` gets from the one before; 0 for the first stage."""
        return self.boundary_bytes[first - 1] if first else 0.0

    def held_bytes(self, first: int, last: int) -> float:
        """What a micro-batch in flight holds: the values that the layers keep, and the stage's input."""
        kept = self._held_bytes[last] - self._held_bytes[first] + self.input_bytes(first)
        if last < self.layers:
            kept -= self._handed_bytes[last - 1]  # the next stage's input, not kept here
        return max(0.0, kept)

    def working_bytes(self, first: int, last: int) -> float:
        """What the stage needs for a moment, whichever of its layers is at work."""
        return max(self._working_bytes[first:last])

    def incoming_s(self, first: int) -> float:
        """The transfer of a micro-batch's activation to a stage that begins with layer ``first``."""
        return self.transfer_s[first - 1] if first else 0.0

    def outgoing_s(self, last: int) -> float:
        """The transfer behind layer ``last`` - 1, in either direction; 0 behind the model's last layer."""
        return self.transfer_s[last - 1] if last < self.layers else 0.0


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _shared(profile: Profile, layers: tuple[int, ...], parameter_bytes: float) -> Shared:
    """With its optimizer state: the share that the first layer's parameters have of that layer's."""
    layer = profile.layers[layers[0]]
    per_byte = layer.optimizer_bytes / layer.parameter_bytes if layer.parameter_bytes else 0.0
    return Shared(layers, parameter_bytes, parameter_bytes * per_byte)


def _repeats(shared: Shared, first: int, last: int) -> int:
    here = bisect_left(shared.layers, last) - bisect_left(shared.layers, first)
    return max(0, here - 1)
