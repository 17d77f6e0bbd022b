"""Strikes at a run from outside at the drawn times, and ends a run that publishes no more events."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from avgpipe_lab.bench.chaos.draw import ISOLATED, Scenario, Strike
from avgpipe_lab.bench.chaos.job import VARIABLE
from avgpipe_lab.bench.hosts import CommandsOnHosts

_LOOK_S = 0.1
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_STARTED = re.compile(r"avgpipe: pipeline (\d+) is started, and joins")

Event = dict[str, Any]


class Watcher(threading.Thread):
    """Watches a run through the journals of its processes.

    Args:
        mark: What the processes of the run have in their environment, see :func:`has_mark`.
        patience_s: Seconds without an event after which the run is ended.
        hosts: The commands of a run over several hosts.
        together: File to make once all hosts train.

    Attributes:
        strikes: Faults from outside that have happened, as events.
        is_hung: Whether the run was ended.
    """

    def __init__(
        self,
        scenario: Scenario,
        journals: Path,
        mark: str,
        patience_s: float,
        hosts: CommandsOnHosts | None,
        together: Path,
    ) -> None:
        super().__init__(name="chaos-watch", daemon=True)
        self._due = list(scenario.strikes)
        self._patience_s = patience_s
        self._journals, self._mark = journals, mark
        self._isolates = scenario.way in ISOLATED
        self._hosts, self._together = hosts, together
        self._begun_at: float | None = None
        self._cut: dict[int, float] = {}  # hosts that are cut off, and until when
        self._over = threading.Event()
        self.strikes: list[Event] = []
        self.is_hung = False

    def stop(self) -> None:
        """End; hosts that were cut off are connected again."""
        self._over.set()
        self.join()
        self._reconnect(float("inf"))

    def run(self) -> None:
        heard_at = time.monotonic()
        while not self._over.wait(_LOOK_S):
            events = read(self._journals)
            heard_at = max([heard_at, *(event["at_s"] for event in events)])
            self._look_for_begin(events)
            self._reconnect(time.monotonic())
            if self._is_due() and self._strike(events, self._due[0]):
                self._due.pop(0)
            if time.monotonic() > heard_at + self._patience_s:
                self.is_hung = True
                if self._hosts is None:
                    os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends all its processes
                return

    def _look_for_begin(self, events: list[Event]) -> None:
        results = [event for event in events if event["event"] == "result"]
        if self._begun_at is None and self._hosts is None and results:
            self._begun_at = min(event["at_s"] for event in results)
        elif self._begun_at is None and self._hosts is not None:
            training = {event["pipeline"] for event in results}
            if len(training) == self._hosts.net.hosts:
                self._begun_at = time.monotonic()
                self._together.touch()

    def _is_due(self) -> bool:
        if self._begun_at is None or not self._due:
            return False
        return time.monotonic() > self._begun_at + self._due[0].at_s

    def _reconnect(self, now: float) -> None:
        for host, until in list(self._cut.items()):
            if now >= until and self._hosts is not None:
                self._hosts.net.connect(host)
                del self._cut[host]

    def _strike(self, events: list[Event], strike: Strike) -> bool:
        """Strike at a process that trains, not one that ends or has ended. Return False if that has to wait."""
        ended = {event["process"] for event in events if event["event"] in ("end", "error")}
        training = {event["process"]: event for event in events if event["event"] == "result"}
        hit = {(e["pipeline"], e["life"]) for e in [*events, *self.strikes] if e["event"] == "fault"}
        living = [p for p in sorted(training) if p not in ended and has_mark(p, self._mark)]
        if self._isolates:  # a pipeline has to remain: else all start over, or the run ends
            living = [p for p in living if (training[p]["pipeline"], training[p]["life"]) not in hit]
            if len({training[p]["pipeline"] for p in living}) < 2:
                return False
        if strike.kind not in _SIGNALS:
            return self._strike_host({training[p]["pipeline"]: training[p] for p in living}, strike)
        if living:
            process = living[strike.choice % len(living)]
            at_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(process, _SIGNALS[strike.kind])
                self._note(at_s, f"{strike.kind} at outside: process {process}", training[process])
        return True

    def _strike_host(self, training: dict[int, Event], strike: Strike) -> bool:
        """Strike at a host that has joined and trains; return False if that has to wait."""
        assert self._hosts is not None
        hosts = {host: of for host, of in _pipelines(self._hosts).items() if of in training}
        if not hosts:
            return False
        host = sorted(hosts)[strike.choice % len(hosts)]
        at_s = time.monotonic()
        if strike.kind == "lost host":
            self._hosts.commands[host].kill()
        else:
            self._hosts.net.connect(host, False)
            self._cut[host] = float("inf") if strike.for_s is None else at_s + strike.for_s
        about = {"host": host, "for_s": strike.for_s}
        self._note(at_s, f"{strike.kind} at outside: host {host}", training[hosts[host]], **about)
        return True

    def _note(self, at_s: float, text: str, last: Event, **about: Any) -> None:
        who = {name: last[name] for name in ("process", "rank", "pipeline", "life")}
        self.strikes.append({"at_s": at_s, "event": "fault", "text": text, **who, **about})


def _pipelines(hosts: CommandsOnHosts) -> dict[int, int]:
    """Return the pipeline of each host that has joined."""
    found = {}
    for host, _, line in list(hosts.said):
        if match := _STARTED.match(line):
            found[host] = int(match[1])
    return found


def read(journals: Path) -> list[Event]:
    """Read the journals of processes; the last line may be incomplete."""
    lines = [line for path in journals.glob("*.jsonl") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def has_mark(process: int, mark: str) -> bool:
    """Return whether a process belongs to the run of this mark."""
    try:
        return f"{VARIABLE}={mark}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
