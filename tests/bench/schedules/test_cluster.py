"""Workers answer, or are gone."""

import signal
import subprocess
import sys
import time

import pytest

from avgpipe.bench.schedules import cluster
from avgpipe.bench.schedules.cluster import run_workers
from avgpipe.errors import PipelineError
from tests.cli.command import ROOT, alive, environment, wait_for

HERE = "tests.bench.schedules.targets"


def workers_of(folder, count=2):
    return [int(path.read_text()) for path in folder.iterdir() if path.read_text()][:count]


def test_every_rank_answers():
    said = []
    answers = run_workers(f"{HERE}:adds", 2, {"a": 1, "b": 2}, timeout_s=60, say=said.append)
    assert answers == [{"sum": 3, "rank": rank, "ranks": 2} for rank in range(2)]
    assert set(said) <= {"rank 0 adds"}  # of rank 0 alone, if it was still there to be seen


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_arguments_are_not_in_the_command_line():
    """Which every user of the host may read."""
    (words,) = run_workers(f"{HERE}:command_line", 1, {"secret": "a path"}, timeout_s=60)
    assert f"{HERE}:command_line" in words
    assert not any("secret" in word or "a path" in word for word in words)


def test_ranks_find_each_other():
    assert run_workers(f"{HERE}:meets", 2, {}, timeout_s=60) == [3.0, 3.0]


def test_a_failure_is_told_with_its_reason_and_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "_GRACE_S", 0.5)
    with pytest.raises(
        PipelineError, match=r"worker 1 of 2 failed \(exit code 1\): ValueError: one is enough"
    ):
        run_workers(f"{HERE}:fails", 2, {"folder": str(tmp_path)}, timeout_s=60)
    assert not any(map(alive, workers_of(tmp_path)))


def test_workers_that_take_too_long_are_ended(tmp_path):
    with pytest.raises(PipelineError, match="not done after 3 s"):
        run_workers(f"{HERE}:sleeps", 1, {"folder": str(tmp_path)}, timeout_s=3)
    assert not any(map(alive, workers_of(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_go_with_their_parent(tmp_path, number):
    code = (
        "from avgpipe.bench.schedules.cluster import *\n"
        f"with ending_by_signal(): run_workers('{HERE}:sleeps', 2, {{'folder': {str(tmp_path)!r}}}, timeout_s=90)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(workers_of(tmp_path)) == 2)
        parent.send_signal(number)
        assert parent.wait(20) != 0
        wait_for(lambda: not any(map(alive, workers_of(tmp_path))), 20)
    finally:
        parent.kill()


def test_nothing_waits_when_a_worker_cannot_be_started():
    begin = time.monotonic()
    with pytest.raises(PipelineError, match=r"No module named 'tests\.nothing'"):
        run_workers("tests.nothing:here", 1, {}, timeout_s=60)
    assert time.monotonic() - begin < 30
