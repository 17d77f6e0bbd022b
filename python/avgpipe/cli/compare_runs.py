"""The runs of ``avgpipe compare``: one ``avgpipe train`` after the other, and what became of each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from types import FrameType
from typing import Any, NamedTuple

from avgpipe import systems as rows
from avgpipe.cli.errors import WRONG_ARGUMENTS
from avgpipe.cli.settings import resolve
from avgpipe.report.compare import FAILED, INTERRUPTED, KILLED, NOT_RUN, OK, OUT_OF_MEMORY, REFUSED

_LOOK_S = 0.25  # how often a run is looked after
_GRACE_S = {signal.SIGINT: 20.0, signal.SIGTERM: 5.0}  # for a run to end by itself, then SIGKILL
_SAID = "avgpipe: error: "
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE
)
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_REASON_LETTERS = 200
_PROGRAM = (sys.executable, "-m", "avgpipe.cli.main")


@dataclass(frozen=True)
class Question:
    """asked: options of ``avgpipe train`` that were given, by the names of ``resolve``. stages: workers of each system.
    out: the folder of the comparison. memory_limit_bytes: of a worker.
    """

    workload: str
    systems: tuple[str, ...]
    stages: int
    asked: dict[str, Any] = field(default_factory=dict)
    out: Path = Path()
    memory_limit_bytes: int | None = None

    def options(self, system: str) -> dict[str, Any]:
        """Those of ``asked`` that a system leaves to the caller, and what makes the run the system's."""
        row, found = rows.SYSTEMS[system], dict(self.asked)
        if "pipelines" in row:
            found.pop("pipelines", None)
        wanted = found.get("micro_batches", 1)
        if "micro_batches" in row or rows.micro_batches(system, self.stages, None, wanted) < wanted:
            found.pop("micro_batches", None)  # PipeDream, too, has whole batches under way
        return {**found, "system": system, "stages": self.stages, "out": str(self.out / system)}

    def refusal(self, system: str) -> str:
        """Why a system cannot do what was asked; "" if it can, as far as that shows without the data."""
        try:
            resolve(self.workload, self.options(system))
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    def job(self, system: str) -> Job:
        words = ["train", self.workload]
        for name, value in self.options(system).items():
            words += [f"--{name.removesuffix('_s').replace('_', '-')}", str(value)]
        return Job(system, words, self.out / f"{system}.log")


class Job(NamedTuple):
    """A system's run: the words after ``avgpipe``, and the file for what the run says."""

    system: str
    words: list[str]
    log: Path


class Ended(NamedTuple):
    """What became of a system's run: one of the words of ``report.compare``, and why."""

    system: str
    status: str
    reason: str = ""


class Signals:
    """Within the block, SIGINT and SIGTERM are noted instead of raised: results are to be written all the same."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self.count = 0
        self._handlers: dict[int, Any] = {}

    def note(self, number: int, _: FrameType | None = None) -> None:
        self.caught = self.caught or signal.Signals(number)
        self.count += 1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


# Runs a job to its end, or to that of a signal, calling the function now and then; returns the exit code.
Runner = Callable[[Job, Signals, Callable[[], None]], int]


def run_all(question: Question, runner: Runner, signals: Signals) -> list[Ended]:
    """One run after the other; after a signal the rest is NOT_RUN."""
    ended = []
    for number, system in enumerate(question.systems, 1):
        if signals.caught is not None:
            ended.append(Ended(system, NOT_RUN))
            continue
        begun, place = time.monotonic(), f"{number} of {len(question.systems)}: {system}"
        refusal = question.refusal(system)
        if refusal:
            ended.append(Ended(system, REFUSED, refusal))
        else:
            ended.append(_run(question, runner, signals, system, place))
        words = "done" if ended[-1].status == OK else ": ".join(filter(None, ended[-1][1:]))
        _say(f"{place}: {words} ({_since(begun)})")
    return ended


def _run(question: Question, runner: Runner, signals: Signals, system: str, place: str) -> Ended:
    job, begun = question.job(system), time.monotonic()

    def tick() -> None:
        _show(f"{place}, {_since(begun)}: {_last_line(job.log)}")

    if not sys.stderr.isatty():
        _say(place)
    code = runner(job, signals, tick)
    if (question.out / system / "summary.json").is_file():  # it ended, whatever came afterwards
        return Ended(system, OK)
    if signals.caught is not None:
        return Ended(system, INTERRUPTED)
    log = job.log.read_text(errors="replace") if job.log.is_file() else ""
    return Ended(system, *verdict(code, log))


def _since(begun: float) -> str:
    from avgpipe.cli.progress import spell_s  # which imports rich: the other commands do without

    return spell_s(time.monotonic() - begun)


def verdict(code: int, log: str) -> tuple[str, str]:
    """Status and reason of a run without a summary, from its exit code and what it said."""
    lines = [line for line in log.splitlines() if line.strip()]
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    short = next((line for line in lines if _NO_MEMORY.search(line)), None)
    if short is not None:
        return OUT_OF_MEMORY, _plain(short)
    if code == -signal.SIGKILL or any("was killed by SIGKILL" in line for line in said):
        return KILLED, _plain(said[-1]) if said else "by hand, or by the system when memory runs out"
    status = REFUSED if code == WRONG_ARGUMENTS else FAILED
    raised = [line for line in lines if _RAISED.match(line)]
    # The first is the cause: other workers then lost a peer, and last the command says which worker failed.
    if said and not (raised and "failed with exit code" in said[0]):
        return status, _plain(said[0])
    return status, _plain(raised[0] if raised else lines[-1]) if lines else f"exit code {code}"


def _plain(line: str) -> str:
    """Without what the end of a message says on resuming, and not too long: the log has it all."""
    line = re.sub(
        r"; (there is no checkpoint yet|go on from the last checkpoint with: .*)$", "", line.strip()
    )
    line = line.removeprefix(_SAID)
    return line if len(line) <= _REASON_LETTERS else line[: _REASON_LETTERS - 3].rstrip() + "..."


def run_in_process(
    job: Job, signals: Signals, tick: Callable[[], None], program: Sequence[str] = _PROGRAM
) -> int:
    """As a process in a session of its own, so that Ctrl-C reaches this one alone, which then ends it once."""
    tied = [sys.executable, "-m", "avgpipe.cli.process", str(os.getpid()), "0"]
    command = [*tied, *program, *job.words]
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while signals.caught is None:
            if _ended(process, _LOOK_S):
                return process.returncode
            tick()
        return _end(process, signals)
    finally:
        if process.poll() is None:
            _kill(process)


def _end(process: subprocess.Popen[bytes], signals: Signals) -> int:
    """Ask, then insist; another signal meanwhile shortens the wait."""
    for number, grace_s in _GRACE_S.items():
        process.send_signal(number)
        count, deadline = signals.count, time.monotonic() + grace_s
        while signals.count == count and time.monotonic() < deadline:
            if _ended(process, _LOOK_S):
                return process.returncode
    _kill(process)
    return process.returncode


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The run; its workers are tied to it and end, too."""
    process.kill()
    process.wait()


def _say(line: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{line}", file=sys.stderr, flush=True)


def _show(line: str) -> None:
    """On a terminal a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[: get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def _last_line(log: Path) -> str:
    """What a run said last."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines[:-1]) if line.strip()), "")
