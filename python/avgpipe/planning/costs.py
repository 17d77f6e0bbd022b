"""What the actions of a schedule cost: the input of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

Each = float | tuple[float, ...]
"""A cost of a stage or boundary: of all micro-batches, or one of each."""

PerStage = float | Sequence[float]
PerMicroBatch = float | Sequence[float | Sequence[float]]
Link = tuple[int, int]

_OF_BOUNDARIES = ("transfer_s", "gradient_transfer_s", "latency_s")  # one number less than there are stages


@dataclass(frozen=True)
class Costs:
    """Time and memory of a micro-batch on each stage, from measuring or as a question "what if".

    Each is one number for all stages or one number per stage; sequences are kept as tuples. In forward_s, backward_s,
    input_backward_s, transfer_s and gradient_transfer_s a stage's entry may be a sequence itself, of one number per
    micro-batch.

    - forward_s, backward_s: seconds that F and B occupy the stage's device.
    - transfer_s: seconds that one tensor, activation or gradient, is on the link between stages k and k+1; one
      number for all boundaries or K-1 of them. Between two stages of one worker it takes no time, whatever is said.
    - activation_bytes: what a micro-batch holds from the start of its forward to the end of its backward.
    - weight_bytes: what one pipeline holds all the time (weights, in as many versions as it needs, gradients,
      optimizer state).
      Both None: memory is not asked for, and the Timeline has none. One None: it counts as 0.
    - link_serial: True: a link carries one tensor at a time per direction, in order of completion; False: no
      contention. Each replica that sends has a link of its own.
    - update_s: seconds that the update U occupies the device.
    - input_backward_s: of ``backward_s``, the part of I where a schedule splits the backward; W takes the rest.
      None: half.
    - gradient_transfer_s: seconds that a gradient is on the link back. None: ``transfer_s``.
    - latency_s: per boundary, from leaving the link to being there. It occupies nothing: the next tensor follows.
    - shared_links: groups of links, each a pair of neighbouring stages (from, to), that together carry one tensor at a
      time, in order of completion (at the same instant the lower worker's first): ``[[(0, 1), (2, 3)]]`` where two
      boundaries leave a machine by one network card. Needs ``link_serial``.
    - allreduce_s: seconds, of a stage with replicas, from the end of its last backward of a batch until the update may
      start; leave out what is summed while that backward still runs. It occupies neither device nor link: other
      pipelines go on meanwhile. W counts as a backward.
    - concurrency_gain: how much of one action's speed a device reaches with 1, 2, ... actions at once, of different
      pipelines; each of s actions runs at gain[s-1] / s of its speed alone. As many as there are numbers run
      at once at most: (1.0,) one; (1.0, 1.3) two, which together are 30 % quicker. The first is 1; none is above its
      count. Beside one that runs, a device takes the next that is ready at once, though both are then slower.
    - jitter: standard deviation, up to 0.25, of the factor around 1 by which the time of each action and transfer
      varies: the sum of four uniform numbers, at most 3.47 standard deviations away.
    - stragglers: (probability, factor): beside the jitter, each action and transfer independently takes ``factor``
      times as long with this probability. None: there are none.
    - seed: of both. A factor belongs to its action, by stage, batch, micro-batch and kind: it is the same on every
      machine, under every schedule and beside other pipelines.

    Raises TypeError for what is no number, ValueError for negative or infinite ones, for empty sequences and for an
    input_backward_s above backward_s.
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
        for name in ("forward_s", "backward_s", "transfer_s", "input_backward_s", "gradient_transfer_s"):
            self._keep(name, checked_each)
        for name in ("update_s", "latency_s", "allreduce_s", "activation_bytes", "weight_bytes"):
            self._keep(name, checked)
        if not isinstance(self.link_serial, bool):
            raise TypeError(f"link_serial={self.link_serial!r}: must be True or False")
        object.__setattr__(self, "shared_links", _checked_groups(self.shared_links, self.link_serial))
        object.__setattr__(self, "concurrency_gain", _checked_gain(self.concurrency_gain))
        object.__setattr__(self, "jitter", checked_jitter(self.jitter))
        object.__setattr__(self, "stragglers", checked_stragglers(self.stragglers))
        checked_seed(self.seed)

    def _keep(self, name: str, check: Any) -> None:
        value = getattr(self, name)
        # None is for those whose default it is.
        if value is not None or type(self).__dataclass_fields__[name].default is not None:
            object.__setattr__(self, name, check(name, value))

    def of_stages(self, stages: int, micro_batches: int | None = None) -> StageCosts:
        """Return the costs with one entry per stage and per boundary; ValueError for sequences of another length.

        ``micro_batches``: of a batch; needed where an entry has one number for each.
        """

        def each(name: str, value: PerMicroBatch, count: int = stages) -> list[Each]:
            return spread_each(name, value, count, micro_batches)

        backward_s = each("backward_s", self.backward_s)
        if self.input_backward_s is None:
            input_backward_s = [_half(cost) for cost in backward_s]
        else:
            input_backward_s = each("input_backward_s", self.input_backward_s)
            _check_parts(input_backward_s, backward_s)
        back = "transfer_s" if self.gradient_transfer_s is None else "gradient_transfer_s"
        asked = self.activation_bytes is not None or self.weight_bytes is not None
        return StageCosts(
            each("forward_s", self.forward_s),
            backward_s,
            input_backward_s,
            spread("update_s", self.update_s, stages),
            each("transfer_s", self.transfer_s, stages - 1),
            each(back, getattr(self, back), stages - 1),
            spread("latency_s", self.latency_s, stages - 1),
            spread("allreduce_s", self.allreduce_s, stages),
            spread("activation_bytes", self.activation_bytes or 0.0, stages) if asked else None,
            spread("weight_bytes", self.weight_bytes or 0.0, stages) if asked else None,
            self._channels(stages),
            frozenset(_number_of(group[0]) for group in self.shared_links if group),
        )

    def _channels(self, stages: int) -> list[int]:
        """Per link, 2k from stage k and 2k+1 back to it, the number of its channel; -1 without contention."""
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
    """:class:`Costs` with one entry per stage, those of transfers and latency with one per boundary."""

    forward_s: list[Each]
    backward_s: list[Each]
    input_backward_s: list[Each]
    update_s: list[float]
    transfer_s: list[Each]
    gradient_transfer_s: list[Each]
    latency_s: list[float]
    allreduce_s: list[float]
    activation_bytes: list[float] | None
    weight_bytes: list[float] | None
    channels: list[int]
    shared_channels: frozenset[int]  # those that all senders share

    def seconds(self, kind: str, stage: int) -> Each:
        """How long an action of this kind occupies the stage's device."""
        if kind == "W":
            return _less(self.backward_s[stage], self.input_backward_s[stage])
        of_kind: dict[str, Sequence[Each]] = {
            "F": self.forward_s,
            "B": self.backward_s,
            "I": self.input_backward_s,
            "U": self.update_s,
        }
        return of_kind[kind][stage]

    def memory_bytes(
        self, held_bytes: Sequence[float], placement: Sequence[Sequence[int]], pipelines: int
    ) -> tuple[int, ...] | None:
        """Per worker, the bytes of all pipelines' weights of its stages and of the micro-batches in flight."""
        if self.weight_bytes is None:
            return None
        weights = [sum(self.weight_bytes[k] for k in stages) for stages in placement]
        return tuple(math.ceil(held + pipelines * weight) for held, weight in zip(held_bytes, weights))


def _half(cost: Each) -> Each:
    return tuple(seconds / 2 for seconds in cost) if isinstance(cost, tuple) else cost / 2


def _less(whole: Each, part: Each) -> Each:
    """The difference, per micro-batch where either is."""
    if not isinstance(whole, tuple) and not isinstance(part, tuple):
        return whole - part
    count = len(whole) if isinstance(whole, tuple) else len(part) if isinstance(part, tuple) else 0
    wholes = whole if isinstance(whole, tuple) else (whole,) * count
    parts = part if isinstance(part, tuple) else (part,) * count
    return tuple(w - p for w, p in zip(wholes, parts))


def _check_parts(parts: Sequence[Each], wholes: Sequence[Each]) -> None:
    for k, (part, whole) in enumerate(zip(parts, wholes)):
        rest = _less(whole, part)
        if min(rest if isinstance(rest, tuple) else (rest,)) < 0:
            raise ValueError(
                f"input_backward_s={_text(part)} on stage {k} is above backward_s={_text(whole)}, which includes it: "
                "give backward_s the sum of both parts"
            )


def _text(cost: Each) -> str:
    return "[" + ", ".join(f"{s:g}" for s in cost) + "]" if isinstance(cost, tuple) else f"{cost:g}"


def _number_of(link: Link) -> int:
    """The link's number in the engine."""
    source, to = link
    return 2 * source if to > source else 2 * to + 1


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


def _checked_gain(gain: Any) -> tuple[float, ...]:
    if isinstance(gain, (str, bytes)) or not hasattr(gain, "__iter__"):
        raise TypeError(f"concurrency_gain={gain!r}: give a list of numbers, (1.0,) for one action at a time")
    found = tuple(number(f"concurrency_gain[{s}]", value) for s, value in enumerate(gain))
    if not found or found[0] != 1:
        raise ValueError(f"concurrency_gain={gain!r}: must begin with 1, the speed of an action alone")
    for count, value in enumerate(found, start=1):
        if not 0.001 <= value <= count:
            raise ValueError(
                f"concurrency_gain[{count - 1}]={value:g}: {count} actions reach between 0.001 and {count} times the "
                "speed of one alone"
            )
    return found


# ---- numbers: checked, and spread over stages ------------------------------------------------------------------------


def checked(name: str, value: Any) -> float | tuple[float, ...]:
    """A number of at least 0, or a tuple of them; TypeError and ValueError for anything else."""
    if isinstance(value, Real):
        return number(name, value)
    return tuple(number(f"{name}[{k}]", entry) for k, entry in enumerate(_entries(name, value)))


def checked_each(name: str, value: Any) -> float | tuple[Each, ...]:
    """The same, and an entry may be a sequence itself: a number per micro-batch."""
    if isinstance(value, Real):
        return number(name, value)
    return tuple(
        number(f"{name}[{k}]", entry) if _is_plain(entry) else _of_micro_batches(f"{name}[{k}]", entry)
        for k, entry in enumerate(_entries(name, value))
    )


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, str) or not hasattr(entry, "__len__")


