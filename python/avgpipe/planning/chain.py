"""The costs of stages of consecutive layers: their time and memory, from a profile of the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from avgpipe.planning.costs import Array, Costs
from avgpipe.planning.profile import OF_LAYERS, LayerCosts, LinkProfile, Profile
from avgpipe.schedule.schedule import Schedule
from avgpipe.units import format_bytes


class Chain:
    """The layers of ``profile`` for micro-batches of ``micro_batch_size`` samples, None: the largest measured size.

    Methods take a stage's first layer and the one after its last, as numbers or as arrays, and return the
    same shape. Seconds are of one micro-batch on one device, and include the runtime's time per action; bytes
    are of one worker.

    Attributes:
        layers: Number of layers.
        boundary_bytes: Before each layer and after the last, the bytes that cross there in one direction,
            with skips; 0 at both ends.
        transfer_s: Seconds of these transfers on ``link``; 0 without a link.
    """

    def __init__(
        self, profile: Profile, micro_batch_size: float | None = None, link: LinkProfile | None = None
    ) -> None:
        samples = profile.micro_batch_sizes[-1] if micro_batch_size is None else micro_batch_size
        if isinstance(samples, bool) or not isinstance(samples, (int, float)) or not samples > 0:
            raise ValueError(f"micro_batch_size={samples!r}: must be a number of samples above 0")
        self.profile, self.micro_batch_size, self.link = profile, samples, link
        self.layers = len(profile.layers)
        self.boundary_bytes = np.array([0.0, *profile.boundary_bytes(samples), 0.0])
        self.transfer_s = np.zeros(self.layers + 1)
        if link is not None:
            self.transfer_s[1:-1] = link.seconds(self.boundary_bytes[1:-1])
        columns = dict(zip(LayerCosts._fields, zip(*profile.at(samples))))
        columns |= {name: tuple(getattr(layer, name) for layer in profile.layers) for name in OF_LAYERS}
        self._sums = {name: np.cumsum([0.0, *column]) for name, column in columns.items()}
        self._handed_bytes = np.array([0.0, *columns["handed_bytes"][:-1], 0.0])
        self._layer_working_bytes = np.array(columns["working_bytes"])

    def _sum(self, name: str, first: Any, last: Any) -> Any:
        return self._sums[name][last] - self._sums[name][first]

    def forward_s(self, first: Any, last: Any) -> Any:
        return self._sum("forward_s", first, last) + self.profile.action_s

    def backward_s(self, first: Any, last: Any) -> Any:
        return self._sum("backward_s", first, last) + self.profile.action_s

    def input_backward_s(self, first: Any, last: Any) -> Any:
        """Return the part of ``backward_s`` that makes the gradient of the stage's input."""
        part = self._sum("input_backward_s", first, last) + self.profile.action_s / 2
        # Differences of sums may exceed the whole by a rounding error.
        return np.minimum(part, self.backward_s(first, last))

    def compute_s(self, first: Any, last: Any) -> Any:
        """Return the seconds of forward and backward."""
        return self.forward_s(first, last) + self.backward_s(first, last)

    def update_s(self, first: Any, last: Any, elastic: bool = False) -> Any:
        """Return the seconds of the optimizer's step; ``elastic``: with the averaging."""
        step_s = self._sum("update_s", first, last) + self.profile.step_s
        return step_s + self._sum("elastic_s", first, last) if elastic else step_s

    def accumulate_s(self, first: Any, last: Any) -> Any:
        """Return the part of ``backward_s`` that a batch's first micro-batch does not need."""
        # It is measured separately, so it may exceed the backward itself.
        most = self.backward_s(first, last) - self.input_backward_s(first, last)
        return np.minimum(self._sum("accumulate_s", first, last), most)

    def parameter_bytes(self, first: Any, last: Any) -> Any:
        """Return the bytes of trained weights; weights that several of the layers share count once."""
        return self._sum("parameter_bytes", first, last) - self._tied_bytes(first, last)[0]

    def optimizer_bytes(self, first: Any, last: Any) -> Any:
        return self._sum("optimizer_bytes", first, last) - self._tied_bytes(first, last)[1]

    def _tied_bytes(self, first: Any, last: Any) -> tuple[Any, Any]:
        """Return the parameter and optimizer bytes that layers count too often: all but the first of a tie."""
        weights = states = 0.0
        for tie in self.profile.ties:
            owner = self.profile.layers[tie.layers[0]]
            share = owner.optimizer_bytes / owner.parameter_bytes if owner.parameter_bytes else 0.0
            for one, other in pairwise(tie.layers):
                twice = tie.parameter_bytes * ((first <= one) & (other < last))
                weights, states = weights + twice, states + share * twice
        return weights, states

    def held_bytes(self, first: Any, last: Any) -> Any:
        """Return the bytes that a micro-batch in flight holds: kept values of the layers, and the stage's input."""
        kept = self._sum("held_bytes", first, last) + self.boundary_bytes[first]
        # The last layer's output is the next stage's input, not kept here.
        return np.maximum(0.0, kept - self._handed_bytes[last])

    @cached_property
    def _working_bytes(self) -> Array:
        """Return the most temporary bytes of a stage, by first layer and the one after the last."""
        found = np.zeros((self.layers + 1, self.layers + 1))
        for first in range(self.layers):
            np.maximum.accumulate(self._layer_working_bytes[first:], out=found[first, first + 1 :])
        return found

    def stage_bytes(
        self,
        first: Any,
        last: Any,
        *,
        in_flight: int = 1,
        versions: int = 1,
        copies: int = 1,
        states: int | None = None,
        extra_copies: int = 0,
        recompute: bool = False,
        whole: int = 1,
    ) -> Any:
        """Return the bytes of a worker with layers ``first`` to ``last`` - 1.

        Args:
            first: First layer.
            last: The one after the last.
            in_flight: Micro-batches between their forward and backward, of all copies.
            versions: Versions of the weights, the newest included.
            copies: Copies of the model, each with its weights and gradients.
            states: Optimizer states; None: one per copy.
            extra_copies: Copies of the trained weights alone.
            recompute: Whether micro-batches in flight hold their inputs only, except for ``whole`` of them at
                a time.
            whole: See ``recompute``.
        """
        weights = self.parameter_bytes(first, last)
        state = weights * (versions + 1) + self._sum("frozen_bytes", first, last)
        moments = (copies if states is None else states) * self.optimizer_bytes(first, last)
        whole = min(whole, in_flight) if recompute else in_flight
        kept = whole * self.held_bytes(first, last) + (in_flight - whole) * self.boundary_bytes[first]
        needed = copies * state + moments + extra_copies * weights + kept + self._working_bytes[first, last]
        return self.profile.process_bytes + needed


