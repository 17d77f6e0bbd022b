"""What a tuned plan is compared with."""

from benchmarks.tuning.settings import MAX_NUM, MAX_SIZE, extremes, settings
from tests.measure.test_tuner import SPACE, TIGHT


def test_the_extremes_have_all_workers_and_as_many_pipelines_as_fit():
    plans = {what: forecast.plan for what, forecast in extremes(SPACE).items()}
    assert (plans[MAX_NUM].stages, plans[MAX_NUM].pipelines, plans[MAX_NUM].micro_batches) == (2, 2, 4)
    assert (plans[MAX_SIZE].stages, plans[MAX_SIZE].pipelines, plans[MAX_SIZE].micro_batches) == (2, 2, 2)
    # Two layers a stage: one pipeline has weights, gradients and optimizer state of 4,000 bytes a layer.
    assert {forecast.plan.pipelines for forecast in extremes(TIGHT).values()} == {1}


def test_the_settings_of_a_traversal():
    """Two stages: three cuts of four layers; M = 1 has one schedule, M = 2 two, M = 4 three; two share M = 2 and 4."""
    found = settings(SPACE)
    kinds = [(f.plan.pipelines, f.plan.micro_batches, f.plan.advance, tuple(f.plan.partition)) for f in found]
    assert len(set(kinds)) == len(kinds) == (1 + 2 + 3 + 2 + 3) * 3
    # What does not fit is no setting: three layers on a stage need 12,000 bytes.
    assert {tuple(f.plan.partition) for f in settings(TIGHT)} == {(2,)}
