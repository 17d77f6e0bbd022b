"""What holds for all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import parts, patience, processes
from tests.happens_before import plugin
from tests.happens_before.plugin import _in_order  # noqa: F401 (a fixture of all tests)
from tests.scripts import write_script  # noqa: F401 (a fixture of all tests)

# A background job of a shell ignores SIGINT, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples come is a question of the machine's load.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config):
    config.pluginmanager.register(processes)
    config.pluginmanager.register(parts)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """The time limit of a test grows with the machine's load, before it begins and while it runs."""
    import pytest_timeout  # which the GPU suite does without

    deadline = patience.Deadline(settings.timeout)
    scaled = settings._replace(timeout=round(patience.limit(settings.timeout), 1))
    pytest_timeout.pytest_timeout_set_timer(item, scaled)
    fail = signal.getsignal(signal.SIGALRM)
    if not callable(fail):  # the limit is a thread's
        return True

    def look_again(number, frame):
        left_s = deadline.left_s
        if left_s <= 0:
            fail(number, frame)
        else:
            signal.setitimer(signal.ITIMER_REAL, left_s)

    signal.signal(signal.SIGALRM, look_again)
    return True


def pytest_runtest_setup(item):
    """What needs a GPU is skipped without one, or fails where one is required."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        missing = "no CUDA device, or a CPU build of torch"
        if os.environ.get("AVGPIPE_REQUIRE_CUDA") == "1":
            pytest.fail(f"AVGPIPE_REQUIRE_CUDA=1, but: {missing}")
        pytest.skip(missing)


def pytest_addoption(parser):
    parts.add_option(parser)
    parser.addoption(
        plugin.OPTION, action="store_true", help="check the order of streams; see tests/happens_before"
    )


def pytest_terminal_summary(terminalreporter):
    plugin.summarize(
        [
            report
            for reports in terminalreporter.stats.values()
            for report in reports
            if hasattr(report, "when")
        ],
        terminalreporter.write_line,
    )
