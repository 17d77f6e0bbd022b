"""The rows of a run: cut off, counted, and always JSON."""

import math

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.folder import RunFolder, rows_until
from avgpipe.files import strict_json
from avgpipe.plan import Plan
from avgpipe.report.course import read_metrics
from avgpipe.units import duration


def train_row(batch, epoch, seconds):
    row = {"kind": "train", "batch": batch, "pipeline": batch % 2, "epoch": epoch}
    return {**row, "samples": 4 * (batch + 1), "loss": 5.0 - batch / 10, "seconds": seconds}


def valid_row(batch, epoch, metric, seconds):
    return {
        "kind": "valid",
        "epoch": epoch,
        "batch": batch,
        "loss": math.log(metric),
        "metric": metric,
        "seconds": seconds,
    }


ROWS = [
    valid_row(0, 0, 90.0, 0.0),
    *(train_row(j, 0, j + 1.0) for j in range(4)),
    valid_row(4, 0, 50.0, 4.0),
    *(train_row(j, 1, j + 1.0) for j in range(4, 8)),
    valid_row(8, 1, 60.0, 8.0),
]


def write(path, rows, end=""):
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows) + end)


def resumed(path, batches):
    """The rows with which a run goes on after this many batches."""
    folder = RunFolder(path)
    folder.open(TrainConfig(workload="awd-lstm"), Plan(), rows_until(path, batches))
    folder.close()
    return read_metrics(path)


def test_rows_after_the_checkpoint_are_cut_off(tmp_path):
    write(tmp_path, ROWS, end='{"kind": "train", "ba')
    assert resumed(tmp_path, 6) == ROWS[:8]


def test_the_validation_just_before_a_checkpoint_stays(tmp_path):
    write(tmp_path, ROWS)
    assert resumed(tmp_path, 4) == ROWS[:6]


def test_no_rows_without_a_file(tmp_path):
    assert read_metrics(tmp_path) == []


def test_json_has_no_nan():
    assert strict_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}) == (
        '{"a": null, "b": [null, 1.5], "c": {"d": null}}'
    )


def test_durations():
    assert [duration(s) for s in (0.4, 59, 185, 7620)] == ["0 s", "59 s", "3:05 min", "2:07 h"]