def _of_micro_batches(name: str, entry: Iterable[Any]) -> tuple[float, ...]:
    numbers = tuple(number(f"{name}[{m}]", value) for m, value in enumerate(entry))
    if not numbers:
        raise ValueError(f"{name} is empty: give a number, or a list of one number per micro-batch")
    return numbers


def _entries(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r}: must be a number, or a list of one number per stage")
    entries = list(value)
    if not entries and name not in _OF_BOUNDARIES:  # one stage has none
        raise ValueError(f"{name} is empty: give a number, or a list of one number per stage")
    return entries


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: must be a number")
    found = float(value)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
    return found


def spread(name: str, value: float | Sequence[float], count: int) -> list[float]:
    """One number per stage or boundary; ValueError for a sequence of another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    return list(_of_length(name, value, count))


def spread_each(
    name: str, value: float | Sequence[float | Sequence[float]], count: int, micro_batches: int | None
) -> list[Each]:
    """Spread what :func:`checked_each` made, whose entries have ``micro_batches`` numbers if not one."""
    if not isinstance(value, Sequence):
        return [value] * count
    spread: list[Each] = []
    for k, entry in enumerate(_of_length(name, value, count)):
        if isinstance(entry, Sequence) and len(entry) != micro_batches:
            raise ValueError(
                f"{name}[{k}] has {len(entry)} entries for {micro_batches or 'an unknown number of'} micro-batches: "
                "give one for each, or one number for all"
            )
        spread.append(tuple(entry) if isinstance(entry, Sequence) else entry)
    return spread


def _of_length(name: str, value: Sequence[Any], count: int) -> Sequence[Any]:
    if len(value) != count:
        places = "boundaries" if name in _OF_BOUNDARIES else "stages"
        raise ValueError(
            f"{name} has {len(value)} entries for {count} {places}: give {count}, or one number for all"
        )
    return value


def total(cost: Each, micro_batches: range) -> float:
    """The sum over micro-batches of a batch."""
    return sum(cost[m] for m in micro_batches) if isinstance(cost, tuple) else len(micro_batches) * cost


# ---- jitter and stragglers: drawn in whole numbers, so that every machine draws the same -----------------------------

MOST_JITTER, MOST_FACTOR = 0.25, 1000.0
MOST_DEVIATIONS = 131070 / 37837.2  # of the sum of four uniform 16-bit numbers, in standard deviations
_DEVIATION = 37837.2


class Draws(NamedTuple):
    """What the engine takes: times vary by ``jitter`` / 2^48 per unit of the sum of four 16-bit numbers.

    ``threshold`` of 2^32 draws are stragglers, which take ``factor`` / 2^16 times as long.
    """

    seed: int
    jitter: int
    threshold: int
    factor: int


def draws(jitter: float, stragglers: tuple[float, float] | None, seed: int) -> Draws:
    probability, factor = stragglers or (0.0, 1.0)
    return Draws(seed, round(jitter / _DEVIATION * 2**48), round(probability * 2**32), round(factor * 2**16))


def most_factor(jitter: float, stragglers: tuple[float, float] | None) -> float:
    """No time is multiplied by more."""
    return (1 + MOST_DEVIATIONS * jitter) * (stragglers or (0.0, 1.0))[1]


def least_factor(jitter: float) -> float:
    """No time is multiplied by less."""
    return 1 - MOST_DEVIATIONS * jitter


def checked_jitter(jitter: Any) -> float:
    found = number("jitter", jitter)
    if found > MOST_JITTER:
        raise ValueError(f"jitter={jitter!r}: must be at most {MOST_JITTER}, use stragglers for rarer delays")
    return found


def checked_stragglers(stragglers: Any) -> tuple[float, float] | None:
    if stragglers is None:
        return None
    if not isinstance(stragglers, (tuple, list)) or len(stragglers) != 2:
        raise TypeError(f"stragglers={stragglers!r}: give (probability, factor), or None")
    probability = number("stragglers[0]", stragglers[0])
    factor = number("stragglers[1]", stragglers[1])
    if probability > 1:
        raise ValueError(f"stragglers[0]={probability:g}: a probability is at most 1")
    if not 1 <= factor <= MOST_FACTOR:
        raise ValueError(f"stragglers[1]={factor:g}: must be between 1 and {MOST_FACTOR:g}")
    return probability, factor


def checked_seed(seed: Any) -> None:
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r}: must be an int from 0 to 2**64 - 1")
