"""Options that the loop sets in ``pipeline.optimizers`` outlast a replacement, to the same bits."""

from __future__ import annotations

import os
import signal
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from avgpipe.fault.loop_options import LoopOptions
from avgpipe.ranks.environment import GENERATION
from tests.runtime.test_replaced import (
    SHAPES,
    SHARED,
    die_early,
    given,
    made,
    replaced,
    send_copies,
    set_interval,
)

BATCHES = 16


def dies(deaths: Any, when: Any) -> float:
    """``deaths``: (generation, rank, when) of processes that are killed."""
    if (int(os.environ[GENERATION]), int(os.environ["RANK"]), when) in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def set_options(optimizers: list[torch.optim.Optimizer], batch: int, sets_lr: bool) -> None:
    """Set numbers, a tuple and a flag by the number of a batch, some after each one, and some after few."""
    for n, one in enumerate(optimizers):
        group = one.param_groups[0]
        if sets_lr:
            group["lr"] = 1e-2 * 0.9**batch / (n + 1)
        if batch == 3:
            group["weight_decay"] = 0.5
        if batch % 4 == 2:
            group["betas"] = (0.9 - 0.05 * (batch % 3), 0.99)
        if batch % 5 == 4:
            group["maximize"] = not batch % 2


def train(how: str, options: dict[str, Any], deaths: Any = ()) -> Any:
    """Losses by batch, weights, and options at the end of a loop that sets them.

    Args:
        how: "fetched": in ``pipeline.optimizers`` of the moment, beside schedules of the pipeline; "hoisted": in those
            from before the loop; "schedule": by schedules of the script's own of these.
    """
    set_interval(4)
    losses = dict[int, float]()
    step_lr = None if how != "fetched" else lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.95)
    with made(options, lr_scheduler=step_lr) as p:
        kept, schedules = p.optimizers, list[Any]()
        if how == "schedule":
            of = torch.optim.lr_scheduler.LambdaLR
            schedules = [of(one, lambda n: 0.9**n, last_epoch=p.batches - 1) for one in kept]
        for result in p.train(given(BATCHES)[p.batches :]):
            losses[result.batch] = result.loss
            dies(deaths, result.batch)
            for schedule in schedules:
                schedule.step()
            if how != "schedule":
                set_options(p.optimizers if how == "fetched" else kept, result.batch, how == "hoisted")
            dies(deaths, f"set after {result.batch}")
            if result.batch == 11:
                if os.environ[GENERATION] == "0":
                    send_copies(p)
                p.evaluate(given()[:2], lambda *_: dies(deaths, "evaluated"))
        groups = [group for one in kept for group in one.param_groups]
        assert groups == [group for one in p.optimizers for group in one.param_groups]
        return losses, p.state_dict(), [{**group, "params": None} for group in groups]


@cache
def undisturbed(how: str, shape: int) -> Any:
    (expected, _), _ = replaced(2, function=train, how=how, options=OPTIONS[shape])
    return expected


OPTIONS: list[dict[str, Any]] = [SHAPES[2], SHARED, SHAPES[1]]
MOMENTS: list[Any] = [
    [(0, 1, 0)],
    [(0, 1, "set after 0")],  # noticed while the second copy is taken
    [(0, 1, 9)],
    [(0, 0, "set after 9")],
    [(0, 1, "evaluated")],
    [(0, 0, 9), (1, 1, "set after 10")],
]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("deaths", MOMENTS, ids=str)
@pytest.mark.parametrize("how", ["fetched", "hoisted", "schedule"])
@pytest.mark.parametrize("shape", range(len(OPTIONS)))
def test_options_that_the_loop_sets_count_in_repeated_batches(how: str, shape: int, deaths: Any) -> None:
    expected = undisturbed(how, shape)
    run, count = replaced(2, function=train, how=how, options=OPTIONS[shape], deaths=deaths)
    assert count == len(deaths)
    for losses, weights, groups in run:
        assert losses == {batch: loss for batch, loss in expected[0].items() if batch >= min(losses)}
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())
        assert groups == expected[2]


def train_from_loaded_weights(phase: str = "") -> Any:
    """Losses by batch and weights, where options are set before and after weights are loaded, and a rank is lost."""
    die_early(phase, 1, "SIGKILL")
    with made() as p:
        if not p.batches:
            weights = p.state_dict()
            for one in p.optimizers:
                one.param_groups[0].update(lr=0.05, weight_decay=0.5)
            p.load_state_dict({name: value * 0.5 for name, value in weights.items()})
            for one in p.optimizers:
                one.param_groups[0]["weight_decay"] = 0.3
        return {result.batch: result.loss for result in p.train(given(6)[p.batches :])}, p.state_dict()


@pytest.mark.ranks
@pytest.mark.slow
def test_options_that_were_set_before_the_first_batch_count_where_all_begin_anew() -> None:
    (expected, _), _ = replaced(2, function=train_from_loaded_weights)
    run, count = replaced(2, function=train_from_loaded_weights, phase="first copy")
    assert count == 1
    for losses, weights in run:
        assert losses == expected[0]
        assert all(torch.equal(value, weights[name]) for name, value in expected[1].items())


# ---- without processes -----------------------------------------------------------------------------------------------


