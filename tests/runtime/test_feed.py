"""Batches fetched ahead are those that would have been fetched, in the same order, whatever had time to be idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from avgpipe import Pipeline, Plan
from avgpipe.runtime.feed import Prefetch
from avgpipe.runtime.scheduler import Scheduler
from tests.runtime.cases import language_model, momentum, token_batches


def made(copy: Any = lambda pairs: None, count: int = 1) -> Prefetch:
    return Prefetch(copy, count)


def first(batch: Any) -> Any:
    """The inputs of a batch's first pair."""
    (inputs, _), *_ = batch[0]
    return inputs


def rest(prefetch: Prefetch) -> list[Any]:
    found = []
    while (batch := prefetch.next()) is not None:
        found.append(first(batch))
    return found


def pairs(count: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    return iter([(n, -n) for n in range(begin, begin + count)])


def fetch(prefetch: Prefetch) -> bool:
    return prefetch.fetch(nullcontext)


@pytest.mark.parametrize("often", [0, 1, 2])
def test_the_order_is_the_loaders(often: int) -> None:
    prefetch = made()
    prefetch.open(pairs(5))
    found = []
    for _ in range(5):
        for _ in range(often):
            fetch(prefetch)
        found.append(first(prefetch.next()))
    assert found == list(range(5))
    fetch(prefetch)
    assert prefetch.next() is None
    assert prefetch.next() is None


def test_one_batch_at_most_is_ahead() -> None:
    prefetch = made()
    source = pairs(5)
    prefetch.open(source)
    assert [fetch(prefetch) for _ in range(3)] == [True, False, False]
    assert next(source)[0] == 1


def test_nothing_is_asked_of_a_loader_that_has_ended() -> None:
    asked = 0

    def count() -> Iterator[Any]:
        nonlocal asked
        yield 0, 0
        asked += 1

    prefetch = made()
    prefetch.open(count())
    assert rest(prefetch) == [0]
    assert not fetch(prefetch)
    assert asked == 1


def test_an_iterator_given_again_loses_nothing() -> None:
    prefetch, source = made(), pairs(6)
    prefetch.open(source)
    assert first(prefetch.next()) == 0
    fetch(prefetch)
    prefetch.open(source)
    assert rest(prefetch) == [1, 2, 3, 4, 5]


def test_an_iterator_given_again_after_another_loses_nothing() -> None:
    prefetch, one, two = made(), pairs(3), (n for n in pairs(3, 10))
    found = []
    for source in (one, two, one, two, one, two):
        prefetch.open(source)
        batch = prefetch.next()
        assert batch is not None
        found.append(first(batch))
        fetch(prefetch)
    assert found == [0, 10, 1, 11, 2, 12]


def test_what_is_given_back_comes_once_more_and_stays_with_its_loader() -> None:
    prefetch, one = made(), pairs(4)
    prefetch.open(one)
    taken = [prefetch.next() for _ in range(2)]
    fetch(prefetch)
    prefetch.give_back([batch for batch, _ in filter(None, taken)])
    assert first(prefetch.next()) == 0
    prefetch.open(pairs(1, 10))
    assert rest(prefetch) == [10]
    prefetch.open(one)
    assert rest(prefetch) == [1, 2, 3]


def test_what_a_caller_gives_comes_alone_and_costs_the_loader_nothing() -> None:
    prefetch, loader = made(), pairs(3)
    prefetch.open(loader)
    assert first(prefetch.next()) == 0
    fetch(prefetch)
    for _ in range(2):
        prefetch.give([[(10, -10)], [(11, -11)]])
        assert first(prefetch.next()) == 10
    prefetch.give_back([[(10, -10)]])
    assert not fetch(prefetch)
    assert rest(prefetch) == [10, 11]
    prefetch.open(loader)
    assert rest(prefetch) == [1, 2]


def test_a_list_given_again_begins_again() -> None:
    prefetch, loader = made(), list(pairs(3))
    for _ in range(2):
        prefetch.open(loader)
        assert first(prefetch.next()) == 0
        fetch(prefetch)


@pytest.mark.parametrize("often", [0, 1])
def test_what_a_loader_raises_comes_after_its_earlier_batches(often: int) -> None:
    def broken() -> Iterator[Any]:
        yield 0, 0
        raise OSError("disk")

    prefetch = made()
    prefetch.open(broken())
    assert first(prefetch.next()) == 0
    for _ in range(often):
        fetch(prefetch)
    with pytest.raises(OSError, match="disk"):
        prefetch.next()
    assert prefetch.next() is None


@pytest.mark.parametrize("often", [0, 1])
def test_a_wrong_batch_is_refused_in_its_turn(often: int) -> None:
    prefetch = made()
    prefetch.open([(0, 0), (1, 2, 3)])
    for _ in range(often):
        fetch(prefetch)
    assert first(prefetch.next()) == 0
    for _ in range(often):
        fetch(prefetch)
    with pytest.raises(TypeError, match="not tuple of 3"):
        prefetch.next()


# ---- in a pipeline -----------------------------------------------------------------------------------------------


def pipeline(N: int = 1) -> Pipeline:
    plan = Plan(stages=2, pipelines=N, batch="per-pipeline", micro_batches=2)
    return Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum)


