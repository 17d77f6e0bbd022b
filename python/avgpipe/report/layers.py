"""Draws a profile with matplotlib: a row per layer, its seconds beside its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from avgpipe.timeline.plot import INK, dress, picture
from avgpipe.units import time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from avgpipe.planning.profile import Profile

_ROW_IN, _FRAME_IN, _MOST_IN = 0.27, 1.5, 40.0
_LABELS = 120  # more are thinned out


class _Series(NamedTuple):
    name: str
    color: str
    values: list[float]


def plot_layers(
    profile: Profile, path: str | os.PathLike[str] | None = None, *, samples: float | None = None
) -> Figure:
    """The figure, written to ``path`` in the format of its suffix if given. Without pyplot: no display.

    samples: of the micro-batch that is drawn; None: of the largest that was measured.
    """
    size = profile.micro_batch_sizes[-1] if samples is None else samples
    names = [layer.name for layer in profile.layers]
    with picture(path, 13.0, min(_MOST_IN, _FRAME_IN + _ROW_IN * len(names))) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        seconds = _seconds(profile, size)
        unit, per_s = time_unit(max(map(sum, zip(*(s.values for s in seconds)))))
        _draw(left, seconds, per_s, f"time of a micro-batch, and of an update ({unit})")
        _draw(right, _bytes(profile, size), 2.0**-20, "bytes of a micro-batch, and of the layer (MiB)")
        places = range(0, len(names), -(-len(names) // _LABELS))
        left.set_yticks(places, [names[n] for n in places], fontsize=7.5, color=INK)
        heading = f"{profile.model}, micro-batches of {size:g}; {profile.device}"
        figure.suptitle(heading, fontsize=10, color=INK)
    return figure


def _seconds(profile: Profile, samples: float) -> list[_Series]:
    costs = profile.at(samples)
    return [
        _Series("forward", "#b5d4f0", [c.forward_s for c in costs]),
        _Series("backward, inputs", "#2a6fb0", [c.input_backward_s for c in costs]),
        _Series("backward, weights", "#7fa8d1", [c.backward_s - c.input_backward_s for c in costs]),
        _Series("update", "#d9780f", [layer.update_s for layer in profile.layers]),
        _Series("averaging", "#fcd9a4", [layer.elastic_s for layer in profile.layers]),
    ]


def _bytes(profile: Profile, samples: float) -> list[_Series]:
    costs = profile.at(samples)
    return [
        _Series("held for the backward", "#1b8a63", [c.held_bytes for c in costs]),
        _Series("output", "#b0e0cc", [c.output_bytes for c in costs]),
        _Series("parameters", "#7c6a4c", [layer.parameter_bytes for layer in profile.layers]),
        _Series("optimizer's state", "#d8d0c1", [layer.optimizer_bytes for layer in profile.layers]),
    ]


def _draw(axes: Axes, series: Sequence[_Series], scale: float, label: str) -> None:
    """Bars from the first layer down, one series behind the other."""
    layers = len(series[0].values)
    reached = [0.0] * layers
    for name, color, values in series:
        widths = [scale * value for value in values]
        axes.barh(range(layers), widths, left=reached, height=0.74, color=color, label=name)
        reached = [a + b for a, b in zip(reached, widths)]
    axes.set_ylim(layers - 0.4, -0.6)
    axes.set_xlim(0, max(reached) * 1.02 or 1.0)
    axes.set_xlabel(label, fontsize=8.5, color=INK)
    dress(axes, without=("top", "right", "left"), grid="x")
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.legend(fontsize=7.5, frameon=False, ncols=len(series), loc="lower left", bbox_to_anchor=(0, 1))
