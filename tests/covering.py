"""``pytest -p tests.covering``: which tests run which lines of avgpipe, in the processes that they start too.

The settings are those of ``[tool.coverage]`` in pyproject.toml. Every process leaves a file beside ``COVERAGE_FILE``;
``coverage combine`` makes one of them. The contexts of its lines are the tests that ran them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
TEST = "PYTEST_CURRENT_TEST"  # pytest's own variable, which processes that a test starts find

_measured: Any = None


def pytest_configure() -> None:
    global _measured
    os.environ["COVERAGE_PROCESS_START"] = str(SETTINGS)
    _measured = coverage.Coverage(config_file=str(SETTINGS))
    _measured.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _measured.switch_context("")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    _measured.stop()
    _measured.save()


def in_rank() -> None:
    """In a rank that a server forked: its lines are those of the test that asked for it, not of the server's first."""
    measured = coverage.Coverage.current()
    if measured is not None and TEST in os.environ:
        measured.switch_context(os.environ[TEST])


def test_of(context: str) -> str:
    """The test that a context of a line names, "" if none."""
    return re.sub(r" \((setup|call|teardown)\)$", "", context.rpartition("|")[2])
