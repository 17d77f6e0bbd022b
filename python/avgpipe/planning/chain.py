"""From layers to stages: what a stage of consecutive layers takes, holds and costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from avgpipe.planning.costs import Costs, Each
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.schedule.schedule import Schedule
from avgpipe.units import format_bytes


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
        """Return the part of ``backward_s`` that makes the gradient of the stage's input."""
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
        """Return the part of ``backward_s`` that a batch's first micro-batch does without."""
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


# ---- memory of a worker --------------------------------------------------------------------------------------------


def stage_bytes(
    chain: Chain,
    first: int,
    last: int,
    *,
    in_flight: int,
    versions: int = 1,
    copies: int = 1,
    extra_copies: int = 0,
    recompute: bool = False,
    whole: int = 1,
) -> float:
    """Bytes of a worker with layers ``first`` to ``last`` - 1.

    in_flight: micro-batches between their forward and backward, of all copies. versions: of the weights, the newest
    included. copies: of the model, each with its weights, gradients and optimizer state. extra_copies: of the
    trained weights alone. recompute: micro-batches in flight hold their inputs, and ``whole`` of them at a time all
    the rest.
    """
    weights = chain.parameter_bytes(first, last)
    state = weights * (versions + 1) + chain.optimizer_bytes(first, last) + chain.frozen_bytes(first, last)
    held = chain.held_bytes(first, last)
    kept = in_flight * held
    if recompute:
        kept = in_flight * chain.input_bytes(first) + min(whole, in_flight) * (
            held - chain.input_bytes(first)
        )
    needed = copies * state + extra_copies * weights + kept + chain.working_bytes(first, last)
    return chain.profile.process_bytes + needed


def check_limit(limit: float | None) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(
            f"memory_limit_bytes={limit!r}: must be a number of bytes above 0, or None for no limit"
        )


def does_not_fit(limit: float, least: float, advice: str) -> ValueError:
    """``least``: the smallest limit with which a plan can be made."""
    least, limit = math.ceil(least), math.floor(limit)  # what is allowed then is enough
    return ValueError(
        f"memory_limit_bytes={limit:.0f}: nothing fits; the plan that needs least needs {least:.0f} bytes on one "
        f"worker, {least - limit:.0f} more ({format_bytes(least)} instead of {format_bytes(limit)}): "
        f"allow that, or {advice}"
    )


# ---- what a simulation is told -------------------------------------------------------------------------------------


RECOMPUTE = ("never", "except-last", "always")


def stage_costs(
    chain: Chain, bounds: Sequence[int], micro_batches: int, pipelines: int = 1, recompute: str = "never"
) -> Costs:
    """What a simulation takes, of the stages between ``bounds`` (first layer of each, then the number of layers).

    With several pipelines an update includes the averaging; recomputation puts the forward before the backward; the
    first backward of a batch finds no gradients to add to. The link's latency occupies nobody. Memory is not in it.
    """
    blocks = list(pairwise(bounds))
    again = recomputed(micro_batches, recompute)
    forward_s = [chain.forward_s(*block) for block in blocks]
    backward_s = [_backwards(chain, *block, micro_batches) for block in blocks]
    input_s = [chain.input_backward_s(*block) for block in blocks]
    latency_s = chain.link.latency_s if chain.link else 0.0
    return Costs(
        forward_s=forward_s,
        backward_s=_with_forward(backward_s, forward_s, again),
        transfer_s=[chain.outgoing_s(last) - latency_s for _, last in blocks[:-1]],
        latency_s=latency_s,
        update_s=[chain.update_s(*block, elastic=pipelines > 1) for block in blocks],
        input_backward_s=_with_forward(input_s, forward_s, again),
    )


def _backwards(chain: Chain, first: int, last: int, micro_batches: int) -> Each:
    """Per micro-batch where the first of a batch is quicker."""
    backward_s, added_s = chain.backward_s(first, last), chain.accumulate_s(first, last)
    return (backward_s - added_s, *[backward_s] * (micro_batches - 1)) if added_s else backward_s


def recomputed(micro_batches: int, recompute: str) -> list[bool]:
    """For each micro-batch, whether its backward begins with its forward."""
    return [recompute != "never"] * (micro_batches - 1) + [recompute == "always"]


def _with_forward(seconds: Sequence[Each], forward_s: Sequence[float], again: Sequence[bool]) -> list[Each]:
    """Where a micro-batch is computed again, its backward begins with its forward."""
    return [_added(cost, more_s, again) for cost, more_s in zip(seconds, forward_s)]


def _added(cost: Each, more_s: float, again: Sequence[bool]) -> Each:
    """Per micro-batch where they differ."""
    each = cost if isinstance(cost, tuple) else (cost,) * len(again)
    found = tuple(seconds + more_s if more else seconds for seconds, more in zip(each, again))
    return found[0] if len(set(found)) == 1 else found


def weight_versions(schedule: Schedule, weights: str) -> list[int]:
    """Per stage, how many versions of the weights are kept, the newest included; ``weights``: see ``Plan``."""
    if weights == "double-buffer":
        return [2] * schedule.stages
    # One for each batch that has micro-batches in flight.
    return [1 + max(schedule.rows[w].lookahead for w in workers) for workers in schedule.replicas]
