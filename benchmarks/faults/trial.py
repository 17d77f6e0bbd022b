"""A run that loses one of its processes from outside, at a moment that a seed draws, and what was seen of it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import IsolatedCounts, Supervisor
from avgpipe.ranks.environment import SHARES
from avgpipe.ranks.launch import Job, tied
from avgpipe_lab.bench.chaos.episode import read
from benchmarks.faults.job import VARIABLE

_LOOK_S = 0.02
_COMMAND = [sys.executable, "-m", "benchmarks.faults.job"]
Event = dict[str, Any]
KINDS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


@dataclass(frozen=True)
class Loss:
    """Who is lost, and when.

    Attributes:
        kind: "kill" or "hang".
        after_s: Seconds after all processes have had their first results.
    """

    seed: int
    kind: str
    pipeline: int
    rank: int
    after_s: float

    @classmethod
    def draw(
        cls,
        seed: int,
        kind: str,
        pipelines: int,
        stages: int,
        when_s: tuple[float, float],
        rank: int | None = None,
    ) -> Loss:
        """``rank``: which one, else one that is drawn."""
        chance = random.Random(f"{seed} {kind} {stages}")
        drawn = chance.randrange(stages)
        return cls(
            seed, kind, chance.randrange(pipelines), drawn if rank is None else rank, chance.uniform(*when_s)
        )


@dataclass
class Seen:
    """What was seen of a run.

    Attributes:
        at_s: When the process was lost.
        events: Of all processes, in the order of time.
        said: Lines of the launcher, each with its time.
        history: Which pipelines were lost and have come, where they are isolated.
    """

    at_s: float = float("nan")
    events: list[Event] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)

    def of(self, kind: str, **fits: Any) -> list[Event]:
        """Return the events of a kind that have these values."""
        return [e for e in self.events if e["event"] == kind and all(e[name] == fits[name] for name in fits)]


class Watch(threading.Thread):
    """Takes away the process, and says when enough has been seen.

    Args:
        lives: How many processes must have had results before.
        is_enough: Is told all events after the loss.
    """

    def __init__(
        self,
        loss: Loss,
        lives: int,
        folder: Path,
        is_enough: Callable[[Sequence[Event]], bool],
        limit_s: float,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._loss, self._lives, self._folder, self._is_enough = loss, lives, folder, is_enough
        self._limit_s, self._over = limit_s, threading.Event()
        self.at_s = float("nan")

    def run(self) -> None:
        began = time.monotonic()
        due = float("inf")
        while not self._over.wait(_LOOK_S) and time.monotonic() < began + self._limit_s:
            if self.at_s == self.at_s:  # it has happened
                events = [e for e in read(self._folder) if e["at_s"] > self.at_s]
                if self._is_enough(events):
                    break
            elif due == float("inf"):
                training = {e["process"]: e for e in read(self._folder) if e["event"] == "result"}
                if len(training) == self._lives:
                    due = max(e["at_s"] for e in training.values()) + self._loss.after_s
                    self._process = next(
                        p
                        for p, e in training.items()
                        if (e["pipeline"], e["rank"]) == (self._loss.pipeline, self._loss.rank)
                    )
            elif time.monotonic() >= due:
                self.at_s = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(self._process, KINDS[self._loss.kind])
        (self._folder / "enough").touch()

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def _run(asked: dict[str, Any]) -> Iterator[tuple[Path, dict[str, str]]]:
    """Make the folder of a run, and what is added to its processes' environment."""
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name:
        folder = Path(name)
        job = json.dumps({**asked, "journals": name, "enough": str(folder / "enough")})
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        yield folder, {VARIABLE: job, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def lose_pipeline(
    loss: Loss,
    stages: int,
    pipelines: int,
    timeout_s: float,
    is_enough: Callable[[Sequence[Event]], bool],
    limit_s: float = 120,
) -> Seen:
    """Run isolated pipelines of which one is lost. PipelineError if that ends the run."""
    asked = {
        "stages": stages,
        "pipelines": pipelines,
        "isolate": True,
        "timeout_s": timeout_s,
        "epochs": None,
    }
    seen = Seen()
    with _run(asked) as (folder, added), tempfile.TemporaryDirectory(prefix="avgpipe-") as meeting:
        watch = Watch(loss, stages * pipelines, folder, is_enough, limit_s)
        watch.start()
        job = Job("stderr", _COMMAND, stages, {**added, SHARES: "equal"})  # bits are compared
        supervisor = Supervisor(job, IsolatedCounts(pipelines), Path(meeting), _noting(seen))
        try:
            supervisor.run()
        finally:
            watch.stop()
        seen.at_s, seen.history = watch.at_s, supervisor.history()
        seen.events = sorted(read(folder), key=lambda event: event["at_s"])
    return _checked(seen)


def lose_worker(
    loss: Loss, stages: int, pipelines: int, timeout_s: float, copies_every_s: float, spares: int, epochs: int
) -> Seen:
    """Run pipelines that share their processes, of which one is lost. PipelineError if that ends the run."""
    asked = {"stages": stages, "pipelines": pipelines, "isolate": False, "timeout_s": timeout_s}
    asked |= {"copies_every_s": copies_every_s, "epochs": epochs}
    seen = Seen()
    with _run(asked) as (folder, added):
        watch = Watch(loss, stages, folder, lambda _: True, timeout_s + 300)
        watch.start()
        try:
            Replacing(tied("stderr", *_COMMAND), stages, spares, added, _noting(seen)).run()
        finally:
            watch.stop()
        seen.at_s, seen.events = watch.at_s, sorted(read(folder), key=lambda event: event["at_s"])
    return _checked(seen)


def _noting(seen: Seen) -> Callable[[str], None]:
    return lambda line: seen.said.append((time.monotonic(), line))


def _checked(seen: Seen) -> Seen:
    if seen.at_s != seen.at_s:
        raise PipelineError("the run was over before a process was to be lost")
    return seen
