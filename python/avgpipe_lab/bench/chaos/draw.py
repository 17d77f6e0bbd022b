"""Drawing what fails in a run, and where, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avgpipe.faults.fault import KINDS, WHERE

WAYS = ("isolate", "spares", "plain")
# Of the job: an evaluation and a save at the end of each epoch.
EPOCHS, BATCHES_PER_EPOCH, BATCH_SIZE = 4, 40, 12
BATCHES = EPOCHS * BATCHES_PER_EPOCH
OF_MESSAGES = ("flipped bit", "half-written message")
OF_LINES = (*OF_MESSAGES, "cut line", "reset")
HARMLESS = ("slow", "full disk")  # nothing ends
_MORE = 3  # at most, beside the one that every run has
_DELAY_S = 0.5  # of a slow rank
# The places of these phases that are passed by at most; they are counted, as they have no batch of training.
_PASSED_BY = {"evaluation": 6, "save": 4, "load": 2, "start": 0, "join": 0, "shutdown": 0}


@dataclass(frozen=True)
class Scenario:
    """What is to happen in a run.

    Attributes:
        name: By which it can be repeated.
        way: How its processes are started.
        faults: Arguments of `avgpipe.testing.fail_at`, in the order in which they can happen.
        kills_s: Seconds after the first result at which a process is killed from outside.
        choices: A number for each of these, which chooses among the processes that live then.
    """

    name: str
    way: str
    faults: tuple[dict[str, Any], ...] = ()
    kills_s: tuple[float, ...] = ()
    choices: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of what happens inside; "kill" where there is nothing but kills from outside."""
        return str(self.faults[-1]["kind"]) if self.faults else "kill"


def draw(
    seed: int, way: str, number: int, kinds: Sequence[str], stages: int, pipelines: int, mean_s: float
) -> Scenario:
    """Draw the run with this number of a way; it depends on the arguments alone."""
    chance = random.Random(f"{seed} {way} {number}")
    if stages == 1:  # nothing travels between stages
        kinds = [kind for kind in kinds if kind not in (OF_LINES if way != "isolate" else OF_MESSAGES)]
    fault = _fault(chance, way, chance.choice(kinds), stages, pipelines)
    faults = [fault]
    if fault["phase"] == "join":  # only who is lost can join
        batch = chance.randrange(BATCHES // 2)
        before = {"kind": "kill", "phase": "training", "batch": batch, "rank": chance.randrange(stages)}
        faults.insert(0, {**before, "pipeline": fault["pipeline"], "restart": 0})
    # A run that goes on has more of them: any where a pipeline comes again, else such as end nothing.
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
    """Whether the job gets to a phase: only isolated pipelines join, and it loads where nobody comes later."""
    return {"join": way == "isolate", "load": way == "plain"}.get(phase, True)
