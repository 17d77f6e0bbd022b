"""Times that are known without a simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.planning import Costs, predict, simulate
from avgpipe.schedule import build_schedule


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_gpipe_and_1f1b_take_one_time_per_micro_batch_and_stage(
    name, stages, micro_batches, forward, backward
):
    timeline = simulate(build_schedule(name, stages, micro_batches), Costs(forward, backward))
    assert timeline.makespan_s == (micro_batches + stages - 1) * (forward + backward)


@pytest.mark.parametrize(
    ("name", "seconds", "held"),
    [("1f1b", 26, 2), ("advance-forward", 20, 3), ("all-forward-all-backward", 20, 8)],
)
def test_the_figure_of_the_paper(name, seconds, held):
    """K = 2, M = 8, t_f = t_b = transfer = 1 (Chen et al. 2023)."""
    found = predict(build_schedule(name, 2, 8), Costs(1, 1, 1))
    assert found.makespan_s == seconds
    assert found.peak_in_flight[0] == held


def test_a_thousand_stages_with_four_thousand_micro_batches():
    """8.4 million actions, and columns that nobody makes."""
    schedule = build_schedule("1f1b", 1024, 4096)
    found = predict(schedule, Costs(0.001, 0.002))
    assert found.makespan_s == pytest.approx((4096 + 1023) * 0.003, abs=1e-9)
    assert found.actions == 1024 * (2 * 4096 + 1)
    assert found.peak_in_flight == tuple(range(1024, 0, -1))
    assert "columns" not in vars(schedule)
