"""Tests here run in a process of their own, which has the simulated device and no other test.

A process has one accelerator for good, and torch counts its devices when autograd first runs. The process is started by
the first test, and again by the first one after a crash.
"""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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


def pytest_collection_modifyitems(items):
    reason = unavailable()
    for item in items:
        if reason is not None and item.path.parent.name == "simulated_device":
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test function in that process, with its parameters; they are values."""
    global _process
    if _process is None:
        _process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    future = _process.submit(_call, pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    try:
        future.result()
    except BrokenProcessPool:
        _process = None
        pytest.fail("the process of the simulated device has crashed, or cannot load it")
    finally:
        if not future.done():  # the time limit
            for process in list(_process._processes.values()):
                process.kill()
            _process = None
    return True


def pytest_sessionfinish():
    if _process is not None:
        _process.shutdown(cancel_futures=True)
