"""The runs of ``avgpipe compare``: one ``avgpipe train`` after the other, and what became of each."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from avgpipe import systems
from avgpipe.cli.config import CompareConfig, LearningOptions, TrainConfig
from avgpipe.cli.errors import WRONG_ARGUMENTS
from avgpipe.cli.folder import duration
from avgpipe.cli.options import words
from avgpipe.cli.output import tell
from avgpipe.cli.resolve import resolve
from avgpipe.ranks.launch import tied
from avgpipe.report.compare import FAILED, INTERRUPTED, KILLED, NOT_RUN, OK, OUT_OF_MEMORY, REFUSED
from avgpipe.systems import SYSTEMS

_LOOK_S = 0.25  # how often a run is looked after
_GRACE_S = {signal.SIGINT: 20.0, signal.SIGTERM: 5.0}  # for a run to end by itself, then SIGKILL
_SAID = "avgpipe: error: "
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE
)
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_REASON_LETTERS = 200
_PROGRAM = (sys.executable, "-m", "avgpipe.cli.main")
_COMMON = tuple(f.name for f in fields(LearningOptions) if f.name not in ("json", "given"))


# ---- which runs ------------------------------------------------------------------------------------------------------


def common_options(config: CompareConfig) -> dict[str, Any]:
    """The options of ``avgpipe train`` that were given, and are the same for all systems."""
    return {name: value for name, value in config.explicit.items() if name in _COMMON}


def options_of(config: CompareConfig, system: str) -> dict[str, Any]:
    """Those that were given and that the system leaves to the caller, and what makes the run the system's."""
    row, found = SYSTEMS[system], common_options(config)
    if config.pipelines is not None and "pipelines" not in row:
        found["pipelines"] = config.pipelines
    wanted = config.micro_batches
    # PipeDream, too, has whole batches in flight.
    splits = wanted is not None and systems.micro_batches(system, config.stages, None, wanted) >= wanted
    if splits and "micro_batches" not in row:
        found["micro_batches"] = wanted
    return {**found, "system": system, "stages": config.stages, "out": str(Path(config.out) / system)}


def refusal(config: CompareConfig, system: str) -> str:
    """Why a system cannot do what was asked; "" if it can, as far as that shows without the data."""
    try:
        resolve(TrainConfig.of(**options_of(config, system)))
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


class Job(NamedTuple):
    """A system's run: the words after ``avgpipe``, and the file for what the run says."""

    system: str
    words: list[str]
    log: Path

    @classmethod
    def of(cls, config: CompareConfig, system: str) -> Job:
        options = options_of(config, system)
        return cls(
            system, ["train", options.pop("workload"), *words(options)], Path(config.out) / f"{system}.log"
        )


class SystemRun(NamedTuple):
    """What became of a system's run: one of the words of ``report.compare``, and why."""

    system: str
    status: str
    reason: str = ""


# ---- one after the other ---------------------------------------------------------------------------------------------


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


def run_all(config: CompareConfig, runner: Runner, signals: Signals) -> list[SystemRun]:
    """One run after the other; after a signal the rest is NOT_RUN."""
    ended = []
    for number, system in enumerate(config.systems, 1):
        if signals.caught is not None:
            ended.append(SystemRun(system, NOT_RUN))
            continue
        begun, place = time.monotonic(), f"{number} of {len(config.systems)}: {system}"
        refused = refusal(config, system)
        run = SystemRun(system, REFUSED, refused) if refused else _run(config, system, runner, signals, place)
        ended.append(run)
        result = "done" if run.status == OK else ": ".join(filter(None, run[1:]))
        _say(f"{place}: {result} ({duration(time.monotonic() - begun)})")
    return ended


def _run(config: CompareConfig, system: str, runner: Runner, signals: Signals, place: str) -> SystemRun:
    job, begun = Job.of(config, system), time.monotonic()

    def log() -> list[str]:
        text = job.log.read_text(errors="replace") if job.log.is_file() else ""
        return [line for line in text.splitlines() if line.strip()]

    if not sys.stderr.isatty():
        _say(place)
    code = runner(
        job, signals, lambda: tell(f"{place}, {duration(time.monotonic() - begun)}: {(log() or [''])[-1]}")
    )
    if (job.log.parent / system / "summary.json").is_file():  # it ended, whatever came afterwards
        return SystemRun(system, OK)
    if signals.caught is not None:
        return SystemRun(system, INTERRUPTED)
    return SystemRun(system, *verdict(code, "\n".join(log())))


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
        r"; (there is no checkpoint yet|resume from the last checkpoint with: .*)$", "", line.strip()
    )
    line = line.removeprefix(_SAID)
    return line if len(line) <= _REASON_LETTERS else line[: _REASON_LETTERS - 3].rstrip() + "..."


def run_in_process(
    job: Job, signals: Signals, tick: Callable[[], None], program: Sequence[str] = _PROGRAM
) -> int:
    """Run in a new session, so that Ctrl-C goes to this process only, which then ends the run once.

    After a signal the run is asked to end, then made to; another signal meanwhile shortens the wait. Its workers are
    tied to it and end, too.
    """
    command = tied("stdout", *program, *job.words)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, tick, signals, 0, math.inf)
        for number, grace_s in _GRACE_S.items():
            if process.returncode is None:
                process.send_signal(number)
                _wait(process, tick, signals, signals.count, grace_s)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    return process.returncode


def _wait(
    process: subprocess.Popen[bytes], tick: Callable[[], None], signals: Signals, count: int, seconds: float
) -> None:
    """Wait so long for the process to end, or until there were more signals than ``count``."""
    deadline = time.monotonic() + seconds
    while signals.count == count and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
            return
        tick()


def _say(line: str) -> None:
    tell("")
    print(line, file=sys.stderr, flush=True)
