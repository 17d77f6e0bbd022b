"""Ordinary habits of users: what they do trains as on one device, or is refused with the way out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.ranks import environment as machine
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
)

LOSS = nn.CrossEntropyLoss()

# ---- the first batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", [{}, {"schedule": "pipedream-2bw"}, {"schedule": "1f1b", "replication": [1, 2]}]
)
@pytest.mark.parametrize("first", [1, 3])
def test_the_first_batch_may_be_as_short_as_any(first: int, weights: dict[str, Any], caplog: Any) -> None:
    """As loaders that sort by length have it."""
    batches = [*token_batches(1, first), *token_batches(3, 8), *token_batches(1, 1)]
    plan = Plan(stages=2, micro_batches=4, **weights)
    with (
        caplog.at_level(logging.WARNING, logger="avgpipe"),
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p,
    ):
        losses = [r.loss for r in p.train(batches)]
        state = p.state_dict()
        list(p.train(batches[:1]))
    said = [r.getMessage() for r in caplog.records if "the first batch has" in r.getMessage()]
    assert said == [
        f"the first batch has {first} samples, which make {first} micro-batches and not 4: stages idle more; use "
        "larger batches or fewer micro_batches if the others are as short"
    ]
    if plan.weights == "flush":
        expected = train_on_one_device(language_model(), batches, LOSS, momentum)
        assert_same_training((losses, state), expected)


def test_a_step_needs_a_sample_for_each_pipeline() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, batch="per-pipeline")
    (x, y), *_ = token_batches(1, 3)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        assert abs(p.step(x, y) - float(LOSS(language_model()(x), y))) < 1e-10
        with pytest.raises(ValueError, match="1 samples are too few for 2 pipelines"):
            p.step(x[:1], y[:1])
        p.step(x, y)


# ---- one argument --------------------------------------------------------------------------------------------------


class TakesADict(nn.Module):
    """Its forward has one argument, a batch of named tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.tanh(self.a(self.table(batch["ids"])))
        return self.b(x * batch["scale"][:, None])


class TakesAPair(TakesADict):
    def forward(self, pair: Any) -> torch.Tensor:
        return super().forward({"ids": pair[0], "scale": pair[1]})


class TakesNames(TakesADict):
    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward({"ids": ids, "scale": scale})


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("kind", [TakesADict, TakesAPair, TakesNames])
def test_a_traced_model_may_take_its_whole_batch_as_one_argument(kind: type[TakesADict], K: int) -> None:
    torch.manual_seed(1)
    model = kind().double()
    generator = torch.Generator().manual_seed(0)
    batches = [
        ({"ids": x, "scale": torch.rand(len(x), generator=generator, dtype=torch.float64)}, y)
        for x, y in token_batches(3, 7)
    ]
    given: list[Any] = [(tuple(x.values()), y) for x, y in batches] if kind is TakesAPair else batches
    with Pipeline(model, Plan(stages=K, micro_batches=3), loss_fn=LOSS, optimizer=momentum) as p:
        losses = [r.loss for r in p.train(given)]
        state = p.state_dict()
        predicted = p.predict(given[0][0])
    same = TakesADict().double()
    same.load_state_dict(model.state_dict())
    expected = train_on_one_device(same, batches, LOSS, momentum)
    assert_same_training((losses, state), expected)
    same.load_state_dict(state)
    torch.testing.assert_close(predicted, same(batches[0][0]), rtol=1e-10, atol=1e-10)


# ---- hooks of parameters -------------------------------------------------------------------------------------------


def hooked(seen: list[torch.Tensor]) -> nn.Sequential:
    """A mask, a limit of each value (which sees other numbers in micro-batches), and one that only looks."""
    model = language_model()
    lin, decoder = model[1], model[6]
    assert isinstance(lin, nn.Linear)
    lin.weight.register_hook(lambda grad: grad * (torch.arange(8) % 2))
    lin.bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    decoder.bias.register_hook(lambda grad: seen.append(grad.clone()))
    decoder.bias.register_hook(lambda grad: 2 * grad)
    return model


