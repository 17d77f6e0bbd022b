"""The costs of a model's layers, as a value: measured once, then read by partitioners, simulations and the tuner.

Pure data, without torch, so that plans can be made on machines without the model. A file is JSON with a row
per layer.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from avgpipe.files import dataclass_of, json_object, reading, write_atomically
from avgpipe.planning.costs import MOST_JITTER, number

_FORMAT = 1
OF_LAYERS = ("parameter_bytes", "optimizer_bytes", "frozen_bytes", "update_s", "elastic_s", "accumulate_s")


@dataclass(frozen=True)
class LayerProfile:
    """One layer. Tuples have an entry for each of ``Profile.micro_batch_sizes``; seconds and bytes of one micro-batch.

    Attributes:
        name: Name of the layer.
        forward_s: Seconds of a forward on the device; the last layer's includes the loss.
        backward_s: Seconds of a backward, likewise.
        input_backward_s: The part of ``backward_s`` for the gradient of the layer's input.
        held_bytes: Bytes kept from the forward to the backward, without weights and without those that the
            layer before counts as its output.
        output_bytes: Bytes of the output for the next layer.
        parameter_bytes: Bytes of trained weights.
        optimizer_bytes: Bytes of the optimizer's state.
        update_s: Seconds of the optimizer's step.
        elastic_s: Seconds that elastic averaging adds to it.
        frozen_bytes: Bytes of weights that are not trained, and of buffers.
        accumulate_s: The part of ``backward_s`` for adding to the weights' gradients, which the first
            micro-batch of a batch does not need.
        handed_bytes: The part of ``held_bytes`` that is output kept by later layers only, so that a stage
            that ends here does not hold it; () if unknown.
        working_bytes: The most temporary bytes of a forward or a backward of the layer, beyond those held
            before and after; one layer of a worker uses them at a time. () if unknown.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_backward_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    parameter_bytes: float
    optimizer_bytes: float = 0.0
    update_s: float = 0.0
    elastic_s: float = 0.0
    frozen_bytes: float = 0.0
    accumulate_s: float = 0.0
    handed_bytes: tuple[float, ...] = ()
    working_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Skip:
    """A value that layer ``target`` gets from layer ``source``, past the layers between.

    ``size_bytes``: Bytes for each of ``Profile.micro_batch_sizes``.
    """

    source: int
    target: int
    size_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Tie:
    """Parameters that several layers share; each layer counts their ``parameter_bytes``, but a stage has them once."""

    layers: tuple[int, ...]
    parameter_bytes: float


