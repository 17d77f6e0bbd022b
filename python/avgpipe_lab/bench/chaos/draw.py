"""Draw the faults of a run, and their places, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe.faults.fault import KINDS, WHERE

WAYS = ("isolate", "spares", "plain")
# Numbers of the job, which evaluates and saves at the end of each epoch.
EPOCHS, BATCHES_PER_EPOCH, BATCH_SIZE = 4, 40, 12
BATCHES = EPOCHS * BATCHES_PER_EPOCH
OF_MESSAGES = ("flipped bit", "half-written message")
OF_LINES = (*OF_MESSAGES, "cut line", "reset")
HARMLESS = ("slow", "full disk")  # faults that end nothing
_MORE = 3  # most further faults, besides the one that every run has
_DELAY_S = 0.5  # delay of a slow rank
# How often a run at most passes the places of these phases; places in other phases are counted by batch.
_PASSED_BY = {"evaluation": 6, "save": 4, "load": 2, "start": 0, "join": 0, "shutdown": 0}


@dataclass(frozen=True)
class Scenario:
    """The faults of a run.

    Attributes:
        name: Name by which the run can be repeated.
        way: How its processes are started (isolate, spares, plain).
        faults: Arguments of `avgpipe.testing.fail_at`, in the order in which they can happen.
        kills_s: Seconds after the first result at which a process is killed from outside.
        choices: A number for each kill from outside, which chooses one of the processes that live at that
            time.
    """

    name: str
    way: str
    faults: tuple[dict[str, Any], ...] = ()
    kills_s: tuple[float, ...] = ()
    choices: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind of the fault inside the run; "kill" if there are only kills from outside."""
        return str(self.faults[-1]["kind"]) if self.faults else "kill"


def draw(
    seed: int, way: str, number: int, kinds: Sequence[str], stages: int, pipelines: int, mean_s: float
) -> Scenario:
    """Draw the run with this number of a way; the result depends on the arguments alone."""
    chance = random.Random(f"{seed} {way} {number}")
    if stages == 1:  # no messages between stages
        kinds = [kind for kind in kinds if kind not in (OF_LINES if way != "isolate" else OF_MESSAGES)]
    fault = _fault(chance, way, chance.choice(kinds), stages, pipelines)
    faults = [fault]
    if fault["phase"] == "join":  # only a pipeline that was lost can join again
        batch = chance.randrange(BATCHES // 2)
        before = {"kind": "kill", "phase": "training", "batch": batch, "rank": chance.randrange(stages)}
        faults.insert(0, {**before, "pipeline": fault["pipeline"], "restart": 0})
    # A run that continues has further faults: any if lost pipelines restart, else only faults that end
    # nothing.
    more = [kind for kind in kinds if way == "isolate" or kind in HARMLESS]
    for _ in range(chance.randint(0, _MORE) if more else 0):
        another = _fault(chance, way, chance.choice(more), stages, pipelines)
        if another["phase"] != "join":
            faults.insert(0, another)
    kills, choices, at_s = [], [], 0.0
    while "kill" in kinds and (at_s := at_s + chance.expovariate(1 / mean_s)) < 2 * mean_s:
        kills.append(round(at_s, 3))
        choices.append(chance.randrange(10**6))
    return Scenario(f"{way}-{number}", way, tuple(faults), tuple(kills), tuple(choices))


def _fault(chance: random.Random, way: str, kind: str, stages: int, pipelines: int) -> dict[str, Any]:
    where = "wire" if kind == "flipped bit" else None
    phases = [p for p in (WHERE[where] if where else KINDS[kind]).phases if _has(way, p)]
    phase = chance.choice(phases)
    fault: dict[str, Any] = {"kind": kind, "phase": phase, "rank": chance.randrange(stages)}
    fault["restart"] = 1 if phase == "join" else 0
    if way == "isolate" and phase != "start":
        fault["pipeline"] = chance.randrange(pipelines)
    if phase in _PASSED_BY:
        fault["after"] = chance.randint(0, _PASSED_BY[phase])
    else:
        fault["batch"] = chance.randrange(BATCHES)
    if where:
        fault["where"] = where
    if kind == "slow" or (kind == "stop" and chance.random() < 0.3):
        fault["for_s"] = _DELAY_S
    elif kind == "full disk":
        fault["room_bytes"] = chance.randrange(1000)
    return fault


def _has(way: str, phase: str) -> bool:
    """Return whether the job has a phase: only isolated pipelines join, and it loads in plain runs only."""
    return {"join": way == "isolate", "load": way == "plain"}.get(phase, True)