def train_with_hooks(plan: dict[str, Any], clip: float | None) -> bool:
    batches = token_batches(4, 9)
    seen: list[torch.Tensor] = []
    ours = train_pipeline(hooked(seen), Plan(**plan), batches, LOSS, adamw, clip_grad_norm=clip)
    expected_seen: list[torch.Tensor] = []
    assert_same_training(
        ours, train_on_one_device(hooked(expected_seen), batches, LOSS, adamw, clip, copies=False)
    )
    assert len(seen) in (0, 4)  # on ranks, the last stage's alone
    for mine, theirs in zip(seen, expected_seen):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    return True


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "plan",
    [
        {"stages": 1, "micro_batches": 3},
        {"stages": 2, "micro_batches": 4},
        {"stages": 4, "micro_batches": 3, "recompute": "always"},
        {"stages": 2, "micro_batches": 4, "schedule": "zero-bubble-h1"},
        {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [2, 1]},
    ],
)
def test_hooks_of_parameters_see_the_gradient_of_the_whole_batch(
    plan: dict[str, Any], clip: float | None
) -> None:
    train_with_hooks(plan, clip)


@pytest.mark.ranks
def test_hooks_of_parameters_on_ranks() -> None:
    assert run(2, train_with_hooks, plan={"stages": 2, "micro_batches": 4}, clip=0.05) == [True, True]


def test_hooks_that_cannot_see_what_they_would_are_refused() -> None:
    model = language_model()
    table = model[0]
    assert isinstance(table, nn.Embedding)
    table.weight.register_hook(lambda grad: grad)
    refused(model=model, match=r"'0.weight' has a hook and is held by several stages.*remove the hook")
    with Pipeline(model, Plan(stages=1), loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train(token_batches(1, 4)))
    model = language_model()
    model[1].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr]
    refused(model=model, match=r"'1.weight' has a hook that runs after gradients are accumulated")


# ---- what is refused -----------------------------------------------------------------------------------------------


def refused(match: str, kind: type[Exception] = ValueError, **options: Any) -> None:
    settings: dict[str, Any] = {"model": language_model(), "loss_fn": LOSS, "optimizer": momentum, **options}
    model, plan = settings.pop("model"), Plan(stages=2)
    with pytest.raises(kind, match=match):
        Pipeline(model, plan, **grouped(**settings))


def test_optimizers_that_cannot_be_stepped_are_refused_with_the_way_out() -> None:
    refused(
        r"must return a torch.optim.Optimizer, or a list .*, not NoneType",
        TypeError,
        optimizer=lambda params: None,
    )
    refused(
        r"LBFGS evaluates the loss again in each step \(step needs a closure\)",
        TypeError,
        optimizer=lambda params: torch.optim.LBFGS(params),
    )


def test_schedules_of_the_learning_rate_that_need_a_metric_are_refused_and_the_way_out_works() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    refused(r"ReduceLROnPlateau.step needs a metric.*pipeline.optimizers", TypeError, lr_scheduler=plateau)
    refused(r"not list of 1", TypeError, lr_scheduler=lambda optimizer: [optimizer])
    batches = token_batches(4, 8)
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        schedules = [plateau(optimizer, patience=0) for optimizer in p.optimizers]
        list(p.train(batches))
        for _ in range(2):
            for schedule in schedules:
                schedule.step(1.0)
        assert all(abs(g["lr"] - 0.01) < 1e-12 for o in p.optimizers for g in o.param_groups)
        list(p.train(batches))


def test_models_without_values_and_models_that_communicate_are_refused_at_once() -> None:
    with torch.device("meta"):
        refused(
            r"'0.weight' is on the meta device and has no values.*to_empty",
            model=nn.Sequential(nn.Linear(2, 2)),
        )
    for wrapper in (nn.DataParallel, Wrapped):
        refused(r"the model is a \w+, which would wait for ranks.*\.module", model=wrapper(language_model()))
        layers = [nn.Linear(2, 2), wrapper(nn.Linear(2, 2))]
        refused(r"module '1' of the model is a \w+", model=nn.Sequential(*layers))
        refused(r"module '1' of the model is a \w+", model=layers)
    refused(r"module '0' of the model is sharded by FSDP", model=nn.Sequential(FSDPModule(), nn.Linear(2, 2)))


