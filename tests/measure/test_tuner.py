"""The study: what is timed, and how rows are ranked."""

from dataclasses import replace

import pytest

from avgpipe.errors import PipelineError
from avgpipe.measure.search import Space, search
from avgpipe.measure.tune import DATA_PARALLEL, ONE_DEVICE, PIPELINE, Trial, study
from tests.measure.examples import cluster, heavy

SPACE = Space(heavy(), cluster(2), 4, (1, 2), (1, 2, 4))
TIGHT = replace(SPACE, cluster=cluster(2, 9000.0))


class Measured:
    """Times plans at so many times their forecast, in the order of the calls."""

    def __init__(self, *factors):
        self.factors, self.asked = list(factors), []

    def __call__(self, forecast):
        self.asked.append(forecast)
        factor = self.factors.pop(0) if self.factors else 1.0
        if isinstance(factor, Exception):
            raise factor
        return None if factor is None else Trial(factor * forecast.batch_s, (1,) * forecast.plan.workers)


def test_without_a_measure_the_rows_are_the_searchs():
    found = study(SPACE)
    assert [r.forecast for r in found.rows] == list(search(SPACE).ranked)
    assert all(r.trial is None and r.error is None for r in found.rows)
    assert found.plan == found.rows[0].plan
    assert set(found.seconds) == {"search_s"}


def test_the_best_few_are_timed_and_the_simpler_kinds():
    measure = Measured()
    found = study(SPACE, measure, trials=1)
    assert [f.plan.stages for f in measure.asked] == [2, 1, 1]
    assert {r.what for r in found.rows if r.trial} == {PIPELINE, DATA_PARALLEL, ONE_DEVICE}
    assert all(r.error == pytest.approx(0) for r in found.rows if r.trial)


def test_what_was_measured_decides():
    measure = Measured(3.0, 1.0)
    found = study(SPACE, measure, trials=2)
    assert found.best.forecast == measure.asked[1]
    assert found.best.batch_s == measure.asked[1].batch_s


def test_what_was_not_timed_comes_after_what_was():
    found = study(SPACE, Measured(100.0, 100.0, 100.0, 100.0), trials=2)
    timed = [r.trial is not None for r in found.rows]
    assert timed == sorted(timed, reverse=True)
    assert not all(timed)


def test_a_trial_that_fails_says_why_and_is_not_taken():
    found = study(SPACE, Measured(PipelineError("worker 0\nfailed")), trials=2)
    assert found.best.failure == ""
    assert [r.failure for r in found.rows if r.failure] == ["worker 0 failed"]


def test_a_plan_that_cannot_be_timed_here_stays_a_prediction():
    found = study(SPACE, Measured(1.0, None, None), trials=1)
    assert [r.trial is not None for r in found.rows[:2]] == [True, False]


def test_the_record_has_everything():
    found = study(SPACE, Measured(), trials=1).to_json()
    assert found["plan"]["stages"] == 2
    assert found["advice"].startswith("Advice: ")
    first = found["rows"][0]
    assert first["what"] == PIPELINE
    assert first["measured_batch_s"] == first["predicted_batch_s"]
    assert first["measured_memory_bytes"] == (1, 1)
