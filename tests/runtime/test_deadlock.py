"""No schedule, shape, order of delivery or order of devices makes a run hang, or changes what it computes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.links import choose
from avgpipe.links.link import Key, LocalLink, Mailbox
from avgpipe.runtime.lane import Queue
from avgpipe.runtime.scheduler import Scheduler
from tests.happens_before.plugin import checking
from tests.runtime.cases import (
    Trained,
    assert_same_training,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
    unequal,
)
from tests.systems import emulation

SCHEDULES = ["all-forward-all-backward", "1f1b", "advance-forward"]
LOSS = nn.MSELoss()


class Shuffled(LocalLink):
    """Holds messages back and delivers them in any order, some of them much later."""

    dice = random.Random()

    def __init__(self, mailbox: Mailbox, *device: Any) -> None:
        self._held: list[tuple[Key, Any]] = []
        self._real = mailbox
        super().__init__(self, *device)  # type: ignore[arg-type]
        mailbox.sources.append(self._release)

    def put(self, key: Key, value: Any) -> None:
        self._held.append((key, value))
        self._real.bell.ring()

    def _release(self) -> None:
        self.dice.shuffle(self._held)
        for _ in range(self.dice.choice([0, 1, 1, 2, len(self._held)])):
            if self._held:
                self._real.put(*self._held.pop())
        if self._held:
            self._real.bell.ring()  # look here again


def any_queue(scheduler: Scheduler) -> Queue | None:
    """As if every lane's device were slower or faster than the others', differently at every step."""
    ready = [
        queue for queue in scheduler._queues if queue.head and queue.lane_of(queue.head).is_ready(queue.head)
    ]
    return Shuffled.dice.choice(ready) if ready else None


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LocalLink", Shuffled)
    monkeypatch.setattr(Scheduler, "_most_urgent", any_queue)


@cache
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2).double() for _ in range(6)])


@cache
def batches(count: int) -> list[Any]:
    torch.manual_seed(1)
    return [tuple(torch.randn(2, 9, 2, dtype=torch.float64)) for _ in range(count)]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train(plan: Plan, count: int) -> list[float]:
    with Pipeline(layers(), plan, loss_fn=LOSS, optimizer=sgd, timeout_s=20) as p:
        return [r.loss for r in p.train(batches(count))]


def train_shuffled(model: nn.Module, plan: Plan, data: list[Any]) -> Trained:
    loss_fn = nn.CrossEntropyLoss()
    return train_pipeline(model, plan, data, loss_fn, momentum, timeout_s=20, clip_grad_norm=0.05)


@cache
def expected(N: int, staleness: int, count: int) -> list[float]:
    """Of one stage and one micro-batch, where nothing can be out of order."""
    return train(
        Plan(stages=1, pipelines=N, batch="per-pipeline", micro_batches=1, staleness=staleness), count
    )


def plans(K: int) -> Iterator[Plan]:
    # The checker looks at each operator, which takes its time.
    counts = (1, 2, 5, 9) if checking() else range(1, 10)
    for schedule in SCHEDULES:
        for M in counts:
            for N in range(1, 5):
                for staleness in (0, 1) if N > 1 else (1,):
                    yield Plan(
                        stages=K,
                        pipelines=N,
                        batch="per-pipeline",
                        micro_batches=M,
                        schedule=schedule,
                        staleness=staleness,
                    )


@pytest.mark.slow
@pytest.mark.parametrize("K", range(1, 7))
def test_any_order_of_delivery_and_of_devices_ends_with_the_same_losses(K: int, shuffled: None) -> None:
    Shuffled.dice.seed(K)
    for plan in plans(K):
        count = plan.pipelines + 1  # a round and the beginning of the next
        losses = train(plan, count)
        reference = expected(plan.pipelines, plan.staleness, count)
        assert all(abs(a - b) < 1e-12 for a, b in zip(losses, reference, strict=True)), plan


@pytest.mark.parametrize("seed", range(10))
def test_long_runs_of_odd_shapes(seed: int, shuffled: None) -> None:
    dice = Shuffled.dice = random.Random(seed)
    K, M, N = dice.randint(2, 6), dice.randint(1, 9), dice.randint(1, 4)
    staleness = dice.choice([0, 1])
    advance = dice.choice([None, None, 0, 1, 5])
    plan = Plan(
        stages=K,
        pipelines=N,
        batch="per-pipeline",
        micro_batches=M,
        schedule="advance-forward",
        advance=advance,
        staleness=staleness,
    )
    count = 7 * N + dice.randrange(N)
    losses = train(plan, count)
    assert max(abs(a - b) for a, b in zip(losses, expected(N, staleness, count), strict=True)) < 1e-12


def test_clipping_and_tied_parameters_in_any_order(shuffled: None) -> None:
    model, data = language_model(), token_batches(5, 9, last=5)
    whole, _ = train_on_one_device(model, data, nn.CrossEntropyLoss(), momentum, 0.05)
    for seed in range(12):
        Shuffled.dice.seed(seed)
        plan = Plan(stages=2 + seed % 5, micro_batches=1 + seed % 4, schedule=SCHEDULES[seed % 3])
        with Pipeline(
            model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum, timeout_s=20, clip_grad_norm=0.05
        ) as p:
            assert unequal([r.loss for r in p.train(data)], whole) < 1e-10


OVERLAPPING = [
    {"schedule": "pipedream", "micro_batches": 1},
    {"schedule": "pipedream", "micro_batches": 2},
    {"schedule": "pipedream", "micro_batches": 1, "weights": "vertical-sync"},
    {"schedule": "pipedream-2bw", "micro_batches": 4},
]
FLUSHING: list[dict[str, Any]] = [
    {"stages": 4, "schedule": "interleaved-1f1b", "micro_batches": 3},
    {"stages": 4, "schedule": "zero-bubble-h1", "micro_batches": 5},
    {"stages": 4, "schedule": "zero-bubble-v", "micro_batches": 5},
    {"stages": 4, "schedule": "looped-bfs", "micro_batches": 3},
    {"stages": 4, "schedule": "interleaved-zero-bubble", "micro_batches": 5},
    {"stages": 4, "schedule": "dualpipe-v", "micro_batches": 5},
    {"stages": 3, "replication": [2, 1, 3], "micro_batches": 5},
    {"stages": 2, "replication": [1, 3], "micro_batches": 4, "schedule": "1f1b"},
]


@pytest.mark.parametrize("options", OVERLAPPING, ids=str)
def test_overlapping_batches_in_any_order(options: dict[str, Any], shuffled: None) -> None:
    """With clipping and a tied embedding, whose updates wait for other stages."""
    model, data = language_model(), token_batches(11, 9, last=5)
    for K in (2, 3, 4):
        bounds = {2: [0, 4, 7], 3: [0, 2, 5, 7], 4: [0, 1, 3, 5, 7]}[K]
        case = emulation.Case(
            layers=lambda: list(copy.deepcopy(model)),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=momentum,
            bounds={K: bounds},
            clip_grad_norm=0.05,
            micro_batches=options["micro_batches"],
        )
        if options["schedule"] == "pipedream":
            sync = options.get("weights") == "vertical-sync"
            whole = emulation.pipedream(case, data, K, vertical_sync=sync)
        else:
            whole = emulation.two_buffered(case, data, K)
        for seed in range(4):
            Shuffled.dice.seed(seed)
            plan = Plan(stages=K, partition=bounds[1:-1], **options)
            assert_same_training(train_shuffled(model, plan, data), (whole.losses, whole.state))


@pytest.mark.parametrize("options", FLUSHING, ids=str)
def test_other_flushing_schedules_and_replicas_in_any_order(options: dict[str, Any], shuffled: None) -> None:
    model, data = language_model(), token_batches(5, 9, last=5)
    expected = train_on_one_device(model, data, nn.CrossEntropyLoss(), momentum, 0.05)
    for seed in range(4):
        Shuffled.dice.seed(seed)
        assert_same_training(train_shuffled(model, Plan(**options), data), expected)
