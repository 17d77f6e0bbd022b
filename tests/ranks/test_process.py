"""Processes that end with their parent, and on signals while a library holds the main thread."""

import signal
import subprocess
import sys

import pytest

from tests.cli.command import alive, environment, wait_for

BUSY = """
import ctypes, sys
from avgpipe.ranks.process import ending_on_signals
with ending_on_signals(lambda s: print(s.name, flush=True), {grace}):
    print("ready", flush=True)
    # sleeps on whatever signals do, as a library's wait may
    libc = ctypes.CDLL(None)
    for _ in range(600):
        libc.usleep(100_000)
"""
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
subprocess.run([sys.executable, "-m", "avgpipe.ranks.process", str(os.getpid()), "stdout", *command])
"""


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "grace"), [(signal.SIGINT, 60.0), (signal.SIGTERM, 0.0), (signal.SIGTERM, 0.2)]
)
def test_a_signal_ends_a_process_that_waits_in_a_library(number, grace):
    process = start(BUSY.format(grace=grace))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert output == f"{number.name}\n"


def test_a_second_signal_cuts_the_grace_short():
    process = start(BUSY.format(grace=60.0))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT


def test_other_signals_end_nothing_and_cut_no_grace_short():
    """As SIGCHLD, which torch handles while a DataLoader has processes."""
    code = """
import os, signal, sys, time
from avgpipe.ranks.process import ending_on_signals
signal.signal(signal.SIGCHLD, lambda *_: None)
with ending_on_signals(lambda s: sys.exit("ended"), 60.0):
    os.kill(os.getpid(), signal.SIGCHLD)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGCHLD)
print("went on")
"""
    output, _ = (process := start(code)).communicate(timeout=20)
    assert (process.returncode, output) == (0, "went on\n")


def test_handlers_come_back():
    code = """
import signal
from avgpipe.ranks.process import ending_on_signals
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
with ending_on_signals(print):
    pass
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
assert signal.set_wakeup_fd(-1) == -1
"""
    assert start(code).wait(timeout=20) == 0


def test_a_tied_process_ends_when_its_parent_is_killed():
    parent = start(PARENT)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(timeout=20)
    wait_for(lambda: not alive(child), timeout_s=20)


def test_a_process_whose_parent_has_ended_before_does_not_begin():
    command = [
        sys.executable,
        "-m",
        "avgpipe.ranks.process",
        "1",
        "stdout",
        sys.executable,
        "-c",
        "print('begun')",
    ]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=20)
    assert run.returncode == 128 + signal.SIGTERM
    assert run.stdout == ""
