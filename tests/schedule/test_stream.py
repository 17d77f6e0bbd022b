import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.schedule import Step, Stream


def spell(steps):
    """F0.1: the forward of batch 0, micro-batch 1."""
    return " ".join(f"{s.kind}{s.batch}" + ("" if s.kind == "U" else f".{s.micro_batch}") for s in steps)


# ---- literal tables ----


def test_one_micro_batch_per_batch_is_the_figure_of_pipedream():
    """Stage 1 of 4: 3 batches are in flight."""
    stream = Stream(3)
    assert [spell(stream.add(j, 1)) for j in range(5)] == [
        "F0.0",
        "F1.0",
        "F2.0 B0.0 U0",
        "F3.0 B1.0 U1",
        "F4.0 B2.0 U2",
    ]
    assert spell(stream.drain()) == "B3.0 U3 B4.0 U4"


def test_several_micro_batches_go_on_over_batches():
    stream = Stream(2)
    assert spell(stream.add(0, 3)) == "F0.0 F0.1 B0.0 F0.2 B0.1"
    assert spell(stream.add(1, 3)) == "F1.0 B0.2 U0 F1.1 B1.0 F1.2 B1.1"
    assert spell(stream.drain()) == "B1.2 U1"


def test_batches_may_differ_in_their_micro_batches():
    stream = Stream(3)
    assert spell(stream.add(7, 2)) == "F7.0 F7.1"
    assert spell(stream.add(4, 1)) == "F4.0 B7.0"
    assert spell(stream.add(9, 3)) == "F9.0 B7.1 U7 F9.1 B4.0 U4 F9.2 B9.0"
    assert spell(stream.drain()) == "B9.1 B9.2 U9"


def test_the_last_stage_never_has_anything_left():
    stream = Stream(1)
    assert spell(stream.add(0, 2)) == "F0.0 B0.0 F0.1 B0.1 U0"
    assert stream.drain() == []


def test_after_a_drain_comes_a_new_warm_up():
    stream = Stream(2)
    assert spell([*stream.add(0, 2), *stream.drain()]) == "F0.0 F0.1 B0.0 B0.1 U0"
    assert stream.drain() == []
    assert spell([*stream.add(1, 2), *stream.drain()]) == "F1.0 F1.1 B1.0 B1.1 U1"


# ---- against the definition ----

batches = st.lists(st.integers(1, 5), max_size=6)


def in_full(warm_up, counts):
    """1F1B over the sequence of all micro-batches, by the place of each forward and backward in it."""
    sequence = [(j, m) for j, count in enumerate(counts) for m in range(count)]
    n = len(sequence)

    def place(kind, g):
        """Of forward g: before it, g forwards and the backwards of all but the warm_up - 1 before it."""
        if kind == "F":
            return g + max(0, g - warm_up + 1), 1
        return g + min(n, warm_up + g), 0

    work = sorted(((kind, g) for kind in "FB" for g in range(n)), key=lambda cell: place(*cell))
    steps = []
    for kind, g in work:
        j, m = sequence[g]
        steps.append(Step(kind, j, m))
        if kind == "B" and m == counts[j] - 1:
            steps.append(Step("U", j, -1))
    return steps


@given(st.integers(1, 7), batches)
def test_all_steps_together_are_1f1b_over_the_sequence_of_all_micro_batches(warm_up, counts):
    stream = Stream(warm_up)
    steps = [step for j, count in enumerate(counts) for step in stream.add(j, count)]
    assert [*steps, *stream.drain()] == in_full(warm_up, counts)


@given(st.integers(1, 7), batches, st.integers(1, 5))
def test_steps_come_exactly_when_no_later_batch_can_change_them(warm_up, counts, more):
    stream, known = Stream(warm_up), []
    for j, count in enumerate(counts):
        known += stream.add(j, count)
        ends, goes_on = in_full(warm_up, counts[: j + 1]), in_full(warm_up, [*counts[: j + 1], *[more] * 8])
        same = next((n for n, (a, b) in enumerate(zip(ends, goes_on)) if a != b), len(ends))
        assert known == ends[:same]


@given(st.integers(1, 7), batches)
def test_no_more_than_the_warm_up_is_in_flight_and_it_is_reached(warm_up, counts):
    held = peak = 0
    for step in in_full(warm_up, counts):
        held += {"F": 1, "B": -1, "U": 0}[step.kind]
        peak = max(peak, held)
    assert peak == min(warm_up, sum(counts))


# ---- refusals ----


@pytest.mark.parametrize("value", [0, -1, True, 1.0, None])
def test_counts_must_be_positive_ints(value):
    with pytest.raises(ValueError, match=f"warm_up={value!r}: must be an int of at least 1"):
        Stream(value)
    with pytest.raises(ValueError, match=f"micro_batches={value!r} of batch 3: must be an int of at least 1"):
        Stream(2).add(3, value)
