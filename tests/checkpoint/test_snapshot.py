"""Snapshots: training goes on meanwhile, and what is restored from memory goes on as the snapshot's pipeline did."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.checkpoint import Snapshot, restore, snapshot
from avgpipe.checkpoint.snapshot import may_run
from avgpipe.runtime.session import Session
from tests.checkpoint.test_checkpoint import Summer, same
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import adamw

PLANS = [
    Plan(stages=K, pipelines=N, micro_batches=2, rule=rule if N > 1 else None)
    for K in (1, 2)
    for N, rule in ((1, None), (2, "avgpipe"), (2, "mean-gradient"))
]


def make(plan: Plan, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), Summer(), nn.Linear(6, 3)]
    return Pipeline(
        nn.Sequential(*layers),
        plan,
        **grouped(
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=adamw,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
            seed=2,
            **options,
        ),
    )


def batches(count: int, samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 6, generator=g), torch.randint(3, (samples,), generator=g))
        for _ in range(count)
    ]


def take(snapshot: Snapshot, p: Pipeline) -> None:
    """Copy what is there now; no batch is in flight."""
    done: list[bool] = []
    snapshot.begin(p._spec.model, p._session.worker, p.batches, lambda: done.append(True))
    assert not done
    snapshot.finish()
    assert done == [True]
    snapshot.whole()


def restore_into(p: Pipeline, snapshot: Snapshot) -> None:
    restore(snapshot.contents, p._spec.model, p._session.worker)
    p.world.barrier()
    p._session.feed.next_batch = snapshot.batches
    p._session.resume()


def trained(p: Pipeline, on: list[Any]) -> Any:
    return [r.loss for r in p.train(on)], p.state_dict(), p.state_dict(weights=p.plan.pipelines - 1)


def go_back(plan: Plan) -> bool:
    """Train on from a snapshot, then again: in the same pipeline, and in a new one."""
    before, after = batches(10)[:5], batches(10)[5:]
    snapshot = Snapshot()
    with make(plan, ema_decay=0.9) as p:
        list(p.train(before))
        take(snapshot, p)
        expected = trained(p, after)
        for _ in range(2):  # what is restored is a copy
            restore_into(p, snapshot)
            found = trained(p, after)
            assert found[0] == expected[0]
            assert same(found[1], expected[1])
            assert same(found[2], expected[2])
        average = p.state_dict(weights="ema")
    with make(plan, ema_decay=0.9) as p:
        restore_into(p, snapshot)
        assert trained(p, after)[0] == expected[0]
        assert same(p.state_dict(weights="ema"), average)
    return True


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"K{p.stages}N{p.pipelines}{p.rule}")
def test_what_is_restored_from_memory_goes_on_bit_for_bit(plan: Plan) -> None:
    go_back(plan)


def go_back_on_ranks() -> bool:
    return all(go_back(plan) for plan in PLANS if plan.stages == 2)


@pytest.mark.ranks
@pytest.mark.slow
def test_what_is_restored_from_memory_goes_on_bit_for_bit_on_ranks() -> None:
    assert run(2, go_back_on_ranks) == [True, True]


def test_a_snapshot_uses_its_memory_again() -> None:
    snapshot = Snapshot()

    def places() -> list[int]:
        return sorted(memory.data_ptr() for memory in snapshot._memory)

    with make(PLANS[-1]) as p:
        list(p.train(batches(4)))
        take(snapshot, p)
        before, weights = places(), p.state_dict()
        list(p.train(batches(4)))
        found = [snapshot.contents[n]["reference"]["weights"] for n in p._session.worker.held]
        assert same(weights, {name: value for of in found for name, value in of.items()})
        take(snapshot, p)
        assert places() == before
        assert snapshot.batches == 8


def test_a_snapshot_is_whole_when_the_device_has_made_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    event = SimpleNamespace(synchronize=lambda: order.append("waited"))
    stream = SimpleNamespace(record_event=lambda: order.append("recorded") or event)
    monkeypatch.setattr(snapshot, "current_stream", lambda device: stream)
    monkeypatch.setattr(snapshot, "changed_by_updates", lambda *_: {"copied": order.append("copied")})
    worker: Any = SimpleNamespace(held=[0], lanes={}, streams=object(), device=torch.device("cpu"))
    made = Snapshot()
    made.begin(None, worker, 3, lambda: None)  # type: ignore[arg-type]
    made.finish()
    assert made.whole() == {0: {"copied": None}}
    assert order == ["copied", "recorded", "waited"]


def while_they_run(plan: Plan) -> bool:
    """What is copied while batches are in flight is what is there when they have ended."""
    given = batches(24, samples=24)
    idle, running = Snapshot(), Snapshot()
    done, in_flight = list[int](), list[int]()
    with make(plan, ema_decay=0.9) as p:

        def begin(_: Session) -> None:  # called just before another batch begins
            if not running.batches and p.batches >= 7 and may_run(plan, p.batches):
                in_flight.append(len(p._session.feed._in_flight))
                running.begin(p._spec.model, p._session.worker, p.batches, lambda: done.append(p.batches))

        p._session.policy.before_batch = begin  # type: ignore[method-assign]
        list(p.train(given))
        assert in_flight == [p._session.feed._most_in_flight - 1]
        assert len(done) == 1
        assert not any(lane.watchers for lane in p._session.worker.lanes.values())
        expected = p.state_dict(), p.state_dict(weights=plan.pipelines - 1), p.state_dict(weights="ema")
        restore_into(p, running)
        list(p.train(given[running.batches :]))
        assert same(p.state_dict(), expected[0])
        assert same(p.state_dict(weights=plan.pipelines - 1), expected[1])
        assert same(p.state_dict(weights="ema"), expected[2])
    with make(plan, ema_decay=0.9) as p:
        list(p.train(given[: running.batches]))
        take(idle, p)
        assert equal(running.contents, idle.contents)
    return True


def equal(found: Any, expected: Any) -> bool:
    """Whether nested containers and tensors are equal in every bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[k], v) for k, v in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


RUNNING = [
    Plan(stages=K, pipelines=N, micro_batches=2 * N, rule=rule, batch=batch, staleness=staleness)
    for K in (1, 3)
    for N, rule, batch in (
        (1, None, "global"),
        (2, "avgpipe", "per-pipeline"),
        (3, "easgd", "per-pipeline"),
        (2, "mean-gradient", "global"),
        (3, "mean-gradient", "per-pipeline"),
    )
    for staleness in (0, 1)
]


@pytest.mark.grid(8)
@pytest.mark.parametrize("plan", RUNNING, ids=str)
def test_what_is_copied_while_batches_run_is_what_is_there_when_they_have_ended(plan: Plan) -> None:
    while_they_run(plan)


def while_they_run_on_ranks() -> bool:
    return all(while_they_run(replace(plan, stages=2)) for plan in RUNNING if plan.stages == 3)


@pytest.mark.ranks
@pytest.mark.slow
def test_what_is_copied_on_ranks_while_batches_run() -> None:
    assert run(2, while_they_run_on_ranks) == [True, True]
