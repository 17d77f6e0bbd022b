"""What the actions of a schedule cost: the input of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple


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

    Raises TypeError for what is no number, ValueError for negative or infinite ones, for empty sequences and for an
    input_backward_s above backward_s.
    """

    forward_s: float | Sequence[float]
    backward_s: float | Sequence[float]
    transfer_s: float | Sequence[float] = 0.0
    activation_bytes: float | Sequence[float] | None = None
    weight_bytes: float | Sequence[float] | None = None
    link_serial: bool = True
    update_s: float | Sequence[float] = field(default=0.0, kw_only=True)
    input_backward_s: float | Sequence[float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "transfer_s", "update_s"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        for name in ("activation_bytes", "weight_bytes", "input_backward_s"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if not isinstance(self.link_serial, bool):
            raise TypeError(f"link_serial={self.link_serial!r}: must be True or False")

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
        )


class StageCosts(NamedTuple):
    """:class:`Costs` with one number per stage, ``transfer_s`` with one per boundary."""

    forward_s: list[float]
    backward_s: list[float]
    input_backward_s: list[float]
    update_s: list[float]
    transfer_s: list[float]
    activation_bytes: list[float] | None
    weight_bytes: list[float] | None
    link_serial: bool

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
    if not numbers and name != "transfer_s":  # one stage has no boundary
        raise ValueError(f"{name} is empty: give a number, or a list of one number per stage")
    return numbers


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
