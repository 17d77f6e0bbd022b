"""Signals end a process while a library holds its main thread, or have it end by itself; others ask what it does."""

import signal
import subprocess
import sys

import pytest

from tests.cli.command import environment
from tests.patience import limit, wait_until

BUSY = """
import ctypes, sys
from avgpipe.ranks.signals import ending_on_signals
with ending_on_signals(lambda s: print(s.name, flush=True), {grace}):
    print("ready", flush=True)
    # sleeps on whatever signals do, as a library's wait may
    libc = ctypes.CDLL(None)
    for _ in range(600):
        libc.usleep(100_000)
"""


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.mark.promise
@pytest.mark.parametrize(
    ("number", "grace"), [(signal.SIGINT, 60.0), (signal.SIGTERM, 0.0), (signal.SIGTERM, 0.2)]
)
def test_a_signal_ends_a_process_that_waits_in_a_library(number, grace):
    process = start(BUSY.format(grace=grace))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=limit(20))
    assert process.returncode == 128 + number
    assert output == f"{number.name}\n"


@pytest.mark.promise
def test_a_signal_ends_a_process_whose_output_is_closed():
    """As in a pipe, whose reader has ended by the same signal."""
    process = start(BUSY.format(grace=0.0))
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGINT)
    assert process.wait(limit(20)) == 128 + signal.SIGINT


@pytest.mark.promise
def test_a_second_signal_cuts_the_grace_short():
    process = start(BUSY.format(grace=60.0))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=limit(20))
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.promise
def test_other_signals_end_nothing_and_cut_no_grace_short():
    """As SIGCHLD, which torch handles while a DataLoader has processes."""
    code = """
import os, signal, sys, time
from avgpipe.ranks.signals import ending_on_signals
signal.signal(signal.SIGCHLD, lambda *_: None)
with ending_on_signals(lambda s: sys.exit("ended"), 60.0):
    os.kill(os.getpid(), signal.SIGCHLD)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGCHLD)
print("went on")
"""
    output, _ = (process := start(code)).communicate(timeout=limit(20))
    assert (process.returncode, output) == (0, "went on\n")


@pytest.mark.promise
def test_handlers_come_back():
    code = """
import signal
from avgpipe.ranks.signals import ending_on_signals
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
with ending_on_signals(print):
    pass
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
assert signal.set_wakeup_fd(-1) == -1
"""
    assert start(code).wait(timeout=limit(20)) == 0


TRAINS = """
import signal, sys, threading
from avgpipe.ranks.signals import Answers, answering, ending_on_signals
told = threading.Event()
answers = Answers(told.set, {within}, lambda: "computing")
with ending_on_signals(lambda s: print(s.name, flush=True), {grace}, signal.{by}):
    with answering(answers):
        print("ready", flush=True)
        told.wait()
        print("told", flush=True)
        sys.stdin.readline()
print("saved")
"""


def trains(by="SIGTERM", within=60.0, grace=0.0):
    code = TRAINS.format(by=by, within=within, grace=grace)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.promise
@pytest.mark.parametrize("by", ["SIGTERM", "SIGUSR2"])
def test_a_process_that_is_preempted_ends_by_itself(by):
    process = trains(by)
    process.send_signal(signal.Signals[by])
    assert process.communicate("\n", timeout=limit(20)) == ("told\nsaved\n", "")
    assert process.returncode == 0


@pytest.mark.promise
@pytest.mark.parametrize("by", ["SIGTERM", "SIGUSR2"])
def test_a_process_that_is_preempted_ends_in_time(by):
    process = trains(by, within=0.2)
    process.send_signal(signal.Signals[by])
    assert process.stdout.read() == "told\nSIGTERM\n"
    assert process.wait(limit(20)) == 128 + signal.SIGTERM


@pytest.mark.promise
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_is_preempted(number):
    process = trains()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told\n"
    process.send_signal(number)
    assert process.wait(limit(20)) == 128 + number


@pytest.mark.promise
@pytest.mark.parametrize("order", ["SIGTERM SIGUSR2", "SIGUSR2 SIGTERM"])
def test_a_preempted_rank_is_not_ended_by_a_signal_to_all(order):
    process = trains("SIGUSR2", grace=60.0)
    for name in order.split():
        process.send_signal(signal.Signals[name])
    assert process.communicate("\n", timeout=limit(20)) == ("told\nsaved\n", "")


@pytest.mark.promise
def test_a_process_is_asked_what_it_is_doing():
    process = trains()
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "avgpipe: computing" in process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    assert process.communicate("\n", timeout=limit(20))[0] == "told\nsaved\n"
