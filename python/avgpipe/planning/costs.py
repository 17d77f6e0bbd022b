"""The costs of a schedule's actions: the input of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PerStage = float | Sequence[float]
PerMicroBatch = float | Sequence[float | Sequence[float]]
Link = tuple[int, int]
Array = NDArray[Any]

MOST_JITTER, MOST_FACTOR = 0.25, 1000.0
DEVIATION = 37837.2  # standard deviation of the sum of four uniform 16-bit numbers, at most 131070 off

_OF_BOUNDARIES = ("transfer_s", "gradient_transfer_s", "latency_s")  # one entry fewer than stages
_OF_MICRO_BATCHES = ("forward_s", "backward_s", "input_backward_s", "transfer_s", "gradient_transfer_s")
_OF_STAGES = ("update_s", "latency_s", "allreduce_s", "activation_bytes", "weight_bytes")


@dataclass(frozen=True)
class Costs:
    """Time and memory of a micro-batch on each stage, measured or assumed.

    Each is one number for all stages or one number per stage; sequences are kept as tuples. In forward_s,
    backward_s, input_backward_s, transfer_s and gradient_transfer_s a stage's entry may itself be a sequence,
    of one number per micro-batch. If both activation_bytes and weight_bytes are None, memory is not computed,
    and the Timeline has none; if one is None, it counts as 0.

    Attributes:
        forward_s: Seconds for which a forward occupies the stage's device.
        backward_s: Seconds for which a backward occupies it.
        transfer_s: Seconds for which one tensor, activation or gradient, is on the link between stages k and
            k+1; one number for all boundaries or K-1 of them. Between two stages of one worker, transfers
            take no time.
        activation_bytes: Bytes that a micro-batch holds from the start of its forward to the end of its
            backward.
        weight_bytes: Bytes that one pipeline always holds (weights, in as many versions as it needs,
            gradients, optimizer state).
        link_serial: True: a link carries one tensor at a time per direction, in order of completion; False:
            no contention. Each replica that sends has its own link.
        update_s: Seconds for which the update occupies the device.
        input_backward_s: The part of ``backward_s`` for the inputs if a schedule splits the backward; the
            part for the weights takes the rest. None: half.
        gradient_transfer_s: Seconds for which a gradient is on the link back. None: ``transfer_s``.
        latency_s: Seconds per boundary from leaving the link to arrival. They do not occupy the link for the
            next tensor.
        shared_links: Groups of links, each a pair of neighbouring stages (from, to), that together carry one
            tensor at a time, in order of completion (at the same instant the lower worker's first):
            ``[[(0, 1), (2, 3)]]`` if two boundaries leave a machine through one network card. Needs
            ``link_serial``.
        allreduce_s: Seconds, for a stage with replicas, from the end of its last backward of a batch until
            the update may start, without sums that overlap with that backward. It occupies neither device nor
            link: other pipelines continue meanwhile. A backward's part for the weights counts as a backward.
        concurrency_gain: The speed of a device with 1, 2, ... actions at once, of different pipelines,
            relative to one action; each of s actions runs at gain[s-1] / s of its speed alone. The number of
            entries is the most actions at once: (1.0,) one; (1.0, 1.3) two, which together are 30 % faster.
            The first is 1; none is above its count. A device starts the next action as soon as it is ready,
            though both are then slower.
        jitter: Standard deviation, up to 0.25, of the random factor around 1 for the time of each action and
            transfer: the sum of four uniform numbers, at most 3.47 standard deviations from its mean.
        stragglers: (probability, factor): in addition to the jitter, each action and transfer independently
            takes ``factor`` times as long with this probability. None: no stragglers.
        seed: Seed of both. A factor depends on the action's stage, batch, micro-batch and kind: it is the
            same on every machine, under every schedule and with any other pipelines.

    Raises:
        TypeError: For a value that is no number.
        ValueError: For negative or infinite numbers, for empty sequences, and for an input_backward_s above backward_s.
    """

    forward_s: PerMicroBatch
    backward_s: PerMicroBatch
    transfer_s: PerMicroBatch = 0.0
    activation_bytes: PerStage | None = None
    weight_bytes: PerStage | None = None
    link_serial: bool = True
    update_s: PerStage = field(default=0.0, kw_only=True)
    input_backward_s: PerMicroBatch | None = field(default=None, kw_only=True)
    gradient_transfer_s: PerMicroBatch | None = field(default=None, kw_only=True)
    latency_s: PerStage = field(default=0.0, kw_only=True)
    shared_links: Sequence[Sequence[Link]] = field(default=(), kw_only=True)
    allreduce_s: PerStage = field(default=0.0, kw_only=True)
    concurrency_gain: Sequence[float] = field(default=(1.0,), kw_only=True)
    jitter: float = field(default=0.0, kw_only=True)
    stragglers: tuple[float, float] | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*_OF_MICRO_BATCHES, *_OF_STAGES):
            value, per = getattr(self, name), ("stage", "micro-batch")[: 1 + (name in _OF_MICRO_BATCHES)]
            # Only options whose default is None may be None.
            if value is not None or type(self).__dataclass_fields__[name].default is not None:
                object.__setattr__(self, name, _checked(name, value, *per))
        if not isinstance(self.link_serial, bool):
            raise TypeError(f"link_serial={self.link_serial!r}: must be True or False")
        object.__setattr__(self, "shared_links", _checked_groups(self.shared_links, self.link_serial))
        object.__setattr__(self, "concurrency_gain", _checked_gain(self.concurrency_gain))
        object.__setattr__(self, "stragglers", _checked_stragglers(self.stragglers))
        if number("jitter", self.jitter) > MOST_JITTER:
            raise ValueError(
                f"jitter={self.jitter!r}: must be at most {MOST_JITTER}, use stragglers for rarer delays"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed!r}: must be an int from 0 to 2**64 - 1")

    def of_stages(self, stages: int, micro_batches: int | None = None) -> StageCosts:
        """Return the costs with one entry per stage and per boundary; ValueError for sequences of another length.

        ``micro_batches``: Micro-batches of a batch; needed where an entry has one number for each.
        """
        found = {
            name: self._spread(name, stages, micro_batches) for name in (*_OF_MICRO_BATCHES, *_OF_STAGES)
        }
        if self.input_backward_s is None:
            found["input_backward_s"] = found["backward_s"] / 2
        above = np.argwhere((found["input_backward_s"] > found["backward_s"]).any(axis=1))
        if len(above):
            k = int(above[0, 0])
            part, whole = (_text(found[name][k]) for name in ("input_backward_s", "backward_s"))
            raise ValueError(
                f"input_backward_s={part} on stage {k} is above backward_s={whole}, which includes it: give backward_s "
                "the sum of both parts"
            )
        if self.gradient_transfer_s is None:
            found["gradient_transfer_s"] = found["transfer_s"]
        return StageCosts(
            **{name: found[name] for name in _OF_MICRO_BATCHES},
            **{name: found[name][:, 0] for name in _OF_STAGES},
            channels=self._channels(stages),
            shared_channels=frozenset(_number_of(group[0]) for group in self.shared_links if group),
        )

    def _spread(self, name: str, stages: int, micro_batches: int | None) -> Array:
        """Return a row per stage or boundary, with a column per micro-batch, or one for all."""
        value = getattr(self, name)
        count, places = (stages - 1, "boundaries") if name in _OF_BOUNDARIES else (stages, "stages")
        if not isinstance(value, tuple):
            return np.full((count, 1), value or 0.0)
        if len(value) != count:
            raise ValueError(
                f"{name} has {len(value)} entries for {count} {places}: give {count}, or one number for all"
            )
        for k, entry in enumerate(value):
            if isinstance(entry, tuple) and len(entry) != micro_batches:
                raise ValueError(
                    f"{name}[{k}] has {len(entry)} entries for {micro_batches or 'an unknown number of'} "
                    "micro-batches: give one for each, or one number for all"
                )
        if not any(isinstance(entry, tuple) for entry in value):
            return np.array(value, dtype=np.float64).reshape(count, 1)
        return np.array([np.broadcast_to(entry, micro_batches or 1) for entry in value])

    @property
    def has_memory(self) -> bool:
        return self.activation_bytes is not None or self.weight_bytes is not None

    def on_devices(self, speeds: Sequence[float]) -> Costs:
        """Return the costs of the same stages on devices with relative ``speeds``; costs must be per stage."""
        found: dict[str, Any] = {
            name: [np.divide(cost, speed) for cost, speed in zip(getattr(self, name), speeds)]
            for name in ("forward_s", "backward_s", "input_backward_s", "update_s")
        }
        return replace(self, **found)

    @property
    def greatest_factor(self) -> float:
        """Return the greatest factor that a time is multiplied by."""
        return (1 + 131070 / DEVIATION * self.jitter) * (self.stragglers or (0.0, 1.0))[1]

    def _channels(self, stages: int) -> list[int]:
        """Return the number of each link's channel, link 2k from stage k and 2k+1 back to it; -1 without contention."""
        if not self.link_serial:
            return [-1] * (2 * (stages - 1))
        channels = list(range(2 * (stages - 1)))
        for group in self.shared_links:
            for link in group:
                if _number_of(link) >= len(channels):
                    raise ValueError(f"shared_links has {link!r} for {stages} stages, 0..{stages - 1}")
                channels[_number_of(link)] = _number_of(group[0])
        return channels


class StageCosts(NamedTuple):
    """:class:`Costs` with a row per stage; transfers and latency have one per boundary.

    The first five have a column per micro-batch, or one for all.
    """

    forward_s: Array
    backward_s: Array
    input_backward_s: Array
    transfer_s: Array
    gradient_transfer_s: Array
    update_s: Array
    latency_s: Array
    allreduce_s: Array
    activation_bytes: Array
    weight_bytes: Array
    channels: list[int]
    shared_channels: frozenset[int]  # channels that all senders share

    def seconds(self, kind: str) -> Array:
        """Return for how long actions of this kind occupy the device, by stage and micro-batch."""
        if kind == "W":
            return self.backward_s - self.input_backward_s
        if kind == "U":
            return self.update_s[:, None]
        return {"F": self.forward_s, "B": self.backward_s, "I": self.input_backward_s}[kind]


def _text(cost: Array) -> str:
    """Format as one number if all are equal."""
    each = [f"{s:g}" for s in cost.tolist()]
    return each[0] if len(set(each)) == 1 else f"[{', '.join(each)}]"


def _checked(name: str, value: Any, *per: str) -> Any:
    """Return a number of at least 0, or a tuple of them, one per item named in ``per``; TypeError, ValueError."""
    if not per or isinstance(value, (str, Real)) or not isinstance(value, Iterable):
        return number(name, value, f", or a list of one number per {per[0]}" if per else "")
    entries = tuple(_checked(f"{name}[{n}]", entry, *per[1:]) for n, entry in enumerate(value))
    if not entries and name not in _OF_BOUNDARIES:  # one stage has none
        raise ValueError(f"{name} is empty: give a number, or a list of one number per {per[0]}")
    return entries


def number(name: str, value: Any, more: str = "") -> float:
    """Return a finite number of at least 0; the TypeError says that it must be a number, then ``more``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number{more}")
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        found = math.inf
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
    return found


def _number_of(link: Link) -> int:
    """Return the link's number in the engine."""
    source, to = link
    return 2 * source if to > source else 2 * to + 1


def _checked_groups(groups: Any, link_serial: bool) -> tuple[tuple[Link, ...], ...]:
    wanted = "give lists of (from, to), neighbouring stages, as [[(0, 1), (2, 3)]]"
    try:
        found = tuple(tuple((source, to) for source, to in group) for group in groups)
    except (TypeError, ValueError):
        raise TypeError(f"shared_links={groups!r}: {wanted}") from None
    links = [link for group in found for link in group]
    for link in links:
        if not all(type(k) is int and k >= 0 for k in link) or abs(link[0] - link[1]) != 1:
            raise ValueError(f"shared_links has {link!r}: {wanted}")
        if links.count(link) > 1:
            raise ValueError(f"shared_links has {link!r} twice: a link is in one group, once")
    if links and not link_serial:
        raise ValueError("shared_links with link_serial=False: links without contention share nothing")
    return found


def _checked_gain(gain: Any) -> tuple[float, ...]:
    if isinstance(gain, (str, bytes)) or not hasattr(gain, "__iter__"):
        raise TypeError(f"concurrency_gain={gain!r}: give a list of numbers, (1.0,) for one action at a time")
    found = tuple(number(f"concurrency_gain[{s}]", value) for s, value in enumerate(gain))
    if found[:1] != (1.0,):
        raise ValueError(f"concurrency_gain={gain!r}: must begin with 1, the speed of an action alone")
    for count, value in enumerate(found, start=1):
        if not 0.001 <= value <= count:
            raise ValueError(
                f"concurrency_gain[{count - 1}]={value:g}: {count} actions reach between 0.001 and {count} times the "
                "speed of one alone"
            )
    return found


def _checked_stragglers(stragglers: Any) -> tuple[float, float] | None:
    if stragglers is None:
        return None
    if not isinstance(stragglers, (tuple, list)) or len(stragglers) != 2:
        raise TypeError(f"stragglers={stragglers!r}: give (probability, factor), or None")
    probability, factor = (number(f"stragglers[{n}]", value) for n, value in enumerate(stragglers))
    if probability > 1:
        raise ValueError(f"stragglers[0]={probability:g}: a probability is at most 1")
    if not 1 <= factor <= MOST_FACTOR:
        raise ValueError(f"stragglers[1]={factor:g}: must be between 1 and {MOST_FACTOR:g}")
    return probability, factor
