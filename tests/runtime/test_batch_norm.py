"""BatchNorm in a pipeline against a loop that keeps whole batches and takes their statistics afterwards, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from avgpipe.model.context import Position
from avgpipe.runtime.batch_norm import DeferredBatchNorm, defer_batch_norms
from avgpipe.runtime.stage import Stage
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    momentum,
    train_on_one_device,
    train_pipeline,
)
from tests.runtime.norms import LOSS, image_batches, image_model, slow_training

SCHEDULES = ["all-forward-all-backward", "1f1b", "advance-forward"]


def pipeline(model: nn.Module, plan: Plan, **options: Any) -> Pipeline:
    return Pipeline(model, plan, **grouped(**{"loss_fn": LOSS, "optimizer": momentum, **options}))


def compare(model: nn.Module, plan: Plan, **options: Any) -> Any:
    batches = image_batches(3, last=11)
    ours = train_pipeline(model, plan, batches, LOSS, momentum, **options)
    clip = options.get("clip_grad_norm")
    assert_same_training(ours, slow_training(model, batches, plan.micro_batches, clip=clip))
    image_model().load_state_dict(ours[1], strict=True)
    return ours[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("M", range(1, 6))
def test_whole_batches_move_the_running_statistics(K: int, M: int, schedule: str) -> None:
    compare(image_model(), Plan(stages=K, micro_batches=M, schedule=schedule))


@pytest.mark.parametrize("recompute", ["never", "always", "except-last"])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}], ids=str)
def test_a_layer_called_twice_counts_twice_and_recomputation_does_not(recompute: str, options: Any) -> None:
    compare(image_model(twice=True, **options), Plan(stages=2, micro_batches=3, recompute=recompute))


def test_clipping_comes_after_the_statistics() -> None:
    compare(image_model(), Plan(stages=2, micro_batches=3), clip_grad_norm=0.05)


def test_the_statistics_do_not_depend_on_schedule_or_recomputation_by_a_bit() -> None:
    plans = [
        Plan(stages=2, micro_batches=4, schedule=s, recompute=r)
        for s in SCHEDULES
        for r in ("never", "always")
    ]
    first, *others = (compare(image_model(), plan) for plan in plans)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("K", [1, 3])
def test_one_micro_batch_is_plain_training(K: int, options: Any) -> None:
    model, batches = image_model(twice=True, **options), image_batches(4, last=7)
    ours = train_pipeline(model, Plan(stages=K, micro_batches=1), batches, LOSS, momentum)
    assert_same_training(ours, train_on_one_device(model, batches, LOSS, momentum), 1e-12)
    assert int(ours[1]["3.inner.1.num_batches_tracked"]) == 8


def check_on_ranks() -> bool:
    compare(image_model(), Plan(stages=2, micro_batches=3))
    return True


@pytest.mark.ranks
def test_on_ranks() -> None:
    assert run(2, check_on_ranks) == [True, True]


class Checkpointed(nn.Module):
    """Recomputes its layers by itself."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def test_a_layer_that_recomputes_of_its_own_accord_is_counted_once() -> None:
    batches, ends = image_batches(3), []
    for recompute in ("never", "always"):
        layers = list(image_model())
        model = nn.Sequential(layers[0], Checkpointed(nn.Sequential(*layers[1:4])), *layers[4:])
        with pipeline(model, Plan(stages=2, micro_batches=3, recompute=recompute)) as p:
            list(p.train(batches))
            ends.append(list(p.state_dict().values()))
    expected = list(slow_training(image_model(), batches, 3)[1].values())
    for end in ends:
        torch.testing.assert_close(end, expected, rtol=1e-10, atol=1e-10)


