"""The bubbles and the memory that the papers claim, found again in simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import Costs, simulate
from avgpipe.schedule import build_schedule

# In halves of seconds: exact in floats, and so are their halves.
times = st.integers(1, 8).map(lambda count: count / 2)


def idle_s(schedule, costs):
    """Per worker, the seconds of a batch in which it did not compute."""
    timeline = simulate(schedule, costs)
    return [timeline.makespan_s - busy_s for busy_s in timeline.busy_s]


@given(st.integers(1, 6), st.integers(0, 6), times, times)
def test_1f1b(stages, more, forward, backward):
    schedule = build_schedule("1f1b", stages, stages + more)
    bubble = (stages - 1) * (forward + backward)
    assert idle_s(schedule, Costs(forward, backward)) == pytest.approx([bubble] * stages, abs=1e-9)


@given(st.integers(1, 6), st.integers(0, 6), times, times, times)
def test_h1_has_the_bubble_of_the_paper_in_the_memory_of_1f1b(stages, more, forward, inputs, weights):
    """(K-1) (t_F + t_I - t_W), where W is no longer than F nor I; the last stage anyhow begins (K-1) t_F late."""
    schedule = build_schedule("zero-bubble-h1", stages, 2 * stages + more)
    costs = Costs(forward, inputs + weights, input_backward_s=inputs, activation_bytes=1)
    bubble = (stages - 1) * max(forward, inputs, forward + inputs - weights)
    assert idle_s(schedule, costs) == pytest.approx([bubble] * stages, abs=1e-9)
    most = simulate(build_schedule("1f1b", stages, 2 * stages + more), costs).peak_memory_bytes[0]
    assert max(simulate(schedule, costs).peak_memory_bytes) == most


@pytest.mark.parametrize("per_worker", [2, 3])
@pytest.mark.parametrize(("workers", "groups"), [(1, 2), (2, 2), (3, 1), (4, 3)])
def test_interleaving_makes_the_bubble_as_many_times_smaller_as_a_worker_has_stages(
    workers, groups, per_worker
):
    """(W-1) (t_F + t_B) / V of a whole worker's times."""
    schedule = build_schedule("interleaved-1f1b", workers * per_worker, workers * groups, None, per_worker)
    bubble = (workers - 1) * (1 + 2) / per_worker
    found = idle_s(schedule, Costs(1 / per_worker, 2 / per_worker))
    assert found == pytest.approx([bubble] * workers, abs=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_v_is_idle_only_while_the_first_forward_comes(workers, more):
    """With equal times of F, I and W. The rows of a batch are shifted by one F per worker, and have no gaps."""
    schedule = build_schedule("zero-bubble-v", 2 * workers, 2 * workers - 1 + more)
    timeline = simulate(schedule, Costs(1, 2, activation_bytes=1))
    assert [timeline.makespan_s - busy_s for busy_s in timeline.busy_s] == [workers - 1] * workers
    for w in range(workers):
        own = [event for event in timeline.events if event.stage == w and event.kind != "U"]
        assert min(event.start_s for event in own) == w
        assert max(event.end_s for event in own) - w == timeline.busy_s[w]
    assert max(timeline.peak_memory_bytes) == 2 * workers


@pytest.mark.parametrize("per_worker", [2, 3])
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 2), (2, 2), (2, 5), (3, 4), (4, 11)])
def test_breadth_first_has_the_bubble_of_interleaving_for_any_number_of_micro_batches(
    workers, micro_batches, per_worker
):
    """At least as many as workers: (W-1) (t_F + t_B) / V of a whole worker's times."""
    schedule = build_schedule("looped-bfs", workers * per_worker, micro_batches, None, per_worker)
    bubble = (workers - 1) * (1 + 2) / per_worker
    found = idle_s(schedule, Costs(1 / per_worker, 2 / per_worker))
    assert found == pytest.approx([bubble] * workers, abs=1e-9)


