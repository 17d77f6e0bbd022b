"""Tests here run in a process of their own, which has the simulated device and no other test.

A process has one accelerator for good, and torch counts its devices when autograd first runs. The process is started
before the first test, and again after a crash.
"""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

import pytest

from tests.simulated_device import load, unavailable

_process: ProcessPoolExecutor | None = None


def _begin() -> None:
    import torch._dynamo  # the first optimizer would import it

    import avgpipe.pipeline  # noqa: F401

    torch.set_num_threads(1)
    load()


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name)(**arguments)


def _is_here(item: Any) -> bool:
    return item.path.parent.name == "simulated_device"


def pytest_collection_modifyitems(items):
    reason = unavailable()
    for item in filter(_is_here, items):
        item.add_marker(pytest.mark.ranks)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _start() -> ProcessPoolExecutor:
    global _process
    if _process is None:
        _process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
    return _process


def pytest_collection_finish(session):
    """Compile the device and load it before the first test, whose time limit is not meant for that."""
    if not session.config.option.collectonly and unavailable() is None and any(map(_is_here, session.items)):
        with suppress(BrokenProcessPool):  # which the tests report
            _start().submit(int).result()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test function in that process, with its parameters; they are values."""
    global _process
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    future: Future[None] = Future()
    try:
        future = _start().submit(_call, pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
        future.result()
    except BrokenProcessPool:
        _process = None
        pytest.fail("the process of the simulated device has crashed, or cannot load it")
    finally:
        if not future.done() and _process is not None:  # the time limit
            for process in list(_process._processes.values()):
                process.kill()
            _process = None
    return True


def pytest_sessionfinish():
    if _process is not None:
        _process.shutdown(cancel_futures=True)