class Residual(nn.Module):
    """Not sequential, so it is traced; two places share a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        return self.leave(h + torch.tanh(self.norm(torch.tanh(self.norm(h)))))


def test_traced_and_shared_layers() -> None:
    torch.manual_seed(1)
    model = Residual().double()
    batches = [(x.flatten(1)[:, :6], y) for x, y in image_batches(3)]
    with pipeline(model, Plan(stages=1, micro_batches=3)) as p:
        list(p.train(batches))
        state = p.state_dict()
    assert_same_state(state, slow_training(model, batches, 3)[1])
    assert int(state["norm.num_batches_tracked"]) == 6


# ---- which layers --------------------------------------------------------------------------------------------------


class Own(nn.BatchNorm1d):
    pass


def test_what_is_replaced_and_what_it_keeps() -> None:
    norm = nn.BatchNorm2d(4, eps=0.3, momentum=0.2)
    norm.weight.requires_grad_(False)
    calls: list[int] = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    untracked = nn.BatchNorm1d(4, track_running_stats=False)
    left = [Own(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d(), untracked, nn.InstanceNorm2d(4)]
    given = [norm, nn.Sequential(nn.Sequential(norm)), nn.BatchNorm3d(2, affine=False), *left]
    layers = nn.ModuleList(given).eval()
    before = list(layers.state_dict(keep_vars=True).items())
    defer_batch_norms(layers)
    after = list(layers.state_dict(keep_vars=True).items())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(a is b for (_, a), (_, b) in zip(before, after))
    assert [type(a) for a in layers[3:]] == [
        Own,
        nn.SyncBatchNorm,
        nn.LazyBatchNorm1d,
        nn.BatchNorm1d,
        nn.InstanceNorm2d,
    ]
    mine = layers[0]
    assert mine is layers[1][0][0]
    assert isinstance(mine, DeferredBatchNorm)
    assert isinstance(mine, nn.BatchNorm2d)
    assert isinstance(layers[2], DeferredBatchNorm)
    assert (mine.eps, mine.momentum, mine.training) == (0.3, 0.2, False)
    assert [p.requires_grad for p in mine.parameters()] == [False, True]
    mine(torch.ones(1, 4, 2, 2))
    assert calls


def stage_of(*layers: nn.Module) -> Stage:
    return Stage(layers, 0, 0, 0, torch.device("cpu")).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_of_a_pipeline_it_is_the_plain_layer(dtype: torch.dtype) -> None:
    plain = nn.BatchNorm1d(4).to(dtype)
    stage = stage_of(plain)
    assert type(plain) is nn.BatchNorm1d
    for x in torch.randn(3, 8, 4, dtype=dtype):
        assert torch.equal(stage(x, Position()), plain(x))
    for name, value in plain.state_dict().items():
        assert torch.equal(stage.layers.state_dict()["0." + name], value)


def test_one_value_per_channel_is_refused_as_ever() -> None:
    with pipeline(image_model()[4:], Plan(micro_batches=2)) as p:
        x = torch.randn(3, 64, dtype=torch.float64)  # the second micro-batch is one sample
        with pytest.raises(StageError, match="Expected more than 1 value per channel"):
            p.step(x, torch.tensor([0, 1, 2]))


# ---- precision -----------------------------------------------------------------------------------------------------


def moved(stage: Stage, parts: list[torch.Tensor]) -> nn.BatchNorm2d:
    for m, x in enumerate(parts):
        stage(x, Position(0, 0, m))
    assert stage.statistics is not None
    stage.statistics.commit(0)
    (norm,) = stage.layers
    return norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_narrow_weights_do_not_coarsen_what_is_combined(dtype: torch.dtype, bound: float) -> None:
    # The means are large beside the variance, so 16-bit ones would drown it.
    x = (torch.randn(12, 4, 3, 3, dtype=torch.float64) * 0.1 + 20).to(dtype)
    norm = moved(stage_of(nn.BatchNorm2d(4, momentum=1.0).to(dtype)), list(x.split(5)))
    rows = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean.double(), rows.mean(1), rtol=bound, atol=0)
    torch.testing.assert_close(norm.running_var.double(), rows.var(1), rtol=bound, atol=0)
    assert norm.running_var.dtype == dtype


def test_autocast_keeps_statistics_in_32_bits() -> None:
    x = torch.randn(12, 4, 3, 3).bfloat16()
    plain = nn.BatchNorm2d(4)
    stage = stage_of(plain)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        assert torch.equal(stage(x, Position(0, 0, 0)), expected)
    assert stage.statistics is not None
    stage.statistics.commit(0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(stage.layers.state_dict()["0." + name], value, rtol=1e-6, atol=1e-7)


# ---- elastic replicas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"staleness": 1}, {"staleness": 0}, {"staleness": 0, "period": 2}], ids=str
)
def test_each_replica_gathers_its_own(options: Any) -> None:
    model, batches = image_model(), image_batches(7, last=9)
    # without elasticity a replica is a training of its own
    with pipeline(
        model, Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=3, alpha=0.0, **options)
    ) as p:
        list(p.train(batches))
        states = [p.state_dict(weights=i) for i in range(2)]
        reference = p.state_dict()
    for i, state in enumerate(states):
        assert_same_state(state, slow_training(model, batches[i::2], 3)[1])
    for name, _ in model.named_buffers():
        a, b = (state[name] for state in states)
        if name.endswith("tracked"):
            assert (int(a), int(b), int(reference[name])) == (4, 3, 4)
        else:
            assert not torch.equal(a, b)
            torch.testing.assert_close(reference[name], (a + b) / 2, rtol=1e-14, atol=1e-14)


def averaging(N: int = 3, staleness: int = 0, K: int = 2) -> Pipeline:
    plan = Plan(stages=K, pipelines=N, batch="per-pipeline", micro_batches=2, staleness=staleness)
    return pipeline(image_model(), plan, optimizer=adamw)


@pytest.mark.parametrize("weights", ["reference", 1])
def test_evaluation_is_the_exported_model(weights: Any) -> None:
    x, y = image_batches(1, seed=8)[0]
    with averaging() as p:
        list(p.train(image_batches(7)))
        loss = p.evaluate([(x, y)], weights=weights).loss
        output = p.predict(x, weights=weights)
        plain = image_model().eval()
        plain.load_state_dict(p.state_dict(weights=weights), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(output, plain(x), rtol=1e-12, atol=1e-12)
        assert abs(loss - float(LOSS(plain(x), y))) < 1e-12


@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluation_leaves_training_as_it_was(staleness: int) -> None:
    batches, ends = image_batches(8), []
    for looks in (False, True):
        with averaging(staleness=staleness) as p:
            for r in p.train(batches):
                if looks and r.batch in (0, 3, 4):
                    p.evaluate(image_batches(2, seed=5))
                    p.predict(batches[0][0])
                    p.evaluate(image_batches(1, seed=5), weights=2)
            ends.append([t for i in range(3) for t in p.state_dict(weights=i).values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Constant(nn.Module):
    """A table that is the same in all replicas, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([0.1, -torch.inf, 0.7], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.table.tolist() == [0.1, -torch.inf, 0.7]
        return x + self.table.clamp(min=0.0) * self.mask


def test_averages_of_constants_are_the_constants() -> None:
    model = nn.Sequential(nn.Linear(2, 3).double(), Constant())
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randint(3, (6,))
    with pipeline(model, Plan(pipelines=3, batch="per-pipeline", micro_batches=2)) as p:
        list(p.train([(x, y)] * 3))
        p.evaluate([(x, y)])
        assert torch.equal(p.state_dict()["1.table"], model[1].table)


@pytest.mark.parametrize(("N", "cut"), [(1, 3), (2, 5)])
def test_a_resumed_run_is_the_run_that_went_on(N: int, cut: int, tmp_path: Path) -> None:
    batches = image_batches(8)
    with averaging(N) as p:
        list(p.train(batches))
        whole = [p.state_dict(weights=i) for i in range(N)]
    with averaging(N) as p:
        list(p.train(batches[:cut]))
        saved = [p.state_dict(weights=i) for i in range(N)]
        p.save(tmp_path / "c")
    with averaging(N) as p:
        list(p.train(batches[:1]))
        p.load(tmp_path / "c")
        loaded = [p.state_dict(weights=i) for i in range(N)]
        list(p.train(batches[cut:]))
        resumed = [p.state_dict(weights=i) for i in range(N)]
    with averaging(N, K=3) as p:  # cut elsewhere
        p.load(tmp_path / "c")
        moved_over = [p.state_dict(weights=i) for i in range(N)]
    for mine, theirs in [(loaded, saved), (resumed, whole), (moved_over, saved)]:
        for a, b in zip(mine, theirs):
            assert all(torch.equal(a[name], b[name]) for name in b)


# ---- short batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{}, {"pipelines": 2}, {"pipelines": 2, "batch": "per-pipeline"}], ids=str)
@pytest.mark.parametrize("last", [1, 2, 3, 5, 7])
def test_a_short_last_batch_is_cut_into_what_can_be_normalised(plan: dict[str, Any], last: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(n, 4), torch.randn(n, 3)) for n in (16, 16, last)]
    made = Plan(stages=2, micro_batches=4, **plan)
    with Pipeline(model, made, loss_fn=nn.MSELoss(), optimizer=momentum) as pipeline:
        if last == 1:  # as on one device
            with pytest.raises(StageError, match="Expected more than 1 value per channel"):
                list(pipeline.train(batches))
            return
        assert [result.samples for result in pipeline.train(batches)] == [16, 16, last]
