"""Processes that end with their parent."""

import signal
import subprocess
import sys

import pytest

from tests.cli.command import alive, environment
from tests.patience import limit, wait_until

PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
subprocess.run([sys.executable, "-m", "avgpipe.ranks.process", str(os.getpid()), "stdout", *command])
"""


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.mark.promise
def test_a_tied_process_ends_when_its_parent_is_killed():
    parent = start(PARENT)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(timeout=limit(20))
    wait_until(lambda: not alive(child), 20)


@pytest.mark.promise
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
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit(20))
    assert run.returncode == 128 + signal.SIGTERM
    assert run.stdout == ""