def limit_of(limit: float | None) -> float:
    """Return the bytes that an option ``memory_limit_bytes`` allows."""
    if limit is None:
        return math.inf
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(
            f"memory_limit_bytes={limit!r}: must be a number of bytes above 0, or None for no limit"
        )
    return limit


def does_not_fit(limit: float, least: float, advice: str) -> ValueError:
    """Return the error for plans that do not fit; ``least``: the smallest limit with which a plan is possible."""
    least, limit = math.ceil(least), math.floor(limit)  # so that the named limit is enough
    return ValueError(
        f"memory_limit_bytes={limit:.0f}: nothing fits; the smallest plan needs {least:.0f} bytes on one "
        f"worker, {least - limit:.0f} more ({format_bytes(least)} instead of {format_bytes(limit)}): "
        f"allow that, or {advice}"
    )


# ---- input of a simulation -----------------------------------------------------------------------------------------


def stage_costs(
    chain: Chain, bounds: Sequence[int], micro_batches: int, pipelines: int = 1, recompute: str = "never"
) -> Costs:
    """Return the costs for a simulation of the stages between ``bounds`` (first layer of each, then the layer count).

    With several pipelines an update includes the averaging; recomputation adds the forward to the backward;
    the first backward of a batch has no gradients to add to. The link's latency does not occupy the link.
    Memory is not included.
    """
    blocks = np.array(bounds[:-1]), np.array(bounds[1:])
    forward_s = chain.forward_s(*blocks)
    again_s = forward_s[:, None] * recomputed(micro_batches, recompute)
    less_s = chain.accumulate_s(*blocks)[:, None] * (np.arange(micro_batches) == 0)
    input_s = chain.input_backward_s(*blocks)[:, None]
    # A difference of differences may exceed its part by a rounding error.
    backward_s = np.maximum(chain.backward_s(*blocks)[:, None] - less_s, input_s)
    latency_s = chain.link.latency_s if chain.link else 0.0
    return Costs(
        forward_s=forward_s.tolist(),
        backward_s=_rows(backward_s + again_s),
        transfer_s=(chain.transfer_s[blocks[0][1:]] - latency_s).tolist(),
        latency_s=latency_s,
        update_s=chain.update_s(*blocks, elastic=pipelines > 1).tolist(),
        input_backward_s=_rows(input_s + again_s),
    )


def _rows(seconds: Array) -> list[float | list[float]]:
    """Return one number per stage, or one per micro-batch where they differ."""
    return [row[0] if row.count(row[0]) == len(row) else row for row in seconds.tolist()]


def recomputed(micro_batches: int, recompute: str) -> list[bool]:
    """Return for each micro-batch whether its backward begins with its forward."""
    return [recompute != "never"] * (micro_batches - 1) + [recompute == "always"]


def weight_versions(schedule: Schedule, weights: str) -> list[int]:
    """Return for each stage how many versions of the weights it keeps, with the newest; ``weights``: see ``Plan``."""
    if weights == "double-buffer":
        return [2] * schedule.stages
    # One for each batch that has micro-batches in flight; if each has a prediction, the newest in addition.
    ahead = [max(schedule.rows[w].lookahead for w in workers) for workers in schedule.replicas]
    return [1 + n + (weights == "predicted" and n > 0) for n in ahead]
