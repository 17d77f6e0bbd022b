from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.errors import ScheduleError
from avgpipe.schedule import Action, Schedule, build_schedule, schedule_names, warm_ups

SEVERAL_STAGES = (  # on each worker
    *("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"),
    *("zero-bubble-v", "dualpipe-v"),
)


def tokens(schedule):
    return [" ".join(map(str, column)) for column in schedule.columns]


def first_backward(column):
    return next(position for position, action in enumerate(column) if action.kind == "B")


# ---- literal tables ----


def test_advance_forward_on_2_stages_with_8_micro_batches_is_the_figure_of_the_paper():
    assert tokens(build_schedule("advance-forward", stages=2, micro_batches=8)) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 U",
    ]


def test_advance_forward_on_4_stages_with_8_micro_batches_is_the_figure_of_the_paper():
    schedule = build_schedule("advance-forward", stages=4, micro_batches=8)
    assert tokens(schedule) == [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7 U",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7 U",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 U",
    ]
    assert [first_backward(column) for column in schedule.columns] == [7, 5, 3, 1]
    assert schedule.peak_in_flight == [7, 5, 3, 1]


def test_1f1b_on_3_stages_with_4_micro_batches():
    assert tokens(build_schedule("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 U",
        "F0 F1 B0 F2 B1 F3 B2 B3 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 U",
    ]


def test_all_forward_all_backward_on_2_stages_with_3_micro_batches():
    assert tokens(build_schedule("all-forward-all-backward", 2, 3)) == ["F0 F1 F2 B0 B1 B2 U"] * 2


PLAIN = ["all-forward-all-backward", "1f1b", "advance-forward", "pipedream", "pipedream-2bw"]


@pytest.mark.parametrize("name", PLAIN)
def test_one_stage_and_one_micro_batch(name):
    assert tokens(build_schedule(name, 1, 1)) == ["F0 B0 U"]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_a_batch_without_a_flush_has_the_columns_of_1f1b(name):
    schedule = build_schedule(name, 3, 4)
    assert schedule.name == name
    assert not schedule.flush
    assert schedule.columns == build_schedule("1f1b", 3, 4).columns
    assert schedule != build_schedule("1f1b", 3, 4)


def test_fewer_micro_batches_than_stages_end_the_warm_up_early():
    assert tokens(build_schedule("1f1b", 4, 2)) == ["F0 F1 B0 B1 U"] * 3 + ["F0 B0 F1 B1 U"]
    assert tokens(build_schedule("advance-forward", 3, 2)) == ["F0 F1 B0 B1 U"] * 2 + ["F0 B0 F1 B1 U"]
    assert tokens(build_schedule("gpipe", 3, 1)) == ["F0 B0 U"] * 3


def test_an_integer_advance_holds_for_every_stage_and_a_list_per_stage():
    assert tokens(build_schedule("advance-forward", 2, 4, advance=1)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 U",
        "F0 F1 B0 F2 B1 F3 B2 B3 U",
    ]
    assert tokens(build_schedule("advance-forward", 2, 4, advance=[2, 0])) == [
        "F0 F1 F2 F3 B0 B1 B2 B3 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 U",
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 8), (4, 3), (6, 12)])
def test_auto_without_measurements_is_the_default(stages, micro_batches):
    auto = build_schedule("advance-forward", stages, micro_batches, advance="auto")
    assert auto == build_schedule("advance-forward", stages, micro_batches)


def test_warm_ups_follow_the_formula():
    assert warm_ups(4, 8, [3, 2, 1, 0]) == [7, 5, 3, 1]
    assert warm_ups(2, 8, [1, 0]) == [3, 1]
    assert warm_ups(3, 2, [0, 0, 0]) == [2, 2, 1]


# ---- names ----


def test_aliases_build_the_canonical_schedule():
    assert {"all-forward-all-backward", "1f1b", "gpipe", "dapple"} & set(schedule_names()) == {
        "all-forward-all-backward",
        "1f1b",
    }
    assert build_schedule("gpipe", 2, 3).name == "all-forward-all-backward"
    assert build_schedule("dapple", 2, 3).name == "1f1b"
    assert build_schedule("dapple", 2, 3) == build_schedule("1f1b", 2, 3)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="'advance-foward': did you mean 'advance-forward'"):
        build_schedule("advance-foward", 2, 3)
    with pytest.raises(ValueError, match="valid names: "):
        build_schedule(None, 2, 3)


