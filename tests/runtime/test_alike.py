"""All ranks are given the same batches, and their loaders end together, or the difference is named at once."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Audit, PeerLost, Pipeline, PipelineError, Plan
from avgpipe.ranks.rendezvous import Silence
from avgpipe.runtime.alike import Alike, mark
from tests.runner import run
from tests.runtime.cases import momentum

LOSS = nn.MSELoss()


class Ranks:
    """The store of some ranks, and what each is: in one process."""

    def __init__(self, count: int, is_on: bool = True, generation: int = 0) -> None:
        self.texts: dict[str, str] = {}
        self.failures: list[BaseException] = []
        worlds: list[Any] = [self.Of(self, n, count) for n in range(count)]
        self.alike = [Alike(world, self.failures.append, is_on, generation) for world in worlds]

    class Of:
        def __init__(self, ranks: Ranks, rank: int, size: int) -> None:
            self._ranks, self.rank, self.size = ranks, rank, size

        def first(self, name: str, text: str) -> str:
            return self._ranks.texts.setdefault(name, text)

        def noted(self, name: str) -> str | None:
            return self._ranks.texts.get(name)

    def batch(self, number: int, *values: float) -> None:
        for alike, value in zip(self.alike, values, strict=True):
            alike.batch(number, [torch.full((2, 3), value)], [torch.zeros(2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_a_mark_sees_values_shapes_and_dtypes(dtype: torch.dtype) -> None:
    value = torch.arange(12).to(dtype).reshape(3, 4)
    assert mark(value) == mark(value.clone())
    assert mark(value) != mark(value.flip(0))
    assert mark(value) != mark(value.reshape(4, 3))
    assert mark(value)[1] == f"[3, 4] {str(dtype)[6:]}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": torch.ones(2), "names": ["a", "b"]}, {"x": torch.ones(2), "names": ["b", "a"]}),
        ((torch.ones(2), 3), (torch.ones(2), 4)),
        (torch.zeros(1000, 5), torch.zeros(1000, 5).index_fill(0, torch.tensor(0), 1)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(0, 2), torch.ones(0, 3)),
        (torch.eye(3).to_sparse(), torch.eye(4).to_sparse()),
        (torch.ones(2, 2, dtype=torch.complex64).mH, torch.ones(2, 2, dtype=torch.complex64).mH * 2),
    ],
)
def test_marks_of_different_values_differ(one: Any, other: Any) -> None:
    assert mark(one) == mark(one)
    assert mark(one) != mark(other)


def test_the_first_batches_and_some_later_ones_are_compared() -> None:
    ranks = Ranks(3)
    for number in range(3):
        ranks.batch(number, 1, 1, 1)
    ranks.batch(3, 1, 2, 3)  # not looked at
    with pytest.raises(
        ValueError, match=r"batch 100 of train is not the same on rank 0 and rank 2: its inputs"
    ):
        ranks.batch(100, 1, 1, 2)


@pytest.mark.parametrize(
    ("number", "is_compared"), [(4, True), (64, True), (200, True), (5, False), (99, False)]
)
def test_later_batches_are_compared_at_powers_of_two_and_at_hundreds(number: int, is_compared: bool) -> None:
    ranks = Ranks(2)
    for before in range(number):
        ranks.batch(before, before, before)
    if not is_compared:
        ranks.batch(number, 1, 2)
        return
    with pytest.raises(ValueError, match=rf"batch {number} of train is not the same on rank 0 and rank 1"):
        ranks.batch(number, 1, 2)


def test_numbers_that_come_again_are_of_another_session() -> None:
    ranks = Ranks(2)
    ranks.batch(0, 1, 1)
    for alike in ranks.alike:
        alike.begin_anew()
    ranks.batch(0, 2, 2)
    for alike in ranks.alike:
        with alike.loop("evaluation 0"):
            alike.batch(0, [torch.ones(1)], [None])
            alike.end(1)
    ranks.batch(1, 3, 3)
    assert not ranks.failures


def test_a_loader_that_ends_early_is_seen_by_ranks_that_go_on_or_end_later() -> None:
    ranks = Ranks(2)
    ranks.batch(0, 1, 1)
    ranks.alike[0].end(1)
    ranks.alike[1].look()
    assert not ranks.failures
    ranks.alike[1].batch(1, [torch.ones(1)], [torch.ones(1)])
    ranks.alike[1].look()
    (failure,) = ranks.failures
    assert "loaders of train differ in length: rank 0 has 1 batches, rank 1 has at least 2. Give" in str(
        failure
    )
    with pytest.raises(PipelineError, match=r"rank 0 has 1 batches, rank 1 has 2\. Give all"):
        ranks.alike[1].end(2)


@pytest.mark.parametrize(("count", "is_on"), [(1, True), (2, False)])
def test_alone_or_switched_off_nothing_is_compared(count: int, is_on: bool) -> None:
    ranks = Ranks(count, is_on)
    ranks.batch(0, *range(count))
    for n, alike in enumerate(ranks.alike):
        alike.end(n)
        alike.look()
    assert not ranks.texts
    assert not ranks.failures


def test_after_a_replacement_the_batches_of_the_loop_it_was_in_are_compared_and_nothing_else() -> None:
    ranks = Ranks(2, generation=1)
    new = ranks.alike[1]
    for _ in range(2):  # loops that the others have been through, of which nothing is left
        new.begin_anew()
        new.end(18)
    ranks.batch(18, 1, 1)
    with pytest.raises(ValueError, match=r"batch 19 of train is not the same"):
        ranks.batch(19, 1, 2)
    for n, alike in enumerate(ranks.alike):
        alike.end(20 + n)
        alike.look()
        with alike.loop("evaluation 0"):
            alike.batch(0, [torch.full((1,), n)], [None])
        alike.begin_anew()
    ranks.batch(20, 1, 2)
    assert not ranks.failures


def test_a_store_that_does_not_answer_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def silent(self: Any, name: str, text: str) -> str:
        asked.append(name)
        raise Silence("the store does not answer")

    monkeypatch.setattr(Ranks.Of, "first", silent)
    for begin in (lambda alike: alike.batch(0, [torch.ones(1)], [None]), lambda alike: alike.end(0)):
        (alike, _), before = Ranks(2).alike, len(asked)
        for _ in range(3):
            begin(alike)
        assert len(asked) == before + 1


# ---- with real ranks -------------------------------------------------------------------------------------------------

WHAT = {
    "other values": r"batch 0 of train is not the same .*: its inputs and targets differ \(other values of \[6, 4\]",
    "other targets": r"batch 0 of train is not the same .*: its targets differ",
    "other sizes": r"batch 0 of train .*\(\[[36], 4\] float32 and \[[36], 4\] float32\)",
    "rank 0 ends early": r"rank 0 has 3 batches, rank 1 has at least 4\. Give all ranks one",
    "rank 1 ends early": r"rank 1 has 3 batches, rank 0 has at least 4\. Give all ranks one",
    "other evaluation": r"batch 0 of evaluation 0 is not the same .*: its inputs differ",
    "short evaluation": r"of evaluation 0 differ in length: rank [01] has [23] batches, rank [01] has",
    "other step": r"batch 5 of step is not the same",
    "other prediction": r"batch 3 of predict is not the same",
}


def used(what: str) -> str:
    """Return what went wrong with a pipeline that this rank gives something else than the other one does."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    if what == "other values":
        torch.manual_seed(rank)
    data = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(5)]
    if what == "other targets" and rank:
        data = [(x, y.flip(0)) for x, y in data]
    if what == "other sizes" and rank:
        data = [(x[:3], y[:3]) for x, y in data]
    if what == f"rank {rank} ends early":
        data = data[:3]
    evaluated = [(torch.full((4, 4), float(what == "other evaluation" and rank)), torch.zeros(4, 2))] * 3
    evaluated = evaluated[: 2 if what == "short evaluation" and rank else 3]
    plan = Plan(stages=2, micro_batches=2)
    try:
        with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, timeout_s=60) as pipeline:
            list(pipeline.train(data))
            pipeline.evaluate(evaluated)
            pipeline.step(data[0][0] + rank * (what == "other step"), data[0][1])
            pipeline.predict(torch.full((3, 4), float(rank * (what == "other prediction"))))
            pipeline.evaluate(evaluated[:1])
            for _ in range(2):
                pipeline.predict(torch.ones(2, 4))
            pipeline.state_dict()
    except (ValueError, PipelineError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.promise(0)
@pytest.mark.parametrize("what", WHAT)
def test_what_differs_between_ranks_ends_the_run_and_is_named_on_both(what: str) -> None:
    told = run(2, used, what=what)
    assert all(re.search(WHAT[what], text) for text in told), told
    assert sorted(text.split(":")[0] == PeerLost.__name__ for text in told) == [False, True]


@pytest.mark.ranks
def test_what_is_alike_trains() -> None:
    assert run(2, used, what="nothing") == ["", ""]


def refused_on_one(rank_that_refuses: int) -> list[str]:
    """What a script finds that goes on with another pipeline after a refusal, on this rank."""
    rank, found = int(os.environ["RANK"]), []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if rank == rank_that_refuses:
            raise ValueError("no optimizer for these")
        return momentum(parameters)

    for function in (optimizer, momentum):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        plan = Plan(stages=2, micro_batches=2)
        try:
            with Pipeline(
                model, plan, loss_fn=LOSS, optimizer=function, timeout_s=60, extensions=[Audit("off")]
            ) as pipeline:
                list(pipeline.train([(torch.ones(4, 4), torch.zeros(4, 2))]))
            found.append("")
        except (ValueError, PipelineError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_refuses_ends_the_pipeline_on_the_others_and_the_next_one_trains(rank: int) -> None:
    found = run(2, refused_on_one, rank_that_refuses=rank)
    assert [of[1] for of in found] == ["", ""]
    assert found[rank][0].endswith("no optimizer for these")
    part = f"rank {rank} (stage {rank}) cannot make its part of the pipeline: no optimizer for these"
    assert found[1 - rank][0] == f"ValueError: {part}"