@dataclass(frozen=True)
class LinkProfile:
    """A link between two workers, in one direction: a message of B bytes takes latency_s + B / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: Any) -> Any:
        return self.latency_s + size_bytes / self.bytes_per_s


class LayerCosts(NamedTuple):
    """The costs of a layer at one micro-batch size; see :class:`LayerProfile`."""

    forward_s: float
    backward_s: float
    input_backward_s: float
    held_bytes: float
    output_bytes: float
    handed_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The costs of a model on a device.

    Attributes:
        model: Name of the model.
        device: Name of the device.
        micro_batch_sizes: Measured sizes in samples, ascending.
        layers: Layers in order, at least one.
        skips: Values used by later layers than the next, with their bytes.
        ties: Weights that several layers hold, with their bytes.
        second_lane: For each size, the speed of two pipelines that share the device relative to one, 1 (no
            gain) to 2.
        action_s: Seconds that the runtime adds to each forward and backward.
        process_bytes: Bytes of a worker without a model.
        step_s: Seconds of a stage's update that do not depend on its layers and are not counted in them, and
            other seconds per batch.
        link: Link between two workers, if known.
        reduction: The same for a sum over workers: each worker's send at a time takes latency_s, and its
            bytes bytes_per_s.
        jitter: Standard deviation over mean of an action's time, 0 to 0.25.

    Raises:
        ValueError: For an invalid number, with the layer's name.
        TypeError: For a value that is no number.
    """

    model: str
    device: str
    micro_batch_sizes: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    skips: tuple[Skip, ...] = ()
    ties: tuple[Tie, ...] = ()
    second_lane: tuple[float, ...] = ()
    action_s: float = 0.0
    process_bytes: float = 0.0
    step_s: float = 0.0
    link: LinkProfile | None = None
    reduction: LinkProfile | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        sizes = self.micro_batch_sizes
        if not sizes or any(type(b) is not int or b < 1 for b in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"micro_batch_sizes must rise from at least 1, got {list(sizes)}")
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        for n, layer in enumerate(self.layers):
            self._check_layer(f"layer {n} ({layer.name})", layer)
        for skip in self.skips:
            self._check_ends("skip", (skip.source, skip.target))
            self._check_row(f"skip {skip.source} to {skip.target}: size_bytes", skip.size_bytes)
        for tie in self.ties:
            self._check_ends("tie", tie.layers)
            number(f"tie {list(tie.layers)}: parameter_bytes", tie.parameter_bytes)
        if self.second_lane:
            self._check_row("second_lane", self.second_lane)
        for name in ("action_s", "process_bytes", "step_s"):
            number(name, getattr(self, name))
        if number("jitter", self.jitter) > MOST_JITTER:
            raise ValueError(f"jitter={self.jitter!r}: must be at most {MOST_JITTER}")
        for name in ("link", "reduction"):
            if (link := getattr(self, name)) is not None:
                number(f"{name}: latency_s", link.latency_s)
                if not number(f"{name}: bytes_per_s", link.bytes_per_s) > 0:
                    raise ValueError(f"{name}: bytes_per_s=0: must be above 0")

    def _check_layer(self, where: str, layer: LayerProfile) -> None:
        for name in LayerCosts._fields:
            if name not in LayerCosts._field_defaults or getattr(layer, name):
                self._check_row(f"{where}: {name}", getattr(layer, name))
        for name in OF_LAYERS:
            number(f"{where}: {name}", getattr(layer, name))
        for part, whole in zip(layer.input_backward_s, layer.backward_s):
            if part > whole:
                raise ValueError(
                    f"{where}: input_backward_s {part:g} is above backward_s {whole:g}, which includes it"
                )

    def _check_row(self, where: str, row: Sequence[float]) -> None:
        if len(row) != len(self.micro_batch_sizes):
            raise ValueError(
                f"{where} has {len(row)} entries for {len(self.micro_batch_sizes)} micro_batch_sizes"
            )
        for value in row:
            number(where, value)

    def _check_ends(self, what: str, layers: Sequence[int]) -> None:
        inside = set(layers) <= set(range(len(self.layers)))
        if len(layers) < 2 or list(layers) != sorted(set(layers)) or not inside:
            raise ValueError(
                f"{what} {list(layers)}: must name rising layers from 0 to {len(self.layers) - 1}"
            )

    # ---- at any micro-batch size ---------------------------------------------------------------------------------

    def at(self, samples: float) -> list[LayerCosts]:
        """Return each layer's costs of a micro-batch of ``samples``, by linear interpolation between measured sizes.

        Below the smallest size and above the largest the nearest two are extrapolated; nothing is below 0.
        """
        at = self._at(samples)
        return [
            LayerCosts(*(at(getattr(layer, name)) for name in LayerCosts._fields)) for layer in self.layers
        ]

    def boundary_bytes(self, samples: float) -> list[float]:
        """Return the bytes that cross each place between two layers: outputs of the layer before, and skips."""
        found = [layer.output_bytes for layer in self.at(samples)[:-1]]
        for skip in self.skips:
            for n in range(skip.source, skip.target):
                found[n] += self._at(samples)(skip.size_bytes)
        return found

    def lane_gain(self, samples: float) -> float:
        """Return the speed of two pipelines on a device relative to one; 1 if it was not measured."""
        return min(2.0, max(1.0, self._at(samples)(self.second_lane)))

    def _at(self, samples: float) -> Callable[[Sequence[float]], float]:
        """Make a function that evaluates a row of one entry per measured size; 0 for an empty row."""
        if not samples > 0:
            raise ValueError(f"a micro-batch has more than 0 samples, got {samples}")
        sizes = self.micro_batch_sizes
        low = min(max(bisect_right(sizes, samples) - 1, 0), max(len(sizes) - 2, 0))
        if len(sizes) == 1:
            return lambda row: float(row[0] * samples / sizes[0]) if row else 0.0
        share = (samples - sizes[low]) / (sizes[low + 1] - sizes[low])
        return lambda row: max(0.0, row[low] + share * (row[low + 1] - row[low])) if row else 0.0

    # ---- files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        values = {"format": _FORMAT, **asdict(self)}
        layers = values.pop("layers")
        head = json.dumps(values)[:-1]
        rows = ",\n    ".join(json.dumps(layer) for layer in layers)
        return f'{head},\n  "layers": [\n    {rows}\n  ]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Profile:
        values = json_object("a profile", text)
        if values.pop("format", None) != _FORMAT:
            raise ValueError(f"no profile of format {_FORMAT}: make a new one with avgpipe profile")
        for name, kind in (("layers", LayerProfile), ("skips", Skip), ("ties", Tie)):
            if name in values:
                values[name] = tuple(
                    dataclass_of(f"{name}[{n}]", kind, row) for n, row in enumerate(values[name])
                )
        for name in ("link", "reduction"):
            if values.get(name) is not None:
                values[name] = dataclass_of(name, LinkProfile, values[name])
        made: Profile = dataclass_of("profile", cls, values)
        return made

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        with reading(path) as text:
            return cls.from_json(text)
