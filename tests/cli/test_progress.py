"""What a run says of itself where standard error is not a terminal."""

import pytest

from avgpipe.cli import progress
from avgpipe.cli.progress import Progress, Silent, spell_s


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    monkeypatch.setattr(progress, "time", Clock())
    return progress.time


def test_a_line_about_every_ten_seconds(clock, capsys):
    shown = Progress(total=100, done=0)
    for _ in range(30):
        clock.now += 1.0
        shown.batch(loss=2.0, samples=8, seconds=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "batch 10/100  loss 2.000  8.0 samples/s  1:30 min left"


def test_a_resumed_run_counts_from_where_it_was(clock, capsys):
    shown = Progress(total=100, done=90)
    clock.now = 60.0
    shown.batch(loss=2.0, samples=8, seconds=2.0)
    assert capsys.readouterr().err == "batch 91/100  loss 2.000  4.0 samples/s  18 s left\n"


def test_one_nan_does_not_hide_the_loss(clock, capsys):
    shown = Progress(total=10, done=0)
    for loss in (3.0, float("nan"), 3.0):
        clock.now += 20.0
        shown.batch(loss, samples=1, seconds=1.0)
    assert "loss 3.000" in capsys.readouterr().err.splitlines()[-1]


def test_batches_of_a_validation_pass_unchanged(clock, capsys):
    assert list(Progress(total=1, done=0).validating([1, 2, 3])) == [1, 2, 3]
    assert list(Silent().validating([1, 2, 3])) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_durations():
    assert [spell_s(s) for s in (0.4, 59, 185, 7620)] == ["0 s", "59 s", "3:05 min", "2:07 h"]