def test_a_batch_norm_that_communicates_is_refused_where_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [nn.Linear(2, 2), nn.Sequential(nn.SyncBatchNorm(2))]
    Pipeline(layers, Plan(stages=2), loss_fn=LOSS, optimizer=momentum).close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(r"module '1.0' of the model is a SyncBatchNorm, .*nn.BatchNorm1d", model=layers)


class Wrapped(nn.parallel.DistributedDataParallel):
    """As DistributedDataParallel, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class FSDPModule(nn.Linear):
    """What fully_shard makes of a module's class has this name among its ancestors."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def ddp_on_ranks() -> bool:
    torch.distributed.init_process_group("gloo")
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="DistributedDataParallel, which would wait"):
        Pipeline(
            [nn.parallel.DistributedDataParallel(layer) for layer in layers],
            Plan(stages=2),
            loss_fn=LOSS,
            optimizer=momentum,
        )
    return True


@pytest.mark.ranks
def test_distributed_data_parallel_is_refused_at_once_on_ranks() -> None:
    assert run(2, ddp_on_ranks, timeout_s=30) == [True, True]


# ---- the state of a loader -----------------------------------------------------------------------------------------


class Stateful:
    """As torchdata's StatefulDataLoader: its state is where it goes on."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.next = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize(
    "plan", [{"stages": 2}, {"stages": 2, "pipelines": 3}, {"stages": 2, "schedule": "pipedream"}]
)
def test_a_loaders_state_is_where_training_is(plan: dict[str, Any], tmp_path: Path) -> None:
    batches = token_batches(9, 6)
    whole = Plan(micro_batches=2, **plan)
    make = lambda: Pipeline(language_model(), whole, loss_fn=LOSS, optimizer=adamw)  # noqa: E731
    loader = Stateful(batches)
    with make() as p:
        assert p.loader_state(loader) == {"next": 0}
        for number, _ in enumerate(p.train(loader)):
            if number == 2:
                state = copy.deepcopy(p.loader_state(loader))
                p.save(tmp_path)
                assert state["next"] == p.batches
                break
    with make() as p:
        p.load(tmp_path)
        again = Stateful(batches)
        again.load_state_dict(state)
        assert p.batches + sum(1 for _ in p.train(again)) == 9
        assert p.loader_state(again) == {"next": 0}
        ours = p.state_dict()
    if "schedule" not in plan:  # a pause is another run there
        with make() as p:
            list(p.train(batches))
            assert_same_state(ours, p.state_dict(), 0.0)


def test_a_loader_whose_state_is_unknown_is_refused_with_the_way_out() -> None:
    batches = token_batches(3, 6)
    with Pipeline(language_model(), Plan(), loss_fn=LOSS, optimizer=adamw) as p:
        with pytest.raises(TypeError, match=r"a list has no state_dict: .*skip pipeline.batches batches"):
            p.loader_state(batches)
        loader = Stateful(batches)
        list(p.train(iter(loader)))
        with pytest.raises(ValueError, match=r"train was given a generator and not this Stateful"):
            p.loader_state(loader)


# ---- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.host
def test_a_busy_machine_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    load = [1e9]
    monkeypatch.setattr(machine, "_warned", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load[0], 0.0, 0.0), raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)

    def said() -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="avgpipe"):
            Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum).close()
        return sum("OMP_NUM_THREADS=1" in r.getMessage() for r in caplog.records)

    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert said() == 0, "the user has chosen"
    monkeypatch.delenv("OMP_NUM_THREADS")
    load[0] = 0.1
    assert said() == 0, "nothing else runs here"
    load[0] = 1e9
    assert said() == 1
    assert said() == 0
