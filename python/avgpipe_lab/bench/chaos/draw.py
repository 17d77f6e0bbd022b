"""Draw the faults of a run, and their places, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe.faults.fault import KINDS, WHERE

WAYS = ("isolate", "spares", "plain", "hosts")
ISOLATED = ("isolate", "hosts")  # ways whose pipelines have processes of their own
# Numbers of the job, which evaluates and saves at the end of each epoch.
EPOCHS, BATCHES_PER_EPOCH, BATCH_SIZE = 4, 40, 12
BATCHES = EPOCHS * BATCHES_PER_EPOCH
OF_MESSAGES = ("flipped bit", "half-written message")
OF_LINES = (*OF_MESSAGES, "cut line", "reset")
HARMLESS = ("slow", "full disk")  # faults that end nothing
OF_HOSTS = {"lost host": "kill", "cut line": "cut line"}  # strikes at hosts, by the kind that includes them
_MORE = 3  # most further faults, besides the one that every run has
_DELAY_S = 0.5  # delay of a slow rank
_CUTS_S = (1.0, 3.0, 30.0, None)  # for how long a host is cut off; None: for good
_TOGETHER = 20  # batches after which all hosts have joined, mostly
# How often a run at most passes the places of these phases; places in other phases are counted by batch.
_PASSED_BY = {"evaluation": 6, "save": 4, "load": 2, "start": 0, "join": 0, "shutdown": 0}


@dataclass(frozen=True)
class Strike:
    """A fault from outside the processes that train.

    Attributes:
        kind: "kill" or "stop" (a process gets SIGKILL or SIGSTOP), "lost host" (so does the command that has
            joined there) or "cut line" (a host is cut off).
        at_s: Seconds after the first result; over hosts, after all of them have had one.
        choice: Number that chooses one of the processes or hosts that train at that time.
        for_s: For how long a host is cut off; None: to the end of the run.
    """

    kind: str
    at_s: float
    choice: int
    for_s: float | None = None


@dataclass(frozen=True)
class Scenario:
    """The faults of a run.

    Attributes:
        name: Name by which the run can be repeated.
        way: How its processes are started (isolate, spares, plain, hosts).
        faults: Arguments of `avgpipe.testing.fail_at`, in the order in which they can happen.
        strikes: Faults from outside, in the order of time.
    """

    name: str
    way: str
    faults: tuple[dict[str, Any], ...] = ()
    strikes: tuple[Strike, ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind of the fault inside the run, or of the first from outside."""
        return (
            str(self.faults[-1]["kind"]) if self.faults else self.strikes[0].kind if self.strikes else "none"
        )


def draw(
    seed: int, way: str, number: int, kinds: Sequence[str], stages: int, pipelines: int, mean_s: float
) -> Scenario:
    """Draw the run with this number of a way; the result depends on the arguments alone."""
    chance = random.Random(f"{seed} {way} {number}")
    if stages == 1:  # no messages between stages
        kinds = [kind for kind in kinds if kind not in (OF_MESSAGES if way in ISOLATED else OF_LINES)]
    fault = _fault(chance, way, chance.choice(kinds), stages, pipelines)
    faults = [fault]
    if fault["phase"] == "join":  # only a pipeline that was lost can join again
        batch = chance.randrange(BATCHES // 2)
        before = {"kind": "kill", "phase": "training", "batch": batch, "rank": chance.randrange(stages)}
        faults.insert(0, {**before, "pipeline": fault["pipeline"], "restart": 0})
    # A run that continues has further faults: any if lost pipelines restart, else only faults that end
    # nothing.
    more = [kind for kind in kinds if way in ISOLATED or kind in HARMLESS]
    for _ in range(chance.randint(0, _MORE) if more else 0):
        another = _fault(chance, way, chance.choice(more), stages, pipelines)
        if another["phase"] != "join":
            faults.insert(0, another)
    return Scenario(f"{way}-{number}", way, tuple(faults), _strikes(chance, way, kinds, mean_s))


def _strikes(chance: random.Random, way: str, kinds: Sequence[str], mean_s: float) -> tuple[Strike, ...]:
    strikes, at_s = [], 0.0
    drawn = ["kill"] if "kill" in kinds else []
    if way == "hosts":
        drawn += [strike for strike, kind in OF_HOSTS.items() if kind in kinds]
    while drawn and (at_s := at_s + chance.expovariate(1 / mean_s)) < 2 * mean_s:
        kind = chance.choice(drawn) if len(drawn) > 1 else drawn[0]
        for_s = chance.choice(_CUTS_S) if kind == "cut line" else None
        strikes.append(Strike(kind, round(at_s, 3), chance.randrange(10**6), for_s))
    return tuple(strikes)


def _fault(chance: random.Random, way: str, kind: str, stages: int, pipelines: int) -> dict[str, Any]:
    where = "wire" if kind == "flipped bit" else None
    phases = [p for p in (WHERE[where] if where else KINDS[kind]).phases if _has(way, p)]
    phase = chance.choice(phases)
    fault: dict[str, Any] = {"kind": kind, "phase": phase, "rank": chance.randrange(stages)}
    fault["restart"] = 1 if phase == "join" else 0
    if way in ISOLATED and phase != "start":
        fault["pipeline"] = chance.randrange(pipelines)
    if phase in _PASSED_BY:
        fault["after"] = chance.randint(0, _PASSED_BY[phase])
    else:
        fault["batch"] = chance.randrange(_TOGETHER if way == "hosts" else 0, BATCHES)
    if where:
        fault["where"] = where
    if kind == "slow" or (kind == "stop" and chance.random() < 0.3):
        fault["for_s"] = _DELAY_S
    elif kind == "full disk":
        fault["room_bytes"] = chance.randrange(1000)
    return fault


def _has(way: str, phase: str) -> bool:
    """Return whether the job has a phase: only isolated pipelines join, and it loads in plain runs only."""
    return {"join": way in ISOLATED, "load": way == "plain"}.get(phase, True)