# ---- bounds ----

counts = {"stages": st.integers(1, 7), "micro_batches": st.integers(1, 12)}


@given(**counts)
def test_all_forward_all_backward_holds_every_micro_batch(stages, micro_batches):
    assert build_schedule("gpipe", stages, micro_batches).peak_in_flight == [micro_batches] * stages


@given(**counts)
def test_1f1b_holds_as_many_as_there_are_stages_from_here_to_the_end(stages, micro_batches):
    peaks = build_schedule("1f1b", stages, micro_batches).peak_in_flight
    assert peaks == [min(micro_batches, stages - k) for k in range(stages)]


@given(**counts)
def test_the_ends_of_advance_are_1f1b_and_all_forward_all_backward(stages, micro_batches):
    assert build_schedule("advance-forward", stages, micro_batches, 0) == build_schedule(
        "1f1b", stages, micro_batches
    )
    most = build_schedule("advance-forward", stages, micro_batches, micro_batches - 1)
    assert most == build_schedule("gpipe", stages, micro_batches)


@given(**counts)
def test_without_a_flush_the_next_batches_fill_what_one_leaves_free(stages, micro_batches):
    schedule = build_schedule("pipedream-2bw", stages, micro_batches)
    assert schedule.peak_in_flight == [stages - k for k in range(stages)]


@given(**counts, name=st.sampled_from(schedule_names()))
def test_every_schedule_can_be_run(stages, micro_batches, name):
    stages *= 2 if name in SEVERAL_STAGES else 1
    schedule = build_schedule(name, stages, micro_batches)
    schedule.validate()
    assert schedule.stages == stages
    assert schedule.micro_batches == micro_batches
    assert schedule.name == name


advances = st.lists(st.integers(0, 7), min_size=1, max_size=6)


class Circle(Exception):
    """An action waits for itself."""


def runs(warm, micro_batches):
    """Whether columns with these warm-ups can be run: a walk from the last backwards to all they wait for."""

    def position(k, kind, m):
        """The index of an action in the column of stage k, in closed form."""
        if kind == "F":
            return m if m < warm[k] else 2 * m - warm[k] + 1
        return warm[k] + 2 * m if m <= micro_batches - warm[k] else micro_batches + m

    work = [(kind, m) for kind in "FB" for m in range(micro_batches)]
    columns = [sorted(work, key=lambda action: position(k, *action)) for k in range(len(warm))]
    walking = set()

    @cache
    def walk(k, kind, m):
        if (k, kind, m) in walking:
            raise Circle
        walking.add((k, kind, m))
        place = columns[k].index((kind, m))
        if place:
            walk(k, *columns[k][place - 1])
        neighbour = k - 1 if kind == "F" else k + 1
        if 0 <= neighbour < len(warm):
            walk(neighbour, kind, m)
        walking.discard((k, kind, m))

    try:
        for k in range(len(warm)):
            walk(k, "B", micro_batches - 1)
    except Circle:
        return False
    return True


@settings(max_examples=150)
@given(advance=advances, micro_batches=st.integers(1, 8))
def test_an_advance_is_built_exactly_if_it_can_be_run(advance, micro_batches):
    stages = len(advance)
    warm = [min(micro_batches, stages - k + advance[k]) for k in range(stages)]
    if not runs(warm, micro_batches):
        with pytest.raises(ValueError, match="would deadlock"):
            build_schedule("advance-forward", stages, micro_batches, advance)
        return
    schedule = build_schedule("advance-forward", stages, micro_batches, advance)
    schedule.validate()
    assert [first_backward(column) for column in schedule.columns] == warm
    assert schedule.peak_in_flight == warm
    for column in schedule.columns:
        for kind in "FB":
            assert [a.micro_batch for a in column if a.kind == kind] == list(range(micro_batches))


