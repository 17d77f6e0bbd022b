"""Which tests start processes of Python: those marked ``ranks`` or ``promise``; any other that starts one fails."""

from __future__ import annotations

import multiprocessing.process
import os
import re
import sys
from collections.abc import Generator
from typing import Any

import pytest

MARKS = ("ranks", "promise")
# Compilers, `ip` or `mount` are no processes in this sense, nor a bare interpreter that asks the system something (-S).
_PYTHON = re.compile(r"(^|/)(python[\d.]*|avgpipe|torchrun)$")
_FORKS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

_started: list[str] = []  # since this process began to look
_BEFORE = pytest.StashKey[int]()
_of_fixtures: dict[Any, list[str]] = {}


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _FORKS:
        _started.append(event)
    elif event == "subprocess.Popen":
        command = arguments[1]
        words = command.split() if isinstance(command, str) else list(map(os.fsdecode, command))
        if any(map(_PYTHON.search, words)) and "-S" not in words:
            _started.append(" ".join(words))


def pytest_configure() -> None:
    sys.addaudithook(_see)
    start = multiprocessing.process.BaseProcess.start

    def noted(
        self: multiprocessing.process.BaseProcess,
    ) -> None:  # a server may fork it, which nothing here hears of
        _started.append(f"multiprocessing: {self.name}")
        start(self)

    multiprocessing.process.BaseProcess.start = noted  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    """A fixture of several tests starts its processes for all of them, whichever comes first."""
    before = len(_started)
    value = yield
    if fixturedef.scope != "function":
        _of_fixtures[fixturedef] = _started[before:]
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = len(_started)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    result = yield
    if not any(map(item.get_closest_marker, MARKS)):
        fixtures = [f for defs in item._fixtureinfo.name2fixturedefs.values() for f in defs]
        started = [*_started[item.stash[_BEFORE] :], *(p for f in fixtures for p in _of_fixtures.get(f, []))]
        assert not started, f"a test that starts processes needs the mark 'ranks': {started[0][:200]}"
    return result