def worker_of(*optimizers: torch.optim.Optimizer) -> Any:
    trained = {n: SimpleNamespace(optimizer=one) for n, one in enumerate(optimizers)}
    return SimpleNamespace(trained=trained, world=SimpleNamespace(size=2))


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(2, requires_grad=True)], **{"lr": 0.1, **options})


def followed(*optimizers: torch.optim.Optimizer) -> LoopOptions:
    found = LoopOptions()
    found.attach(worker_of(*optimizers))
    return found


def replace_by(options: LoopOptions, *optimizers: torch.optim.Optimizer) -> None:
    options.release()
    options.attach(worker_of(*optimizers))


def test_changes_are_made_again_before_the_update_that_they_preceded() -> None:
    one, other = sgd(), sgd(lr=torch.tensor(0.1))
    options = followed(one, other)
    (group,), (tensors,) = one.param_groups, other.param_groups
    group["lr"] = 0.2
    options.note(4)
    group["lr"] = 0.3
    tensors["lr"].mul_(2)
    group["of the caller's"] = None, (1, True)
    options.note(4)
    options.look()
    group["momentum"] = 0.5
    options.note(6)
    options.pause()
    group["lr"] = 0.7  # by a schedule
    options.look()
    options.note(7)
    memory = torch.tensor(0.1)
    replace_by(options, sgd(), sgd(lr=memory))
    options.begin_again(3, 3)
    (group,), (tensors,) = one.param_groups, other.param_groups
    options.repeat(3)
    assert group["lr"] == 0.1
    options.repeat(5)
    assert (group["lr"], group["momentum"], tensors["lr"]) == (0.3, 0, torch.tensor(0.1) * 2)
    assert tensors["lr"] is memory
    assert group["of the caller's"] == (None, (1, True))
    options.repeat(float("inf"))
    assert (group["lr"], group["momentum"]) == (0.3, 0.5)


def test_a_copy_gets_the_options_that_were_set_after_it_and_no_others() -> None:
    options = followed(one := sgd(momentum=0.1))
    for batch, lr in ((4, 0.2), (5, 0.3)):
        one.param_groups[0]["lr"] = lr
        options.note(batch)
    one.param_groups[0]["momentum"] = 0.2
    options.note(5)
    options.look()
    for held, expected in ((0.1, 0.3), (0.2, 0.3), (0.3, 0.3), (0.25, 0.25)):  # the last: by a schedule
        replace_by(options, sgd(lr=held, momentum=0.1))
        options.begin_again(4, 5)
        assert [one.param_groups[0][name] for name in ("lr", "momentum")] == [expected, 0.2]
    replace_by(options, sgd(momentum=0.1))
    options.begin_again(5, 5)
    assert one.param_groups[0]["lr"] == 0.1
    options.forget(6)
    replace_by(options, sgd())
    options.begin_again(0, 0)
    options.repeat(7)
    assert one.param_groups[0]["lr"] == 0.1


def test_a_load_replaces_what_was_set_before() -> None:
    options = followed(one := sgd())
    (group,) = one.param_groups
    group.update(lr=0.2, momentum=0.5)
    options.note(0)
    group["lr"] = 0.3  # by the load
    options.loaded(forgets=False)
    group["lr"] = 0.4
    options.note(0)
    replace_by(options, sgd())
    one.param_groups[0]["lr"] = 0.3  # by the load, once more
    options.loaded(forgets=False)
    options.begin_again(0, 0)
    assert [one.param_groups[0][name] for name in ("lr", "momentum")] == [0.4, 0.5]
    options.loaded(forgets=True)
    replace_by(options, sgd())
    options.begin_again(0, 0)
    assert one.param_groups[0]["lr"] == 0.1


class Gathered:
    """A world in which each rank gives what is listed."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def gather(self, own: Any) -> list[Any]:
        return [own if row is None else row for row in self._rows]


def given_by(*rates: Any) -> Any:
    """What a rank with as many groups gives, whose loop has set rates before batch 5."""
    optimizers, rows = [sgd() for _ in rates], list[Any]()
    options = followed(*optimizers)
    for one, lr in zip(optimizers, rates):
        one.param_groups[0]["lr"] = lr
    options.note(5)
    options.share(SimpleNamespace(gather=rows.append), 4, 5, is_new=False)  # type: ignore[arg-type]
    return rows[0]


@pytest.mark.parametrize(
    ("rows", "lr", "says"),
    [
        ([given_by(0.2), None], 0.2, ""),
        ([given_by(0.2, 0.2), given_by(torch.tensor(0.5)), None], torch.tensor(0.5), ""),
        (
            [given_by(0.2), None, given_by(0.3)],
            0.2,
            "options in optimizers of rank 2 than in those of rank 0",
        ),
        ([given_by(0.2, 0.2), None], 0.1, "no other rank has as many groups"),
        ([given_by(), None], 0.1, ""),
    ],
)
def test_a_new_process_takes_what_another_rank_has_set(
    rows: list[Any], lr: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = followed(one := sgd())
    options.share(Gathered(rows), 4, 5, is_new=True)  # type: ignore[arg-type]
    options.begin_again(4, 5)
    assert one.param_groups[0]["lr"] == lr
    assert says in caplog.text
    assert bool(caplog.records) == bool(says)
