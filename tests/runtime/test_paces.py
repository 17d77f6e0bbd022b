"""Shares by pace: what is decided, when, and that all decide the same, whichever pipelines leave and join."""

from __future__ import annotations

import math
import os
import random
from itertools import product
from typing import Any

import pytest

from avgpipe import Plan
from avgpipe.fault import paces
from avgpipe.fault.paces import EVERY, PUBLISHED_AT, SharesByPace, shares_by
from tests.isolated import Isolated
from tests.runtime.pipelines_here import Here
from tests.runtime.test_every_sample import LOSSES, batches_of, expected, moved_as
from tests.runtime.test_isolated import assert_as_emulated, train

FIRST = EVERY + PUBLISHED_AT + 2  # step with shares by pace: the second time that they are better


@pytest.mark.parametrize(
    ("of", "micro_batches", "found"),
    [
        ([1, 1, 2], 12, [5, 5, 2]),
        ([1, 1, 1], 12, [4, 4, 4]),
        ([1, 100], 12, [11, 1]),
        ([100, 1, 100], 3, [1, 1, 1]),
        ([1, 1, 2], 2, [1, 1, 0]),
        ([3.0], 5, [5]),
    ],
)
def test_shares(of: list[float], micro_batches: int, found: list[int]) -> None:
    assert shares_by(of, micro_batches) == found


def test_no_other_shares_end_earlier() -> None:
    draw = random.Random(0)
    for _ in range(50):
        of, M = [draw.uniform(0.5, 4) for _ in range(3)], draw.randint(3, 9)
        all_shares = (s for s in product(range(1, M + 1), repeat=3) if sum(s) == M)
        least = min(max(n * pace for n, pace in zip(shares, of)) for shares in all_shares)
        assert max(n * pace for n, pace in zip(shares_by(of, M), of)) == pytest.approx(least)


class Numbers:
    """The numbers of one process, on a board of several."""

    def __init__(self, board: list[float], rank: int) -> None:
        self._board, self._rank = board, rank

    def note(self, number: float) -> None:
        self._board[self._rank] = number

    def noted(self) -> list[float]:
        return self._board


class Given(SharesByPace):
    """Measures what a test says, by the number of the step."""

    def __init__(self, *measured: float, board: list[float] | None = None, rank: int = 0) -> None:
        scheduler: Any = None
        super().__init__(scheduler, Numbers([0.0] if board is None else board, rank), 12)
        self._given = measured

    def _measured(self) -> float:
        turn = max(self._trained)
        return self._given[min(turn // EVERY, len(self._given) - 1)]


def here_of(*measured: tuple[float, ...], loss: str = "mean", batches: int = 80) -> tuple[Here, Any]:
    plan = Plan(pipelines=len(measured), micro_batches=12, isolate=True)
    data = batches_of(batches, 24)
    given = {"loss_weight": LOSSES[loss][1], "paces": lambda pipeline: Given(*measured[pipeline])}
    return Here(plan, data, LOSSES[loss][0], **given), expected(data, loss, 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_faster_pipelines_get_more_from_the_same_step_on(loss: str) -> None:
    here, rule = here_of((1.0,), (1.0,), (2.0,), loss=loss)
    here.run()
    assert here.sizes[:FIRST] == [{0: 4, 1: 4, 2: 4}] * FIRST
    assert here.sizes[FIRST:] == [{0: 5, 1: 5, 2: 2}] * (80 - FIRST)
    assert moved_as(here, rule)


def test_shares_stay_while_others_are_hardly_better() -> None:
    here, _ = here_of((1.0,), (1.2,))
    here.run()  # 7 and 5 would take 7 instead of 7.2
    assert set(map(tuple, map(dict.values, here.sizes))) == {(6, 6)}


def test_one_slow_time_changes_nothing() -> None:
    here, _ = here_of((1.0, 9.0, 1.0, 9.0, 1.0), (1.0,))
    here.run()
    assert set(map(tuple, map(dict.values, here.sizes))) == {(6, 6)}


def test_without_the_pace_of_one_shares_are_equal() -> None:
    here, _ = here_of((1.0,), (math.inf,))
    here.run()
    assert set(map(tuple, map(dict.values, here.sizes))) == {(6, 6)}


def test_shares_stay_as_they_are_while_the_pace_of_one_is_missing() -> None:
    none = math.inf
    here, _ = here_of((1.0,), (1.0, 1.0, 4.0), (2.0, 2.0, none))
    here.run()
    assert here.sizes[-1] == {0: 5, 1: 5, 2: 2}


def test_the_slowest_process_of_a_pipeline_counts() -> None:
    board = [0.0, 0.0]
    stages = [Given(pace, board=board, rank=rank) for rank, pace in enumerate((1.0, 3.0))]
    stages[0].end(0, 6, {})
    assert stages[1].published(PUBLISHED_AT) == {}
    stages[1].end(0, 6, {})
    assert [stage.published(PUBLISHED_AT) for stage in stages] == [{"pace": 3.0}] * 2
    assert stages[0].published(PUBLISHED_AT + 1) == {}


def test_a_pipeline_that_is_left_alone_keeps_shares_by_pace_until_another_joins() -> None:
    here, rule = here_of((1.0,), (1.0,), (2.0,))
    here.run(FIRST + 2)
    for i in here.living:
        here.begin(i)
    here.lose(0)
    here.run(8)
    assert here.sizes[-1] == {1: 8, 2: 4}
    here.join(0)
    here.run(EVERY)
    equal = here.sizes.index({0: 4, 1: 4, 2: 4}, FIRST)
    assert here.sizes[equal - 1] == {1: 8, 2: 4}
    here.run()
    assert here.sizes[-1] == {0: 5, 1: 5, 2: 2}
    assert moved_as(here, rule)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_leaves_and_joins_all_decide_the_same(seed: int) -> None:
    """They would refuse each other's parts if not."""
    draw = random.Random(seed)
    each = [[draw.choice([1.0, 1.5, 2.0, 4.0]) for _ in range(4)] for _ in range(3)]
    measured = [tuple(pace for pace in of for _ in range(2)) for of in each]
    here, rule = here_of(*measured, batches=150)
    here.run_drawn(draw, until=120, losses=0.06)
    assert moved_as(here, rule)
    assert any(max(of.values()) > min(of.values()) + 1 for of in here.sizes)


def train_at_a_pace(**arguments: Any) -> Any:
    """Train with a pace that differs with the pipeline, and with the stage; shares change at step 12."""
    here = (1.0, 3.0)[int(os.environ["AVGPIPE_PIPELINE"])] / (1 + int(os.environ["RANK"]))
    paces.EVERY = 6
    SharesByPace._measured = lambda _: here  # type: ignore[method-assign]
    return train(**arguments)


@pytest.mark.promise(1)
@pytest.mark.parametrize("far", [(), (1,)], ids="far {}".format)
def test_processes_of_all_stages_have_the_same_shares(far: tuple[int, ...]) -> None:
    options = {"pipelines": 2, "micro_batches": 8}
    arguments = {"K": 2, "options": options, "optimizer": "momentum"}
    run = Isolated(2, 2, train_at_a_pace, far=far, shares="pace", **arguments)
    assert not run.failures, run.failures

    def counts(turn: int, members: int, micro_batches: int) -> list[int]:
        return shares_by([1.0, 3.0] if turn >= 12 else [1.0, 1.0], micro_batches)

    assert_as_emulated(run, options, "momentum", counts=counts)
