"""A run that is followed while it goes on."""

from __future__ import annotations

import fcntl
import json
import os

import pytest

from avgpipe_lab.pages.live import LiveRun
from tests.lab.pages.folders import BATCH_S, summary, train_row, valid_row, write_run


def begin(path):
    """The folder of a run that has validated and not trained."""
    write_run(path, batches=0, ended=False)
    return path


def add(path, *rows, end="\n"):
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + end)


def looked(path):
    live = LiveRun(path)
    live.look()
    return live


def test_what_a_run_has_come_to(tmp_path):
    path = begin(tmp_path / "run")
    add(path, *map(train_row, range(100)), valid_row(100))
    live = looked(path)
    progress = live.progress
    assert (progress.batches, progress.total, progress.samples) == (100, 1000, 800)
    assert progress.samples_per_second == pytest.approx(8 / BATCH_S)
    assert progress.left_s == pytest.approx(900 * BATCH_S)
    assert (progress.lr, progress.valid["batch"], progress.before["batch"]) == (0.01, 100, 0)
    assert (live.busy, live.peaks[1], live.drift) == ([0.8, 0.6], 2**27, pytest.approx(0.01))
    assert live.status == "running"


def test_rows_are_read_as_they_come_and_torn_ones_once_they_are_whole(tmp_path):
    path = begin(tmp_path / "run")
    live = looked(path)
    assert live.progress.batches == 0
    text = json.dumps(train_row(0))
    add(path, end=text[:30])
    live.look()
    assert live.progress.batches == 0
    add(path, end=text[30:] + "\n")
    live.look()
    assert live.progress.batches == 1
    add(path, end="no row\n")
    add(path, train_row(1))
    live.look()
    assert live.progress.batches == 2


def test_what_a_lost_pipeline_had_of_a_batch_comes_later_and_changes_no_count(tmp_path):
    path = begin(tmp_path / "run")
    add(path, *map(train_row, range(6)), {**train_row(3), "taken_over": True})
    assert looked(path).progress.batches == 6


def test_a_resumed_run_takes_rows_back(tmp_path):
    path = begin(tmp_path / "run")
    add(path, *map(train_row, range(50)))
    live = looked(path)
    assert live.progress.batches == 50
    kept = "".join(json.dumps(row) + "\n" for row in [valid_row(0), *map(train_row, range(20))])
    (path / "new").write_text(kept)
    os.replace(path / "new", path / "metrics.jsonl")
    live.look()
    assert live.progress.batches == 20
    assert len(live.progress.losses) == 20


def test_a_run_ends_with_its_summary(tmp_path):
    path = begin(tmp_path / "run")
    (path / "summary.json").write_text(json.dumps(summary(10)))
    assert looked(path).status == "ended"


def test_the_summary_of_a_run_that_was_resumed_since_counts_no_more(tmp_path):
    path = begin(tmp_path / "run")
    (path / "summary.json").write_text(json.dumps(summary(10)))
    os.utime(path / "summary.json", (1.0, 1.0))
    assert looked(path).status == "running"


def silent(path):
    """Nothing was written for long."""
    for file in path.iterdir():
        os.utime(file, (1.0, 1.0))


def test_a_run_without_a_keeper_that_is_silent_has_stopped(tmp_path):
    path = begin(tmp_path / "run")
    silent(path)
    assert looked(path).status == "stopped"


@pytest.mark.parametrize("kept", ["checkpoints/last", "."])
def test_a_run_with_a_keeper_goes_on_however_silent(kept, tmp_path):
    path = begin(tmp_path / "run")
    (path / kept).mkdir(parents=True, exist_ok=True)
    silent(path)
    descriptor = os.open(path / kept / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert looked(path).status == "running"
    finally:
        os.close(descriptor)
    assert looked(path).status == "stopped"


def test_the_age_of_a_checkpoint(tmp_path):
    path = begin(tmp_path / "run")
    assert looked(path).checkpoint_age_s is None
    (path / "checkpoints" / "last").mkdir(parents=True)
    (path / "checkpoints" / "last" / "manifest.json").write_text("{}")
    assert 0 <= looked(path).checkpoint_age_s < 60


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none: no such folder; give the folder that avgpipe train writes"):
        LiveRun(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no run"):
        LiveRun(tmp_path)


def test_a_run_without_validations_tells_its_length_all_the_same(tmp_path):
    path = begin(tmp_path / "run")
    (path / "metrics.jsonl").write_text(json.dumps(train_row(0, total_batches=7)) + "\n")
    live = looked(path)
    assert (live.progress.batches, live.progress.total, live.progress.valid) == (1, 7, {})