@given(st.integers(1, 4), st.integers(2, 3), st.integers(2, 4), times, times, times)
def test_interleaving_makes_the_bubble_of_h1_smaller_too(
    workers, per_worker, groups, forward, inputs, weights
):
    """(W-1) max(t_F, t_I, t_F + t_I - t_W) of one stage of several; with one stage, it is of all that a worker has."""
    schedule = build_schedule(
        "interleaved-zero-bubble", workers * per_worker, workers * groups, None, per_worker
    )
    bubble = (workers - 1) * max(forward, inputs, forward + inputs - weights)
    found = idle_s(schedule, Costs(forward, inputs + weights, input_backward_s=inputs))
    assert found == pytest.approx([bubble] * workers, abs=1e-9)


@given(st.integers(1, 6), st.integers(0, 9), times, times, times)
def test_dualpipe_v_is_idle_for_less_than_1f1b_and_as_v_where_times_are_equal(
    workers, more, forward, inputs, weights
):
    """(W-1) (t_F + max(0, t_I - t_W)) if t_I <= t_F <= t_B, in the memory of the V and one activation more."""
    schedule = build_schedule("dualpipe-v", 2 * workers, 2 * workers + more)
    costs = Costs(forward, inputs + weights, input_backward_s=inputs, activation_bytes=1)
    found = idle_s(schedule, costs)
    one = build_schedule("1f1b", workers, 2 * workers + more)
    assert max(found) <= max(idle_s(one, Costs(2 * forward, 2 * (inputs + weights)))) + 1e-9
    if inputs <= forward <= inputs + weights:
        bubble = (workers - 1) * (forward + max(0, inputs - weights))
        assert found == pytest.approx([bubble] * workers, abs=1e-9)
    assert max(simulate(schedule, costs).peak_memory_bytes) == 2 * workers + 1


def test_all_against_1f1b_on_4_workers_with_12_micro_batches():
    """A worker's F, I and W take 2 s each, in halves where it has 2 stages; idle seconds per worker."""
    whole, half = Costs(2, 4), Costs(1, 2)
    found = {
        "1f1b": idle_s(build_schedule("1f1b", 4, 12), whole),
        "interleaved-1f1b": idle_s(build_schedule("interleaved-1f1b", 8, 12), half),
        "zero-bubble-h1": idle_s(build_schedule("zero-bubble-h1", 4, 12), whole),
        "zero-bubble-v": idle_s(build_schedule("zero-bubble-v", 8, 12), half),
        "looped-bfs": idle_s(build_schedule("looped-bfs", 8, 12), half),
        "interleaved-zero-bubble": idle_s(build_schedule("interleaved-zero-bubble", 8, 12), half),
        "dualpipe-v": idle_s(build_schedule("dualpipe-v", 8, 12), half),
    }
    assert found == {
        "1f1b": [18] * 4,
        "interleaved-1f1b": [9] * 4,
        "zero-bubble-h1": [6] * 4,
        "zero-bubble-v": [3] * 4,
        "looped-bfs": [9] * 4,
        "interleaved-zero-bubble": [3] * 4,
        "dualpipe-v": [3] * 4,
    }


@settings(max_examples=60)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["interleaved-1f1b", "interleaved-zero-bubble", "zero-bubble-v", "dualpipe-v"]),
)
def test_a_worker_that_runs_ahead_holds_at_most_what_its_stages_hold_each(data, workers, micro_batches, name):
    """Where times are unequal, an action whose input is there comes before one of the order that waits."""
    schedule = build_schedule(name, 2 * workers, micro_batches)
    each = st.lists(times, min_size=2 * workers, max_size=2 * workers)
    costs = Costs(data.draw(each), data.draw(each), 0.5, activation_bytes=1)
    peaks = schedule.peak_in_flight
    for w, peak in enumerate(simulate(schedule, costs).peak_memory_bytes):
        assert peak <= sum(peaks[k] for k in schedule.placement[w])
        if name == "zero-bubble-v":
            assert peak <= 2 * workers + 1


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), times, times)
def test_without_a_flush_the_pipeline_fills_and_empties_once(
    stages, micro_batches, batches, forward, backward
):
    schedule = build_schedule("pipedream-2bw", stages, micro_batches)
    timeline = simulate(schedule, Costs(forward, backward), batches=batches)
    whole = (batches * micro_batches + stages - 1) * (forward + backward)
    assert timeline.makespan_s == pytest.approx(whole)
