"""Which of the failed workers is to blame."""

import signal

from avgpipe.cli.launch import Ended, _first

LOST, TERMINATED = 3, -signal.SIGTERM


def test_a_killed_worker_comes_before_those_that_lost_it():
    assert _first({0: (LOST, 10), 1: (-signal.SIGKILL, 11), 2: (TERMINATED, 11)}) == 1


def test_a_refusal_comes_before_its_consequences():
    assert _first({0: (LOST, 10), 1: (2, 10)}) == 1


def test_a_failure_comes_before_its_consequences():
    assert _first({0: (LOST, 9), 1: (128 + signal.SIGTERM, 9), 2: (1, 10)}) == 2


def test_among_equals_the_earliest():
    assert _first({0: (1, 12), 1: (1, 11)}) == 1


def test_the_reason_names_signal_or_exit_code():
    assert Ended([0, -signal.SIGKILL], 1).reason().startswith("was killed by SIGKILL")
    assert Ended([4, 0], 0).reason() == "failed with exit code 4"
