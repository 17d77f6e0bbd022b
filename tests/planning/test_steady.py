import pytest

from avgpipe.planning import Costs, simulate, steady_batch_s
from avgpipe.schedule import build_schedule

LINE = Costs(0.010, 0.020, 0.0087)


@pytest.mark.parametrize(
    ("name", "pipelines", "milliseconds"),
    [
        ("advance-forward", 1, 597.0),
        ("1f1b", 1, 753.6),
        ("advance-forward", 2, 360.0),
        ("1f1b", 2, 429.6),
        # 429.8 if a device that becomes free does not see a tensor that arrives at that very instant.
        ("gpipe", 2, 421.1),
        ("advance-forward", 3, 360.0),
        ("1f1b", 3, 360.0),
    ],
)
def test_six_stages_streaming(name, pipelines, milliseconds):
    """t_f = 10, t_b = 20, 8.7 per transfer, M = 12; no device can do better than 360."""
    schedule = build_schedule(name, 6, 12)
    assert steady_batch_s(schedule, LINE, pipelines=pipelines) == pytest.approx(milliseconds / 1000, abs=1e-9)


def test_one_pipeline_flushes_so_that_a_batch_takes_what_it_takes_alone():
    schedule = build_schedule("1f1b", 3, 4)
    costs = Costs([0.1, 0.2, 0.15], 0.3, 0.05)
    assert steady_batch_s(schedule, costs) == pytest.approx(simulate(schedule, costs).makespan_s)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_it_is_the_growth_of_a_long_run(pipelines):
    schedule, costs = build_schedule("advance-forward", 3, 4), Costs([0.1, 0.2, 0.15], 0.3, 0.05)
    long, longer = (
        simulate(schedule, costs, pipelines=pipelines, batches=count * pipelines) for count in (20, 40)
    )
    growth = (longer.makespan_s - long.makespan_s) / (20 * pipelines)
    assert steady_batch_s(schedule, costs, pipelines=pipelines) == pytest.approx(growth)


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 1), (4, 3), (3, 8), (6, 2)])
def test_without_a_flush_devices_are_always_busy(stages, micro_batches):
    schedule = build_schedule("pipedream-2bw", stages, micro_batches)
    assert steady_batch_s(schedule, Costs(1, 2)) == pytest.approx(3 * micro_batches)
    assert steady_batch_s(build_schedule("1f1b", stages, micro_batches), Costs(1, 2)) == pytest.approx(
        3 * (micro_batches + stages - 1)
    )


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_without_a_flush_it_is_the_growth_of_a_long_run(pipelines, micro_batches):
    schedule = build_schedule("pipedream", 4, micro_batches)
    costs = Costs([0.1, 0.2, 0.15, 0.05], 0.3, 0.05, update_s=0.02)
    long, longer = (
        simulate(schedule, costs, pipelines=pipelines, batches=count * pipelines) for count in (30, 60)
    )
    growth = (longer.makespan_s - long.makespan_s) / (30 * pipelines)
    assert steady_batch_s(schedule, costs, pipelines=pipelines) == pytest.approx(growth, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        *("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"),
        *("zero-bubble-h1", "zero-bubble-v", "dualpipe-v"),
    ],
)
def test_what_flushes_takes_what_a_batch_takes_alone(name):
    """If no worker begins the next batch before the last has ended this one: here the first one does both last."""
    schedule, costs = build_schedule(name, 4, 4), Costs([0.1, 0.2, 0.15, 0.1], 0.3, 0.05)
    long, longer = (simulate(schedule, costs, batches=count) for count in (20, 40))
    assert steady_batch_s(schedule, costs) == pytest.approx((longer.makespan_s - long.makespan_s) / 20)


def test_updates_count():
    costs = Costs(1, 2, update_s=0.5)
    assert steady_batch_s(build_schedule("1f1b", 1, 4), costs, pipelines=2) == pytest.approx(12.5)


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="batches=5: 2 pipelines need at least 6"):
        steady_batch_s(build_schedule("1f1b", 2, 2), LINE, pipelines=2, batches=5)
    with pytest.raises(ValueError, match="batches=10: 1 pipelines need at least 11"):
        steady_batch_s(build_schedule("pipedream", 4, 1), LINE, batches=10)
    with pytest.raises(ValueError, match="batches=0: must be an int of at least 1"):
        steady_batch_s(build_schedule("1f1b", 2, 2), LINE, batches=0)
    with pytest.raises(ValueError, match="pipelines=0: must be"):
        steady_batch_s(build_schedule("1f1b", 2, 2), LINE, pipelines=0)
    with pytest.raises(ValueError, match="pipelines='2': must be"):
        steady_batch_s(build_schedule("1f1b", 2, 2), LINE, pipelines="2")
