"""``pytest -p tests.covering``: which tests run which lines of avgpipe, in the processes that they start too.

The settings are those of ``[tool.coverage]`` in pyproject.toml. Every process leaves a file beside ``COVERAGE_FILE``;
``coverage combine`` makes one of them. The contexts of its lines are the tests that ran them.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coverage
import pytest

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
TEST = "PYTEST_CURRENT_TEST"  # pytest's own variable, which processes that a test starts find

os.environ["COVERAGE_PROCESS_START"] = str(SETTINGS)
_measured = coverage.Coverage(config_file=str(SETTINGS))
_measured.start()  # before anything imports avgpipe


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


@contextmanager
def in_rank() -> Iterator[None]:
    """Measure a rank in its own data file, for the test that started it: the server that forked it is measured too."""
    measured = coverage.Coverage(config_file=str(SETTINGS), data_suffix=True)
    measured.start()
    measured.switch_context(os.environ.get(TEST, ""))
    try:
        yield
    finally:
        measured.stop()
        measured.save()
