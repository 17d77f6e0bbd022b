"""One sentence of advice."""

import pytest

from avgpipe.measure.tune import DATA_PARALLEL, ONE_DEVICE, PIPELINE, advice
from avgpipe.plan import Plan
from tests.measure.examples import row, tuning

ONE = Plan()
TWO = Plan(stages=2, pipelines=2, micro_batches=2, partition=[1])
PARALLEL = Plan(micro_batches=2, schedule="1f1b", replication=[2], system="data-parallel")


def rows(one, parallel, pipeline, measured=True):
    times = {ONE_DEVICE: (one, ONE), DATA_PARALLEL: (parallel, PARALLEL), PIPELINE: (pipeline, TWO)}
    found = [
        row(what, s, s if measured else None, plan) for what, (s, plan) in times.items() if s is not None
    ]
    return sorted(found, key=lambda r: r.batch_s)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((1.0, 0.97, 0.96), "Advice: one device is enough: 8 samples/s, data parallel 8.247."),
        ((2.0, 1.0, 0.97), "Advice: use data parallelism here: 8 samples/s, pipeline 8.247."),
        ((2.0, 1.0, 1.2), "Advice: use data parallelism here: 8 samples/s, pipeline 6.667."),
        ((2.0, 1.5, 1.0), "Advice: use the pipeline, 8 samples/s, data parallel 5.333; its 2 pipelines"),
        (
            (None, None, 1.0),
            "Advice: use the pipeline, 8 samples/s; the whole model does not fit into each worker",
        ),
    ],
)
def test_the_simplest_of_the_fastest(times, said):
    assert advice(tuning(*rows(*times))).startswith(said)


def test_predictions_are_called_so():
    assert "8 samples/s predicted" in advice(tuning(*rows(2.0, 1.5, 1.0, measured=False)))


def test_what_was_measured_is_not_compared_with_predictions():
    found = tuning(row(PIPELINE, 0.5, 1.0, TWO), row(ONE_DEVICE, 0.9, None, ONE))
    assert advice(found).startswith("Advice: use the pipeline, 8 samples/s")
