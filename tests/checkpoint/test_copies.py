"""When copies are taken, in batches: all ranks count these alike; and where there is no room for one."""

from types import SimpleNamespace
from typing import Any

import pytest

from avgpipe import PipelineError
from avgpipe.fault.copies import Intervals, StateCopies
from tests.checkpoint.test_snapshot import PLANS, make


def test_intervals_grow_from_slow_first_batches_to_the_seconds_asked_for() -> None:
    intervals = Intervals(2.0)
    assert intervals.after(0, 9.0) == 1
    found, batches = [], 1
    for seconds in (1.0, *[0.1] * 6):
        batches = intervals.after(batches, batches * seconds)
        found.append(batches)
    assert found == [2, 4, 8, 16, 20, 20, 20]


def test_a_pause_or_a_copy_that_was_asked_for_changes_them_by_a_factor_of_two_at_most() -> None:
    intervals = Intervals(2.0)
    intervals.after(20, 2.0)
    assert intervals.after(20, 62.0) == 10  # a pause of a minute
    assert intervals.after(10, 1.0) == 20
    assert intervals.after(1, 1e-3) == 40
    assert intervals.after(40, 4.0) == 20


def test_a_copy_before_every_batch() -> None:
    intervals = Intervals(0.01)
    assert [intervals.after(1, 0.5) for _ in range(3)] == [1, 1, 1]


def test_without_room_for_a_copy_it_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room")

    copies = StateCopies(1)
    with make(PLANS[-1]) as p:

        def take(batches: int) -> None:
            copies.begin(p._spec.model, p._session.worker, batches, 1)
            copies.settle()

        copies.attach(p._session.worker)
        with monkeypatch.context() as memory:
            memory.setattr("avgpipe.checkpoint.snapshot._Copied.of", full)
            take(3)
        assert "the copy in memory before batch 3 is left out: no room" in caplog.text
        assert (copies._batches, copies.oldest) == ([], 3)
        take(5)
        assert (copies._batches, copies.oldest) == ([5], 5)
        assert len(copies._sending) > 1
        with monkeypatch.context() as memory:
            memory.setattr("avgpipe.checkpoint.snapshot._Copied.of", full)
            take(7)
        copies.begin(p._spec.model, p._session.worker, 9, 1)
        assert copies._batches == [5]
        copies.settle()
        assert copies._batches == [5, 9]
        with monkeypatch.context() as memory:
            memory.setattr("avgpipe.checkpoint.snapshot._Copied.of", full)
            take(11)
            take(13)
            take(15)
        assert (copies._batches, copies.oldest) == ([], 15)
        copies._sending = []


@pytest.mark.parametrize(
    ("others", "goes_back"),
    [
        ([[], [], 0, float("inf"), True], True),  # a new process
        ([[], [], 0, 0, False], False),  # lacks the first batches
        ([[], [], 1, 1, False], False),  # has made a call before the first batch that cannot be repeated
        ([[0], [], 0, 3, True], True),  # has a copy of its own, and none of the first rank's
    ],
)
def test_where_no_copy_is_whole_all_begin_again_if_all_can(others: list[Any], goes_back: bool) -> None:
    world: Any = SimpleNamespace(size=2, rank=0, gather=lambda own: [own, others])
    copies, nothing = StateCopies(1), SimpleNamespace()
    if goes_back:
        assert copies.go_back(world, nothing, nothing, 0, 3, has_all=True) == 0  # type: ignore[arg-type]
        assert copies.is_due(0)
    else:
        with pytest.raises(PipelineError, match="go on from a checkpoint"):
            copies.go_back(world, nothing, nothing, 0, 3, has_all=True)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="go on from a checkpoint"):
        copies.go_back(world, nothing, nothing, 0, 3, has_all=False)  # type: ignore[arg-type]
