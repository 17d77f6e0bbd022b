"""One run with faults, under one of the launchers, and its observed events."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import IsolatedCounts, Supervisor
from avgpipe.ranks.launch import Job, run_on_ranks, tied
from avgpipe.ranks.supervisor import Interrupted
from avgpipe.testing import environment
from avgpipe_lab.bench.chaos.draw import Scenario
from avgpipe_lab.bench.chaos.job import VARIABLE

PROMPT_S = 5.0  # added to the time limit of waits, for anything
_START_S = 60.0  # for processes to start, on a busy machine
_END_S = 1.0  # after this time nothing of an ended run may remain
_LOOK_S = 0.1
_JOB = "avgpipe_lab.bench.chaos.job"


@dataclass(frozen=True)
class RunShape:
    """What all runs have in common."""

    stages: int
    pipelines: int
    link: str
    timeout_s: float
    pace_s: float = 0.06
    seed: int = 0

    def job(self, way: str, folder: Path, verifies: bool) -> dict[str, Any]:
        """Return the parameters of a way's job."""
        plan = {"stages": self.stages, "pipelines": self.pipelines, "micro_batches": 2 * self.pipelines}
        return {
            "journals": str(folder / "journals"),
            "checkpoint": str(folder / "checkpoint"),
            "plan": {**plan, "isolate": way == "isolate"},
            "options": {"timeout_s": self.timeout_s, "link": self.link},
            "copies_every_s": 0.5 if way == "spares" else None,
            "verifies": verifies,
            "loads": way == "plain",
            "seed": self.seed,
            "pace_s": self.pace_s,
        }


@dataclass
class SeenRun:
    """What was observed of a run.

    Attributes:
        events: Events of all processes, and the kills from outside, in the order of time.
        said: Lines that the launcher printed, each with its time.
        failure: Why the launcher ended the run; None if it finished.
        left: Processes, files and memory that remained afterwards.
        is_hung: Whether the run had to be ended from outside.
        ended_at_s: When the launcher ended, by the clock of events.
    """

    scenario: Scenario
    events: list[dict[str, Any]] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    failure: Exception | None = None
    left: list[str] = field(default_factory=list)
    is_hung: bool = False
    ended_at_s: float = 0.0

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]


def play(scenario: Scenario, shape: RunShape) -> SeenRun:
    """Run a scenario to its end, in a temporary folder."""
    seen = SeenRun(scenario)
    verifies = scenario.kind == "flipped bit"
    before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, _temporary(Path(name, "t")):
        folder = Path(name)
        (folder / "journals").mkdir()
        job = json.dumps(shape.job(scenario.way, folder, verifies))
        added = {VARIABLE: job, **environment(scenario.faults)}
        watch = _Watcher(scenario, shape, folder / "journals", job)
        watch.start()
        try:
            _launch(scenario.way, shape, added, seen)
        except PipelineError as failure:
            seen.failure = failure
        except Interrupted:
            if not watch.is_hung:
                raise
        finally:
            seen.ended_at_s = time.monotonic()
            watch.stop()
        seen.is_hung = watch.is_hung
        seen.events = sorted([*read(folder / "journals"), *watch.kills], key=lambda event: event["at_s"])
        seen.left = _left(folder, job, before)
    return seen


def _launch(way: str, shape: RunShape, added: dict[str, str], seen: SeenRun) -> None:
    def say(line: str) -> None:
        seen.said.append((time.monotonic(), line))

    added["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    added["OMP_NUM_THREADS"] = "1"
    if way == "plain":
        run_on_ranks(f"{_JOB}:train", shape.stages, {"about": added[VARIABLE]}, environment=added)
        return
    command = [sys.executable, "-m", _JOB]
    if way == "spares":
        Replacing(tied("stderr", *command), shape.stages, 1, added, say).run()
        return
    with tempfile.TemporaryDirectory(prefix="avgpipe-") as name:
        job = Job("stderr", command, shape.stages, added)
        Supervisor(job, IsolatedCounts(shape.pipelines), Path(name), say).run()


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Make this process and its children keep temporary files in ``folder``."""
    folder.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
        tempfile.tempdir = None


class _Watcher(threading.Thread):
    """Kills processes from outside at the drawn times, and ends a run that publishes no more events."""

    def __init__(self, scenario: Scenario, shape: RunShape, journals: Path, mark: str) -> None:
        super().__init__(name="chaos-watch", daemon=True)
        self._due = list(zip(scenario.kills_s, scenario.choices))
        self._patience_s = shape.timeout_s + PROMPT_S + _START_S
        self._journals, self._mark = journals, mark
        self._isolates = scenario.way == "isolate"
        self._over = threading.Event()
        self.kills: list[dict[str, Any]] = []
        self.is_hung = False

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        heard_at = time.monotonic()
        while not self._over.wait(_LOOK_S):
            events = read(self._journals)
            heard_at = max([heard_at, *(event["at_s"] for event in events)])
            results = [event["at_s"] for event in events if event["event"] == "result"]
            is_due = results and self._due and time.monotonic() > min(results) + self._due[0][0]
            if is_due and self._kill(events, self._due[0][1]):
                self._due.pop(0)
            if time.monotonic() > heard_at + self._patience_s:
                self.is_hung = True
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends all its processes
                return

    def _kill(self, events: list[dict[str, Any]], choice: int) -> bool:
        """Kill a process that trains, not one that ends or has ended. Return False if the kill has to wait."""
        ended = {event["process"] for event in events if event["event"] in ("end", "error")}
        training = {event["process"]: event for event in events if event["event"] == "result"}
        hit = {(e["pipeline"], e["life"]) for e in [*events, *self.kills] if e["event"] == "fault"}
        living = [p for p in sorted(training) if p not in ended and _has_mark(p, self._mark)]
        if self._isolates:  # a pipeline has to remain: else all start over, or the run ends
            living = [p for p in living if (training[p]["pipeline"], training[p]["life"]) not in hit]
            if len({training[p]["pipeline"] for p in living}) < 2:
                return False
        if living:
            process = living[choice % len(living)]
            who = {name: training[process][name] for name in ("process", "rank", "pipeline", "life")}
            at_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                self.kills.append({"at_s": at_s, "event": "fault", "text": "kill from outside", **who})
        return True


def read(journals: Path) -> list[dict[str, Any]]:
    """Read the journals of processes; the last line may be incomplete."""
    lines = [line for path in journals.glob("*.jsonl") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


# ---- what must not remain --------------------------------------------------------------------------------------------


def _left(folder: Path, mark: str, shared: set[str]) -> list[str]:
    deadline = time.monotonic() + _END_S
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    found = [f"process {process}: {command}" for process, command in processes]
    for process, _ in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    files = [path for path in (folder / "t").iterdir() if not path.name.startswith("torchinductor")]
    found += [f"file {path.name}" for path in files]
    for path in files:
        shutil.rmtree(path, ignore_errors=True)
    found += [f"shared memory {name}" for name in sorted(_shared_memory() - shared) if not _is_used(name)]
    return found


def _marked(mark: str) -> list[tuple[int, str]]:
    """Return the processes that have the mark of a run in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _has_mark(int(name), mark):
            with suppress(OSError):
                command = (
                    Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append((int(name), command[:100]))
    return found


def _has_mark(process: int, mark: str) -> bool:
    try:
        return f"{VARIABLE}={mark}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def _is_used(name: str) -> bool:
    """Return whether a live process has it open, in which case it does not belong to the ended run."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if name in maps.read_text(errors="replace"):
                return True
    return not Path(name).exists()
