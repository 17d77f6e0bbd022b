"""What a run says of itself where standard error is not a terminal."""

import logging

import pytest

from avgpipe.cli import progress
from avgpipe.cli.progress import ProgressBar, links_line, links_of, log_records, warnings_of
from avgpipe.links.choose import LINK_MESSAGE


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
    shown = ProgressBar(total=100, done=0)
    for _ in range(30):
        clock.now += 1.0
        shown.batch(loss=2.0, samples=8, seconds=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "batch 10/100  loss 2.000  8.0 samples/s  1:30 min left"


def test_what_was_left_of_an_older_batch_is_no_new_one(clock, capsys):
    shown = ProgressBar(total=10, done=0)
    for is_new in (True, True, False):
        clock.now += 20.0
        shown.batch(loss=2.0, samples=4, seconds=1.0, is_new=is_new)
    assert capsys.readouterr().err.splitlines()[-1].startswith("batch 2/10")


def test_a_resumed_run_counts_from_where_it_was(clock, capsys):
    shown = ProgressBar(total=100, done=90)
    clock.now = 60.0
    shown.batch(loss=2.0, samples=8, seconds=2.0)
    assert capsys.readouterr().err == "batch 91/100  loss 2.000  4.0 samples/s  18 s left\n"


def test_one_nan_does_not_hide_the_loss(clock, capsys):
    shown = ProgressBar(total=10, done=0)
    for loss in (3.0, float("nan"), 3.0):
        clock.now += 20.0
        shown.batch(loss, samples=1, seconds=1.0)
    assert "loss 3.000" in capsys.readouterr().err.splitlines()[-1]


def test_batches_of_a_validation_pass_unchanged(clock, capsys):
    assert list(ProgressBar(total=1, done=0).validating([1, 2, 3])) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_a_validation_may_not_know_how_long_it_is(clock, capsys):
    def batches():
        yield from range(5)

    assert list(ProgressBar(total=1, done=0).validating(batches())) == [0, 1, 2, 3, 4]
    assert list(ProgressBar(total=1, done=0).validating(batches(), most=3)) == [0, 1, 2]
    assert list(ProgressBar(total=1, done=0).validating([1, 2, 3], most=2)) == [1, 2]


# ---- what the runtime logs -------------------------------------------------------------------------------------------


def test_notes_of_the_log_are_the_way_to_the_next_stage_and_warnings():
    log = logging.getLogger("avgpipe")
    level, handlers = log.level, list(log.handlers)
    with log_records() as records:
        log.info(LINK_MESSAGE, "stage 1", "stage 0", "shared memory")
        log.info(LINK_MESSAGE, "stage 1", "stage 2", "shared memory")
        log.info("something else")
        log.warning("%s waits", "somebody")
    assert links_of(records) == [
        ("stage 1", "stage 0", "shared memory"),
        ("stage 1", "stage 2", "shared memory"),
    ]
    assert warnings_of(records) == ["somebody waits"]
    assert (log.level, log.handlers) == (level, handlers)


FIRST, SECOND = ("stage 0", "stage 1", "shared memory"), ("stage 1", "stage 0", "shared memory")


def test_one_line_says_how_workers_are_joined():
    assert links_line([[FIRST], [SECOND]]) == ["links: stage 0 to stage 1 by shared memory"]
    alike = ("stage 1", "stage 2", "shared memory")
    assert links_line([[FIRST], [SECOND, alike], []]) == ["links: all 2 by shared memory"]
    other = ("stage 1", "stage 2", "torch.distributed (gloo)")
    assert links_line([[FIRST], [SECOND, other], []]) == [
        "links: stage 0 to stage 1 by shared memory; stage 1 to stage 2 by torch.distributed (gloo)"
    ]


def test_a_single_process_has_no_links():
    assert links_line([[]]) == []
