"""Finds another cut of a model during training, from the measured times of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from avgpipe.planning.chain import Chain
from avgpipe.planning.costs import Costs
from avgpipe.planning.cuts import CutSearch, Training
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile
from avgpipe.schedule import Schedule


class Rebalanced(NamedTuple):
    """The result of rebalancing. Seconds are simulated, of a batch in steady state.

    Attributes:
        boundaries: First layers of stages 1 to K-1 with which a batch takes least time.
        before_s: Seconds with the current cut.
        after_s: Seconds with this cut.
    """

    boundaries: tuple[int, ...]
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """Return the share of a batch's time that is saved, 0..1."""
        return 1 - self.after_s / self.before_s if self.before_s > 0 else 0.0


def rebalanced(
    profile: Profile, bounds: Sequence[int], measured: Costs, schedule: Schedule, pipelines: int, weights: str
) -> Rebalanced | None:
    """Find the best cut of a run; None if a measurement is missing.

    Args:
        profile: Profile of the layers, at the run's micro-batch size; it may be of other machines than the
            run's.
        bounds: First layer of each stage, then the number of layers.
        measured: Measured costs of the stages; backwards include recomputation.
        schedule: Schedule of the run.
        pipelines: Pipelines that share the workers.
        weights: See ``Plan``.
    """
    if not measured.of_stages(len(bounds) - 1).forward_s.all():
        return None
    layers = _scaled(profile, bounds, measured, pipelines)
    chain = Chain(
        replace(profile, layers=layers, action_s=0.0, step_s=0.0), link=_link(profile, bounds, measured)
    )
    # Without recomputation, which the measurements include.
    training = Training(chain, schedule, pipelines, "never", weights)
    cut, after_s, _ = CutSearch(training, None).best()
    return Rebalanced(tuple(cut), training.seconds(tuple(bounds[1:-1])), after_s)


def _scaled(
    profile: Profile, bounds: Sequence[int], measured: Costs, pipelines: int
) -> tuple[LayerProfile, ...]:
    """Return the layers with times scaled such that the stages take the measured times."""
    costs = measured.of_stages(len(bounds) - 1)
    found: list[LayerProfile] = []
    for k, (first, end) in enumerate(pairwise(bounds)):
        own = profile.layers[first:end]
        forward = _factor(costs.forward_s[k, 0], sum(layer.forward_s[-1] for layer in own))
        backward = _factor(costs.backward_s[k, 0], sum(layer.backward_s[-1] for layer in own))
        updates = [layer.update_s + (layer.elastic_s if pipelines > 1 else 0.0) for layer in own]
        update = _factor(costs.update_s[k], sum(updates))
        found += (
            replace(
                layer,
                forward_s=_times(layer.forward_s, forward),
                backward_s=_times(layer.backward_s, backward),
                input_backward_s=_times(layer.input_backward_s, backward),
                accumulate_s=layer.accumulate_s * backward,
                update_s=layer.update_s * update,
                elastic_s=layer.elastic_s * update,
            )
            for layer in own
        )
    return tuple(found)


def _factor(measured: float, profiled: float) -> float:
    return float(measured) / profiled if profiled > 0 else 1.0


def _times(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)


def _link(profile: Profile, bounds: Sequence[int], measured: Costs) -> LinkProfile | None:
    """Return the link by the measured messages; None if they take no time, as in shared memory."""
    sizes = profile.boundary_bytes(profile.micro_batch_sizes[-1])
    taken = measured.of_stages(len(bounds) - 1).transfer_s[:, 0]
    speeds = [
        sizes[first - 1] / float(s) for first, s in zip(bounds[1:-1], taken) if s > 0 and sizes[first - 1] > 0
    ]
    return LinkProfile(0.0, median(speeds)) if speeds else None
