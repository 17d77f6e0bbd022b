"""What the actions of a schedule cost: the input of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

Link = tuple[int, int]


@dataclass(frozen=True)
class Costs:
    """Time and memory of a micro-batch on each stage, from measuring or as a question "what if".

    Each is one number for all stages or one number per stage; sequences are kept as tuples.

    - forward_s, backward_s: seconds that F and B occupy the stage's device.
    - transfer_s: seconds that one tensor, activation or gradient, is on the link between stages k and k+1; one
      number for all boundaries or K-1 of them. Between two stages of one worker it takes no time, whatever is said.
    - activation_bytes: what a micro-batch holds from the start of its forward to the end of its backward.
    - weight_bytes: what one pipeline holds all the time (weights, in as many versions as it needs, gradients,
      optimizer state).
      Both None: memory is not asked for, and the Timeline has none. One None: it counts as 0.
    - link_serial: True: a link carries one tensor at a time per direction, in order of completion; False: no
      contention.
    - update_s: seconds that the update U occupies the device.
    - input_backward_s: of ``backward_s``, the part of I where a schedule splits the backward; W takes the rest.
      None: half.
    - latency_s: per boundary, from leaving the link to being there. It occupies nothing: the next tensor follows.
    - shared_links: groups of links, each a pair of neighbouring stages (from, to), that together carry one tensor at a
      time, in order of completion (at the same instant the lower stage's first): ``[[(0, 1), (2, 3)]]`` where two
      boundaries leave a machine by one network card. Needs ``link_serial``.

    Raises TypeError for what is no number, ValueError for negative or infinite ones, for empty sequences, for an
    input_backward_s above backward_s and for links that are not there.
    """

    forward_s: float | Sequence[float]
    backward_s: float | Sequence[float]
    transfer_s: float | Sequence[float] = 0.0
    activation_bytes: float | Sequence[float] | None = None
    weight_bytes: float | Sequence[float] | None = None
    link_serial: bool = True
    update_s: float | Sequence[float] = field(default=0.0, kw_only=True)
    input_backward_s: float | Sequence[float] | None = field(default=None, kw_only=True)
    latency_s: float | Sequence[float] = field(default=0.0, kw_only=True)
    shared_links: Sequence[Sequence[Link]] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "transfer_s", "update_s", "latency_s"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        for name in ("activation_bytes", "weight_bytes", "input_backward_s"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if not isinstance(self.link_serial, bool):
            raise TypeError(f"link_serial={self.link_serial!r}: must be True or False")
        object.__setattr__(self, "shared_links", _checked_groups(self.shared_links, self.link_serial))

    def of_stages(self, stages: int) -> StageCosts:
        """The same with one number per stage and per boundary; ValueError for sequences of another length."""
        backward_s = _spread("backward_s", self.backward_s, stages)
        if self.input_backward_s is None:
            input_backward_s = [seconds / 2 for seconds in backward_s]
        else:
            input_backward_s = _spread("input_backward_s", self.input_backward_s, stages)
        for k, (part, whole) in enumerate(zip(input_backward_s, backward_s)):
            if part > whole:
                raise ValueError(
                    f"input_backward_s={part:g} on stage {k} is above backward_s={whole:g}, which includes it: "
                    "give backward_s the sum of both parts"
                )
        asked = self.activation_bytes is not None or self.weight_bytes is not None
        return StageCosts(
            _spread("forward_s", self.forward_s, stages),
            backward_s,
            input_backward_s,
            _spread("update_s", self.update_s, stages),
            _spread("transfer_s", self.transfer_s, stages - 1, "boundaries"),
            _spread("activation_bytes", self.activation_bytes or 0.0, stages) if asked else None,
            _spread("weight_bytes", self.weight_bytes or 0.0, stages) if asked else None,
            self.link_serial,
            _spread("latency_s", self.latency_s, stages - 1, "boundaries"),
            self._channels(stages),
        )

    def _channels(self, stages: int) -> list[int]:
        """What each link is part of: the group that shares it, or a channel of its own."""
        channels = list(range(2 * (stages - 1)))
        for group in self.shared_links:
            numbers = []
            for source, to in group:
                if max(source, to) >= stages:
                    raise ValueError(f"shared_links has {(source, to)} for {stages} stages, 0..{stages - 1}")
                numbers.append(2 * source if source < to else 2 * to + 1)
            for number in numbers:
                channels[number] = numbers[0]
        return channels


class StageCosts(NamedTuple):
    """:class:`Costs` with one number per stage, ``transfer_s`` and ``latency_s`` with one per boundary. ``channels``:
    per link, 2k from stage k to k+1 and 2k+1 back; links of one channel share it.
    """

    forward_s: list[float]
    backward_s: list[float]
    input_backward_s: list[float]
    update_s: list[float]
    transfer_s: list[float]
    activation_bytes: list[float] | None
    weight_bytes: list[float] | None
    link_serial: bool
    latency_s: list[float]
    channels: list[int]

    def seconds(self, kind: str, stage: int) -> float:
        """How long an action of this kind occupies the stage's device."""
        if kind == "W":
            return self.backward_s[stage] - self.input_backward_s[stage]
        of_kind = {
            "F": self.forward_s,
            "B": self.backward_s,
            "I": self.input_backward_s,
            "U": self.update_s,
        }
        return of_kind[kind][stage]

    def memory_bytes(
        self, held_bytes: Sequence[float], placement: Sequence[Sequence[int]], pipelines: int
    ) -> list[int] | None:
        """Per worker, the bytes of all pipelines' weights of its stages and of the micro-batches in flight."""
        if self.weight_bytes is None:
            return None
        weights = [sum(self.weight_bytes[k] for k in stages) for stages in placement]
        return [math.ceil(held + pipelines * weight) for held, weight in zip(held_bytes, weights)]


def _checked(name: str, value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Real):
        return _number(name, value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r}: must be a number, or a list of one number per stage")
    numbers = tuple(_number(f"{name}[{k}]", entry) for k, entry in enumerate(value))
    if not numbers and name not in ("transfer_s", "latency_s"):  # one stage has no boundary
        raise ValueError(f"{name} is empty: give a number, or a list of one number per stage")
    return numbers


def _checked_groups(groups: Any, link_serial: bool) -> tuple[tuple[Link, ...], ...]:
    wanted = "give lists of (from, to), neighbouring stages, as [[(0, 1), (2, 3)]]"
    try:
        found = tuple(tuple((source, to) for source, to in group) for group in groups)
    except (TypeError, ValueError):
        raise TypeError(f"shared_links={groups!r}: {wanted}") from None
    seen: set[Link] = set()
    for group in found:
        for link in group:
            if not all(type(k) is int and k >= 0 for k in link) or abs(link[0] - link[1]) != 1:
                raise ValueError(f"shared_links has {link!r}: {wanted}")
            if link in seen:
                raise ValueError(f"shared_links has {link!r} twice: a link is in one group, once")
            seen.add(link)
    if seen and not link_serial:
        raise ValueError("shared_links with link_serial=False: links without contention share nothing")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
    return number


def _spread(name: str, value: float | Sequence[float], count: int, places: str = "stages") -> list[float]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} has {len(value)} entries for {count} {places}: give {count}, or one number for all"
        )
    return list(value)
