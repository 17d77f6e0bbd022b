"""Which tests start processes of Python: those marked ``ranks`` or ``promise``; any other that starts one fails."""

from __future__ import annotations

import multiprocessing.process
import os
import re
import sys
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest

# Compilers, `ip` or `mount` are no processes in this sense, nor a bare interpreter that asks the system something (-S).
_PYTHON = re.compile(r"^([^-].*/)?(python[\d.]*|avgpipe|torchrun)$")
_IN_SCRIPT = re.compile(r"(^|[\s/'\"])python[\d.]*\b")
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
        scripts = [text for option, text in pairwise(words) if option == "-c" and "sh" in words]
        if (any(map(_PYTHON.search, words)) or any(map(_IN_SCRIPT.search, scripts))) and "-S" not in words:
            _started.append(" ".join(words))


def pytest_configure() -> None:
    sys.addaudithook(_see)
    start = multiprocessing.process.BaseProcess.start

    # A server may fork it, which this process does not hear of.
    def noted(self: multiprocessing.process.BaseProcess) -> None:
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
    if not item.get_closest_marker("ranks"):
        fixtures = [f for defs in item._fixtureinfo.name2fixturedefs.values() for f in defs]
        started = [*_started[item.stash[_BEFORE] :], *(p for f in fixtures for p in _of_fixtures.get(f, []))]
        assert not started, (
            f"a test that starts processes needs the mark 'ranks' or 'promise': {started[0][:200]}"
        )
    return result
