"""Faults that a test may inject: the kinds, the places, and one fault as a value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from avgpipe.errors import check_count, nearest
from avgpipe.files import dataclass_of, parse_json

if TYPE_CHECKING:
    from avgpipe.runtime.lane import Lane

_OF_A_BATCH = ("pipeline", "stage", "batch")
_OF_A_STEP = (*_OF_A_BATCH, "micro_batch", "action")
# The names of a place in each phase, beside "rank" and "restart", which all have.
PHASES = {
    "start": (),
    "training": _OF_A_STEP,
    "evaluation": _OF_A_STEP,
    "update": (*_OF_A_BATCH, "action"),
    "averaging": _OF_A_BATCH,
    "save": (*_OF_A_BATCH, "action"),
    "load": ("pipeline", "stage", "action"),
    "join": ("pipeline", "stage"),
    "shutdown": ("pipeline", "stage"),
}
_STEPS = ("training", "evaluation", "update", "averaging")
ACTIONS = {
    "training": (
        *("forward", "backward", "backward input", "backward weight", "publish", "update"),
        *("share part", "sum replicas", "send tied", "sum tied", "add norm", "receive loss"),
        *("begin row", "launch"),
    ),
    "evaluation": ("forward",),
    "update": ("update",),
    "save": ("begin", "write", "written", "manifest"),
    "load": ("begin", "restore"),
}
_PLACES = ("rank", "restart", *_OF_A_STEP)
_COUNTS = ("rank", "restart", *_OF_A_BATCH, "micro_batch", "after", "bit", "room_bytes")


class InjectedFault(RuntimeError):
    """The error that ``fail_at(kind="exception")`` raises."""


class FaultKind(NamedTuple):
    """A kind of fault.

    Attributes:
        options: The options of a `Fault` that belong to this kind.
        phases: The phases in which it can happen.
        action: The only action at which it can happen; None: any.
    """

    options: tuple[str, ...] = ()
    phases: tuple[str, ...] = tuple(PHASES)
    action: str | None = None


KINDS = {
    "kill": FaultKind(),
    "stop": FaultKind(("for_s",)),
    "slow": FaultKind(("for_s",)),
    "exception": FaultKind(),
    "out of memory": FaultKind(),
    "cut line": FaultKind(("store",)),
    "reset": FaultKind(("store",)),
    "half-written message": FaultKind(),
    "full disk": FaultKind(("room_bytes",), ("save",), "write"),
    "flipped bit": FaultKind(("where", "bit")),
}
WHERE = {
    "wire": FaultKind(phases=_STEPS),
    "weights": FaultKind(phases=_STEPS),
    "checkpoint": FaultKind(phases=("save",), action="written"),
}  # a bit flips


@dataclass(frozen=True)
class Fault:
    """A fault, with its place and time; see :func:`avgpipe.testing.fail_at`.

    Raises:
        ValueError: for a fault that can never happen.
    """

    kind: str
    rank: int | None = None
    pipeline: int | None = None
    stage: int | None = None
    batch: int | None = None
    micro_batch: int | None = None
    phase: str | None = None
    action: str | None = None
    restart: int | None = None
    after: int = 0
    times: int | None = 1
    for_s: float | None = None
    where: str | None = None
    bit: int = 62
    room_bytes: int = 0
    store: bool = False

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, KINDS)
        if self.phase is not None:
            _check_name("phase", self.phase, PHASES)
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None:
                check_count(name, value, 0)
        if self.times is not None:
            check_count("times", self.times)
        self._check_options()
        self._check_place()

    def _check_options(self) -> None:
        for field in fields(self):
            kinds = [repr(kind) for kind, row in KINDS.items() if field.name in row.options]
            if kinds and getattr(self, field.name) != field.default and repr(self.kind) not in kinds:
                raise ValueError(
                    f"{field.name} is for kind {' or '.join(kinds)}, not {self.kind!r}: leave it out"
                )
        if self.kind == "slow" and self.for_s is None:
            raise ValueError("kind 'slow' needs for_s=, the seconds of each delay")
        value = self.for_s
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ValueError(f"for_s={value!r}: must be a number of seconds, not below 0")
        if self.kind == "flipped bit":
            _check_name("where", self.where, WHERE)

    def _check_place(self) -> None:
        phases, only = self._phases, self._what.action
        if not phases:
            what = f"{self.kind} of {self.where}" if self.where else self.kind
            raise ValueError(f"phase {self.phase!r} has no {what}: only {', '.join(self._what.phases)}")
        if self.action is not None:
            known = [action for phase in phases for action in ACTIONS.get(phase, ())]
            if not known:
                raise ValueError(f"phase {self.phase!r} has no actions: leave out action={self.action!r}")
            _check_name("action", self.action, [only] if only else dict.fromkeys(known))
        given = {name for name in _OF_A_STEP if getattr(self, name) is not None}
        if not any(given <= set(PHASES[phase]) for phase in phases):
            phase, names = phases[0], ("rank", "restart", *PHASES[phases[0]])
            unknown = " and ".join(sorted(given - set(names)))
            raise ValueError(
                f"no place at {phase} is named by {unknown}: leave out all but {', '.join(names)}"
            )

    @property
    def _what(self) -> FaultKind:
        return WHERE[self.where] if self.where else KINDS[self.kind]

    @property
    def _phases(self) -> list[str]:
        """The phases in which it can happen. An update is a part of training."""
        wanted = {"training", "update"} if self.phase == "training" else {self.phase}
        return [phase for phase in self._what.phases if self.phase is None or phase in wanted]

    def damage(self, lane: Lane) -> None:
        """Flip a bit of a lane's weights, or inject the fault into its links."""
        from avgpipe.faults.kinds import disturb
        from avgpipe.links.transport import flip_bit

        if self.where == "weights":
            flip_bit(lane.trained.arena.weights, self.bit)
        else:
            disturb(lane.port.links, self)

    def fits(self, phase: str, place: Mapping[str, Any]) -> bool:
        """Whether it can happen at a place."""
        wanted = {name: getattr(self, name) for name in _PLACES}
        wanted["action"] = self.action or self._what.action
        return phase in self._phases and all(
            value is None or _is(place.get(name), value) for name, value in wanted.items()
        )


