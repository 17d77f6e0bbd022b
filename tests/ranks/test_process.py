"""Processes that end with their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from avgpipe.ranks.environment import STORE_FILE
from avgpipe.ranks.process import error_of, report_lost_peers, run_folder, unready
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


def test_folders_of_launchers_that_were_killed_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, others = tmp_path / "avgpipe-left", tmp_path / "avgpipe-of-others"
    for folder in (left, others):
        folder.mkdir()
        (folder / "store").touch()
    (left / "owner").touch()
    with run_folder() as first, run_folder() as second:
        assert set(tmp_path.iterdir()) == {first, second, others}
        assert first.stat().st_mode & 0o777 == 0o700
    assert [*tmp_path.iterdir()] == [others]


def test_a_rank_that_was_not_ready_when_others_missed_it_stays_the_one_to_blame(tmp_path: Path) -> None:
    assert unready(tmp_path, range(3)) == []  # of scripts without a Pipeline
    for second, name in enumerate(["ready-0", "ready-2", "missed-0", "missed-2"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (second, second))
        assert unready(tmp_path, range(3)) == ([1, 2] if second == 0 else [1])
    (tmp_path / "ready-1").touch()
    assert unready(tmp_path, range(3)) == [1]
    os.utime(tmp_path / "ready-1", (1.5, 1.5))
    assert unready(tmp_path, range(3)) == []


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "known"),
    [(Textless(), "Textless: Textless"), (OSError("a\udcffb \ud800"), "OSError: a\\udcffb \\ud800")],
)
def test_an_error_of_a_script_that_no_file_can_hold_is_reported(
    error: Exception, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: shown.append(given[1]))
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "store"))
    monkeypatch.setenv("RANK", "1")
    report_lost_peers.__wrapped__()
    sys.excepthook(type(error), error, None)
    assert error_of(tmp_path, 1) == known
    assert shown == [error]
