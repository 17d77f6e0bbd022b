"""How long tests wait: the one place that scales their timeouts.

A limit in a test is written for an idle machine. ``limit`` multiplies it by the processes that want to run for each
core, or by ``AVGPIPE_TEST_PATIENCE`` where that is set, so that load alone fails no test. Time limits under test, such
as ``timeout_s=2`` of a Pipeline, are not scaled where the test waits for them to pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

VARIABLE = "AVGPIPE_TEST_PATIENCE"
_MOST = 20.0  # a test that hangs should end some day
T = TypeVar("T")


def patience() -> float:
    """The factor of all wall limits at this moment: 1 on an idle machine."""
    if chosen := os.environ.get(VARIABLE):
        return float(chosen)
    return min(_MOST, max(1.0, _wanting() / len(os.sched_getaffinity(0))))


def _wanting() -> float:
    """Processes that want a core: now, or over the last minute, whichever are more."""
    _, _, behind = Path("/proc/stat").read_text().rpartition("procs_running ")
    return max(float(behind.split()[0]), os.getloadavg()[0])


def limit(seconds: float) -> float:
    """How long to wait for what takes ``seconds`` at most on an idle machine."""
    return seconds * patience()


class Deadline:
    """A limit that grows while it runs, if the machine gets busier."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._begin, self._most = seconds, time.monotonic(), patience()

    @property
    def left_s(self) -> float:
        self._most = max(self._most, patience())
        return self._begin + self._seconds * self._most - time.monotonic()

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0


def wait_until(condition: Callable[[], T], seconds: float = 60) -> T:
    """Look until ``condition()`` is true, as another thread or process has its own time; returns its value."""
    deadline = Deadline(seconds)
    while not (value := condition()):
        assert not deadline.has_passed, "the condition did not come true in time"
        time.sleep(0.01)
    return value


class SharedMemory:
    """The names in /dev/shm, to see that what runs leaves none behind. Others' programs come and go there, too."""

    def __init__(self) -> None:
        self._before = self._names()

    def _names(self) -> set[str]:
        """Return all but semaphores, which multiprocessing makes and removes for each of its processes."""
        return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: self._names() <= self._before, 10)