def test_the_columns_of_a_refused_advance_really_deadlock():
    late = [Action.parse(t) for t in ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3", "U"]]
    early = [Action.parse(t) for t in ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3", "U"]]
    with pytest.raises(
        ValueError, match=r"stage 1 runs 3 .* stage 0 sends it only 2; give stage 1 at most 1"
    ):
        build_schedule("advance-forward", 2, 4, advance=[0, 2])
    with pytest.raises(ScheduleError, match="deadlock"):
        Schedule("by hand", 4, (late, early)).validate()


# ---- what the schedules are for ----


def batch_time(schedule, forward, backward, transfer):
    """Seconds until the last backward, with a delay between stages; each stage runs its column in order."""
    ends, at = {}, [0] * schedule.stages
    free = [0.0] * schedule.stages
    while any(at[k] < len(column) - 1 for k, column in enumerate(schedule.columns)):
        for k, column in enumerate(schedule.columns):
            action = column[at[k]]
            source = k - 1 if action.kind == "F" else k + 1
            key = (source, action.kind, action.micro_batch)
            inside = 0 <= source < schedule.stages
            if action.kind == "U" or (inside and key not in ends):
                continue
            ready = ends[key] + transfer if inside else 0.0
            free[k] = max(free[k], ready) + (forward if action.kind == "F" else backward)
            ends[k, action.kind, action.micro_batch] = free[k]
            at[k] += 1
    return max(ends.values())


def test_advance_forward_hides_transfers_that_stall_1f1b():
    times = {name: batch_time(build_schedule(name, 2, 8), 1, 1, 1) for name in PLAIN}
    assert times["advance-forward"] == times["all-forward-all-backward"] < times["1f1b"]
    assert [
        build_schedule(name, 2, 8).peak_in_flight[0] for name in ("1f1b", "advance-forward", "gpipe")
    ] == [2, 3, 8]


# ---- refusals ----


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2", None])
@pytest.mark.parametrize("which", ["stages", "micro_batches"])
def test_counts_must_be_positive_ints(which, value):
    with pytest.raises(ValueError, match=rf"{which}={value!r}: must be an int of at least 1"):
        build_schedule("1f1b", **{"stages": 2, "micro_batches": 3, which: value})


@pytest.mark.parametrize(
    "advance", [-1, True, False, 1.5, "Auto", "", "2", [1], [1, 0, 0], [1, -1], [True, 0], [1, None], {}]
)
def test_an_advance_that_is_no_count_is_refused_with_what_to_pass(advance):
    with pytest.raises(ValueError, match=r"advance=.*pass None \(K-1-k on stage k\), 'auto' .* or a list"):
        build_schedule("advance-forward", 2, 4, advance=advance)


@pytest.mark.parametrize("name", ["1f1b", "dapple", "gpipe", *SEVERAL_STAGES, "zero-bubble-h1"])
def test_an_advance_is_refused_by_schedules_that_take_none(name):
    with pytest.raises(ValueError, match=r"advance=0: .* takes none"):
        build_schedule(name, 2, 4, advance=0)
    with pytest.raises(ValueError, match=r"advance='auto': .* takes none"):
        build_schedule(name, 2, 4, advance="auto")


@pytest.mark.parametrize("value", [0, 1, -2, True, 2.0, "2"])
def test_stages_per_worker_is_a_count_of_several(value):
    with pytest.raises(
        ValueError, match=f"stages_per_worker={value!r}: must be an int of at least 2; '1f1b' has 1"
    ):
        build_schedule("interleaved-1f1b", 4, 4, stages_per_worker=value)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble-v", "dualpipe-v"])
def test_stages_per_worker_are_refused_by_schedules_that_take_none(name):
    with pytest.raises(
        ValueError,
        match=r"stages_per_worker=2: .* takes none, leave it out or choose 'interleaved-1f1b' or 'looped-bfs'",
    ):
        build_schedule(name, 4, 4, stages_per_worker=2)


@pytest.mark.parametrize(
    ("name", "stages", "per_worker", "message"),
    [
        (
            "interleaved-1f1b",
            5,
            None,
            "stages=5: .* 2 stages on each worker, give a multiple of 2, 4 for example",
        ),
        (
            "interleaved-1f1b",
            4,
            3,
            "stages=4: .* 3 stages on each worker, give a multiple of 3, 3 for example",
        ),
        ("interleaved-1f1b", 1, None, "stages=1: .* give a multiple of 2, 2 for example"),
        ("zero-bubble-v", 3, None, "stages=3: .* 2 stages on each worker"),
        ("dualpipe-v", 3, None, "stages=3: dualpipe-v has 2 stages on each worker, give a multiple of 2, 2"),
        ("looped-bfs", 4, 3, "stages=4: looped-bfs has 3 stages on each worker, give a multiple of 3, 3"),
        ("interleaved-zero-bubble", 5, None, "stages=5: interleaved-zero-bubble has 2 stages on each worker"),
    ],
)
def test_stages_must_divide_over_the_workers(name, stages, per_worker, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(name, stages, 4, stages_per_worker=per_worker)
