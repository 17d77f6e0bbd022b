"""One run with faults, under one of the launchers, and its observed events."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avgpipe.errors import PipelineError
from avgpipe.fault.replace import Replacing
from avgpipe.fault.supervise import IsolatedCounts, Supervisor
from avgpipe.ranks.launch import Job, run_on_ranks, tied
from avgpipe.ranks.supervisor import Interrupted
from avgpipe.testing import environment
from avgpipe_lab.bench.chaos import job as chaos_job
from avgpipe_lab.bench.chaos.draw import ISOLATED, Scenario
from avgpipe_lab.bench.chaos.job import VARIABLE
from avgpipe_lab.bench.chaos.watch import Watcher, has_mark, read
from avgpipe_lab.bench.hosts import CommandsOnHosts
from avgpipe_lab.bench.namespaces import network

PROMPT_S = 5.0  # added to the time limit of waits, for anything
_START_S = 60.0  # for processes to start, on a busy machine
_END_S = 1.0  # after this time nothing of an ended run may remain
_LOOK_S = 0.1
_RESTARTS = 20  # of a host's pipeline
_RATE_BITS_PER_S = 1e9  # at which a host sends
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
            "plan": {**plan, "isolate": way in ISOLATED},
            "options": {"timeout_s": self.timeout_s, "link": self.link},
            "copies_every_s": 0.5 if way == "spares" else None,
            "verifies": verifies,
            "loads": way == "plain",
            "seed": self.seed,
            "pace_s": self.pace_s,
            "together": str(folder / "together") if way == "hosts" else None,
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
        codes: Exit codes of the commands by host; None: the command did not end.
        ended_at_s: When the launcher ended, by the clock of events.
    """

    scenario: Scenario
    events: list[dict[str, Any]] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    failure: Exception | None = None
    left: list[str] = field(default_factory=list)
    is_hung: bool = False
    codes: dict[int, int | None] = field(default_factory=dict)
    ended_at_s: float = 0.0

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]


def play(scenario: Scenario, shape: RunShape) -> SeenRun:
    """Run a scenario to its end, in a temporary folder; the way "hosts" needs root and network namespaces."""
    seen = SeenRun(scenario)
    before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, _temporary(Path(name, "t")) as temporary:
        folder = Path(name)
        (folder / "journals").mkdir()
        verifies = any(fault["kind"] == "flipped bit" for fault in scenario.faults)
        job = json.dumps(shape.job(scenario.way, folder, verifies))
        added = {VARIABLE: job, **environment(scenario.faults)}
        folders = [temporary]
        with ExitStack() as stack:
            hosts = stack.enter_context(_on_hosts(shape, folder, added)) if scenario.way == "hosts" else None
            patience_s = shape.timeout_s + PROMPT_S + _START_S
            watch = Watcher(scenario, folder / "journals", job, patience_s, hosts, folder / "together")
            watch.start()
            try:
                if hosts is None:
                    _launch(scenario.way, shape, added, seen)
                else:
                    _launch_on_hosts(hosts, shape, seen, watch)
            except PipelineError as failure:
                seen.failure = failure
            except Interrupted:
                if not watch.is_hung:
                    raise
            finally:
                seen.ended_at_s = seen.ended_at_s or time.monotonic()
                watch.stop()
            if hosts is not None:
                _end_on_hosts(hosts, shape, seen)
                # What a killed command left in its folder stays, as the guide says.
                lost = {event["host"] for event in watch.strikes if event["text"].startswith("lost host")}
                lost |= {host for host, code in seen.codes.items() if code is None}  # they are killed here
                folders += [hosts.temporary(host) for host in hosts.commands if host not in lost]
        seen.is_hung = watch.is_hung
        seen.events = sorted([*read(folder / "journals"), *watch.strikes], key=lambda event: event["at_s"])
        seen.left = _left(folders, job, before)
    return seen


@contextmanager
def _on_hosts(shape: RunShape, folder: Path, added: dict[str, str]) -> Iterator[CommandsOnHosts]:
    with (
        network(shape.pipelines, _RATE_BITS_PER_S, own_boot_ids=True) as net,
        CommandsOnHosts(net, folder, added) as commands,
    ):
        yield commands


def _launch_on_hosts(hosts: CommandsOnHosts, shape: RunShape, seen: SeenRun, watch: Watcher) -> None:
    """Run to the end of the first host's command."""
    hosts.run(["--stages", str(shape.stages)], [chaos_job.__file__], restarts=_RESTARTS)
    while (code := hosts.commands[0].poll()) is None and not watch.is_hung:
        hosts.look()
        time.sleep(_LOOK_S)
    if code != 0:
        raise PipelineError(f"exit code {code}")


def _end_on_hosts(hosts: CommandsOnHosts, shape: RunShape, seen: SeenRun) -> None:
    """Wait for the commands of the other hosts, and note what all have printed and their exit codes."""
    deadline = time.monotonic() + shape.timeout_s + PROMPT_S
    for command in hosts.commands.values():
        with suppress(subprocess.TimeoutExpired):
            command.wait(max(0.0, deadline - time.monotonic()))
    hosts.look()
    for host, at_s, line in hosts.said:
        seen.said.append((at_s, f"host {host}: {line}" if host else line.removeprefix("avgpipe: ")))
    seen.codes = {host: command.poll() for host, command in hosts.commands.items()}


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
def _temporary(folder: Path) -> Iterator[Path]:
    """Make this process and its children keep temporary files in ``folder``."""
    folder.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
        tempfile.tempdir = None


# ---- what must not remain --------------------------------------------------------------------------------------------


def _left(folders: Sequence[Path], mark: str, shared: set[str]) -> list[str]:
    deadline = time.monotonic() + _END_S
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    found = [f"process {process}: {command}" for process, command in processes]
    for process, _ in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    entries = [path for folder in folders for path in folder.iterdir()]
    files = [path for path in entries if not path.name.startswith("torchinductor")]
    found += [f"file {path.parent.name}/{path.name}" for path in files]
    for path in files:
        shutil.rmtree(path, ignore_errors=True)
    found += [f"shared memory {name}" for name in sorted(_shared_memory() - shared) if not _is_used(name)]
    return found


def _marked(mark: str) -> list[tuple[int, str]]:
    """Return the processes that have the mark of a run in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and has_mark(int(name), mark):
            with suppress(OSError):
                command = (
                    Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append((int(name), command[:100]))
    return found


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def _is_used(name: str) -> bool:
    """Return whether a live process has it open, in which case it does not belong to the ended run."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if name in maps.read_text(errors="replace"):
                return True
    return not Path(name).exists()