# ``ranks.environment`` arms faults while it is imported, so nothing here imports it before.


class Armed:
    """A fault that waits for its place in this process; as a context manager until the end of the block.

    Attributes:
        fault: The fault.
        fired: How often it has happened.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault, self.fired = fault, 0
        self._seen = 0

    def is_due(self, phase: str, place: Mapping[str, Any]) -> bool:
        """Count a place that the process reaches; return whether the fault happens there."""
        fault = self.fault
        if not fault.fits(phase, place):
            return False
        self._seen += 1
        is_due = self._seen > fault.after and (fault.times is None or self.fired < fault.times)
        self.fired += is_due
        return is_due

    def reach(self, phase: str, place: Mapping[str, Any]) -> Fault | None:
        """Let the fault happen if it is due; return it if the place itself must act on it."""
        from avgpipe.faults.kinds import happen
        from avgpipe.ranks import environment as probe

        restarts = os.environ.get(probe.RESTART, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        here = {"rank": int(os.environ.get("RANK", "0")), "restart": int(restarts), **place}
        return self.fault if self.is_due(phase, here) and happen(self.fault, phase, here) else None

    def disarm(self) -> None:
        """Disarm the fault. Its effects remain: a connection that was cut is not restored."""
        from avgpipe.ranks import environment as probe

        if self in probe.armed:
            probe.armed.remove(self)

    def __enter__(self) -> Armed:
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()


def to_json(wanted: Iterable[Fault]) -> str:
    """Return faults as JSON for the environment of another process, which ``armed_by`` reads."""
    return json.dumps([asdict(fault) for fault in wanted])


def armed_by(text: str) -> list[Armed]:
    """Return the armed faults of a text of ``to_json``; ValueError for any other text."""
    return [
        Armed(dataclass_of("AVGPIPE_FAULTS", Fault, values)) for values in parse_json("AVGPIPE_FAULTS", text)
    ]


def _is(found: Any, wanted: Any) -> bool:
    """Whether a place is, or contains, the wanted value: "backward input" is a "backward"."""
    if isinstance(found, str):
        return found == wanted or found.startswith(f"{wanted} ")
    return bool(wanted in found if isinstance(found, Collection) else found == wanted)


def _check_name(what: str, name: Any, valid: Iterable[str]) -> None:
    if name not in tuple(valid):
        raise ValueError(f"{what}={name!r}: {nearest(str(name), tuple(valid))}")
