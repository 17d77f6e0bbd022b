"""A disk that takes nothing for a while costs no run, and weights that are not finite replace no checkpoint."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch

from avgpipe.checkpoint import verify_checkpoint
from avgpipe.cli import resolve, training
from avgpipe.cli.folder import RunFolder
from avgpipe.pipeline import Pipeline
from avgpipe.report.course import read_metrics
from tests.cli.command import invoke


def train(text, out, *more):
    numbers = {"batch-size": 4, "stages": 1, "pipelines": 1, "micro-batches": 1, "max-batches": 6}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    paths = ("--data", str(text), "--out", str(out))
    often = ("--checkpoint-minutes", "0.0000001", "--wait-for-checkpoints")
    return invoke("train", "awd-lstm", *paths, *options, *often, *more)


@pytest.fixture
def full(monkeypatch):
    """The numbers of the saves, from 0, in which the disk is full."""
    saves, fsync = set(), os.fsync
    count, save = 0, Pipeline.save

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def counted(pipeline, directory, **options):
        nonlocal count
        monkeypatch.setattr(os, "fsync", full_disk if count in saves else fsync)
        count += 1
        try:
            save(pipeline, directory, **options)
        finally:
            monkeypatch.setattr(os, "fsync", fsync)

    monkeypatch.setattr(Pipeline, "save", counted)
    return saves


def test_a_run_goes_on_when_the_disk_is_full_for_a_while(text, tmp_path, full):
    full.update({2, 3})
    result = train(text, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("No space left on device: ") == 2
    assert "training continues, and tries again at its next checkpoint" in result.stderr
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "last").batches == 6


def test_a_run_whose_last_state_could_not_be_saved_has_failed(text, tmp_path, full):
    full.update(range(3, 100))
    result = train(text, tmp_path / "run")
    assert result.exit_code == 1
    assert "No space left on device: " in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "last").batches < 6
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["batches"] == 6


def test_a_run_that_cannot_save_at_all_ends_before_it_trains(text, tmp_path, full):
    full.update(range(100))
    result = train(text, tmp_path / "run")
    assert result.exit_code == 2  # of its arguments, --out is wrong
    assert "No space left on device: " in result.stderr
    assert not any(row["kind"] == "train" for row in read_metrics(tmp_path / "run"))


def test_a_run_that_came_to_nan_ends_and_keeps_its_last_good_checkpoint(text, tmp_path, monkeypatch, caplog):
    def prepare(config):
        workload, plan = resolve.prepare(config)
        trained = []

        def loss_fn(output, target):
            trained.append(torch.is_grad_enabled())
            return workload.loss_fn(output, target) * (torch.inf if sum(trained) >= 4 else 1)

        return replace(workload, loss_fn=loss_fn), plan

    monkeypatch.setattr(training, "prepare", prepare)
    result = train(text, tmp_path / "run")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert (
        "has infinities or NaN; load an earlier checkpoint, and train with Precision(skip_nonfinite=True)"
        in last
    )
    assert "--skip-nonfinite" in caplog.text
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "last").batches <= 3
    again = train(text, tmp_path / "run", "--resume", "--skip-nonfinite")
    assert again.exit_code == 0, again.output
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "last").batches == 6


class Takes:
    """A file on a disk that takes as many bytes at a time as it is told; None: it is full."""

    def __init__(self, *amounts):
        self.amounts, self.text = list(amounts), b""

    def write(self, data):
        amount = self.amounts.pop(0) if self.amounts else len(data)
        if amount is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.text += bytes(data[:amount])
        return min(amount, len(data))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_rows_wait_for_room(tmp_path):
    folder = RunFolder(tmp_path)
    folder._metrics = file = Takes(None, 5, None, 7)
    for batch in range(3):
        folder.row("train", batch=batch)
    folder.close()
    assert [json.loads(line) for line in file.text.splitlines()] == [
        {"kind": "train", "batch": j} for j in range(3)
    ]


def test_rows_that_never_found_room_are_reported(tmp_path):
    folder = RunFolder(tmp_path)
    folder._metrics = Takes(*[None] * 9)
    folder.row("train", batch=0)
    with pytest.raises(OSError, match="No space left"):
        folder.close()