@pytest.fixture(params=["idle", "busy"])
def idle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether there is time to fetch ahead: before every step, or never."""
    run_until = Scheduler.run_until
    asked: list[bool] = []

    def always(self: Scheduler, done: Any, work: Any = lambda: False, *rest: Any, **named: Any) -> None:
        asked.append(work())
        run_until(self, done, work, *rest, **named)

    def never(self: Scheduler, done: Any, work: Any = lambda: False, *rest: Any, **named: Any) -> None:
        run_until(self, done, (lambda: False) if work.__name__ == "fetch" else work, *rest, **named)

    monkeypatch.setattr(Scheduler, "run_until", always if request.param == "idle" else never)
    return str(request.param)


@pytest.mark.parametrize("N", [1, 3])
def test_results_before_an_error_of_the_loader_come_first(N: int, idle: str) -> None:
    def broken() -> Iterator[Any]:
        yield from token_batches(4, 6)
        raise OSError("disk")

    with pipeline(N) as p:
        results: list[int] = []
        with pytest.raises(OSError, match="disk"):
            results.extend(r.batch for r in p.train(broken()))
        under_way = p._session.feed._most_in_flight - 1  # they are finished, but nobody is there to be told
        assert results == list(range(4 - under_way))
        assert [r.batch for r in p.train(token_batches(2, 6))] == [4, 5]


def noisy(count: int) -> Iterator[Any]:
    """A loader that draws from torch's own generator."""
    for _ in range(count):
        yield torch.randint(11, (6,)), torch.randint(11, (6,))


DRAWN: dict[Any, Any] = {}


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("caller_draws", [False, True])
def test_loaders_that_draw_give_the_same_batches(N: int, caller_draws: bool, idle: str) -> None:
    """Also when the loop's body draws from the same generator: what is fetched when depends on no timing."""
    torch.manual_seed(3)
    data = torch.randint(11, (48,)), torch.randint(11, (48,))
    losses, draws = [], []
    with pipeline(N) as p:
        torch.manual_seed(4)
        loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=True)
        for source in (noisy(6), loader, loader):
            for r in p.train(source):
                losses.append(r.loss)
                if caller_draws:
                    draws.append(float(torch.rand(())))
    found = losses, draws
    assert DRAWN.setdefault((N, caller_draws), found) == found


@pytest.mark.parametrize("N", [1, 2])
def test_an_iterator_in_two_loops_trains_as_in_one(N: int, idle: str) -> None:
    batches = token_batches(6, 6)
    ends = []
    for cut in (None, 2):
        with pipeline(N) as p:
            source = iter(batches)
            losses = {}
            for r in p.train(source):
                losses[r.batch] = r.loss
                if r.batch == cut:
                    break
            p.evaluate(batches[:2])
            losses.update({r.batch: r.loss for r in p.train(source)})
            ends.append((losses[5], {n: t.clone() for n, t in p.state_dict().items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(t, ends[1][1][n]) for n, t in ends[0][1].items())
