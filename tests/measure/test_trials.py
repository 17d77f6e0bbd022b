"""What "seconds per batch" means."""

import pytest

from avgpipe.measure import tune
from avgpipe.measure.tune import seconds_per_batch


class Ticking:
    """Batches that end at the given times."""

    def __init__(self, monkeypatch, ends, losses=None):
        self._ends, self._losses = ends, losses or [1.0] * len(ends)
        self.trained, self.now = 0, 0.0
        monkeypatch.setattr(tune.time, "perf_counter", lambda: self.now)

    def losses(self, batches):
        for n in range(batches):
            self.trained += 1
            self.now = self._ends[n]
            yield self._losses[n]


def test_one_pipeline_is_timed_from_the_end_of_its_first_batch(monkeypatch):
    row = Ticking(monkeypatch, [5.0, 6.0, 7.0, 8.5])
    assert seconds_per_batch(row.losses, 1, 3) == pytest.approx(3.5 / 3)
    assert row.trained == 4


def test_several_pipelines_are_timed_over_whole_rounds_and_stay_busy(monkeypatch):
    row = Ticking(monkeypatch, [5.0, 5.1, 7.0, 7.1, 9.0, 9.1, 9.5])
    # from the end of the second batch to that of the sixth; the seventh only keeps the other pipeline busy
    assert seconds_per_batch(row.losses, 2, 3) == pytest.approx((9.1 - 5.1) / 4)
    assert row.trained == 7


def test_a_loss_that_is_not_finite_is_refused(monkeypatch):
    row = Ticking(monkeypatch, [1.0, 2.0], [1.0, float("nan")])
    with pytest.raises(ValueError, match="the loss of batch 1 is nan"):
        seconds_per_batch(row.losses, 1, 1)


def test_ranks_that_do_not_know_the_loss_say_none(monkeypatch):
    row = Ticking(monkeypatch, [1.0, 2.0], [None, None])
    assert seconds_per_batch(row.losses, 1, 1) == pytest.approx(1.0)
