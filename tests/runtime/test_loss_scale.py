"""Float16: the loss is scaled as torch.amp.GradScaler scales it on one device, and all stages skip the same updates."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import avgpipe.runtime.loss_scale
from avgpipe import Pipeline, Plan, Precision
from avgpipe.runtime.loss_scale import LossScale
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import adamw, assert_same_state, language_model, momentum, token_batches, unequal

LOSS = nn.CrossEntropyLoss()
INTERVAL = 3  # updates without an overflow until the scale grows; 2,000 otherwise


@pytest.fixture(autouse=True)
def _grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avgpipe.runtime.loss_scale, "GROWTH_INTERVAL", INTERVAL)


class _Narrow(torch.autograd.Function):
    """The identity, whose gradient passes through float16, ``factor`` times as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad.half() * ctx.factor / ctx.factor).to(grad.dtype), None


class Bursts(nn.Module):
    """Its gradient overflows where the scale is high."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Narrow.apply(x, self.factor)  # type: ignore[no-untyped-call]


def model(before: int = 3, factor: float = 64.0) -> nn.Sequential:
    """Float32. Gradients of layers before number ``before`` overflow in float16, those behind it do not."""
    layers = list(language_model().float())
    return nn.Sequential(*layers[:before], Bursts(factor), *layers[before:])


def on_one_device(
    layers: nn.Module, batches: list[Any], parts: int, optimizer: Any, clip: float | None
) -> Any:
    layers = copy.deepcopy(layers).train()
    opt = optimizer(layers.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    losses, scales = [], []
    for x, y in batches:
        opt.zero_grad()
        total = 0.0
        pieces = min(parts, len(x))
        for part, answer in zip(x.tensor_split(pieces), y.tensor_split(pieces)):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = LOSS(layers(part), answer) * (len(part) / len(x))
            scaler.scale(loss).backward()
            total += float(loss.detach())
        if clip is not None:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(layers.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, layers.state_dict(), scales


def in_a_pipeline(layers: nn.Module, batches: list[Any], optimizer: Any, plan: Plan, **options: Any) -> Any:
    avgpipe.runtime.loss_scale.GROWTH_INTERVAL = INTERVAL  # in other processes too
    scales = []
    with Pipeline(
        layers, plan, **grouped(loss_fn=LOSS, optimizer=optimizer, autocast=torch.float16, **options)
    ) as pipeline:
        losses, worker = [], pipeline._session.worker
        held = [r.loss_scale for r in worker.trained.values() if r.loss_scale is not None][:1]
        for result in pipeline.train(batches):
            losses.append(result.loss)
            if worker.streams is None:  # a device may be updating the next batch when a result is there
                scales += [state.state_dict()["scale"] for state in held]
        state, last = pipeline.state_dict(), [scale.state_dict()["scale"] for scale in held]
        return losses, state, scales, last, pipeline.skipped_updates


def compare(before: int, plan: dict[str, Any], optimizer: Any = momentum, **options: Any) -> int:
    layers, batches = model(before), token_batches(12, 9, options.pop("last", None))
    shape = Plan(**plan)
    losses, state, scales, last, skipped = in_a_pipeline(layers, batches, optimizer, shape, **options)
    clip = options.get("clip_grad_norm")
    expected_losses, expected, expected_scales = on_one_device(
        layers, batches, shape.micro_batches, optimizer, clip
    )
    assert unequal(losses, expected_losses) < 1e-6
    assert_same_state(state, expected, 1e-6)
    assert scales in ([], expected_scales)
    assert last in ([], expected_scales[-1:])
    assert 0 < skipped < 12, "some updates are left out, not all"
    steps = [b / a for a, b in pairwise(expected_scales)]
    assert min(steps) == 0.5, "the scale falls"
    assert max(steps) == 2.0, "and grows"
    return skipped


@pytest.mark.parametrize("before", [1, 3, 6])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_float16_trains_as_with_a_grad_scaler_on_one_device(K: int, before: int) -> None:
    for M in (1, 3):
        compare(before, {"stages": K, "micro_batches": M})
    compare(before, {"stages": K, "micro_batches": 2}, adamw, clip_grad_norm=0.1)
    compare(before, {"stages": K, "micro_batches": 2, "recompute": "always"}, last=1)


def check_on_ranks(plan: dict[str, Any]) -> bool:
    compare(3, plan)
    compare(1, plan, adamw, clip_grad_norm=0.1)
    return True


REPLICATED = {"stages": 2, "micro_batches": 3, "replication": [1, 2], "schedule": "1f1b"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan", [{"stages": 2, "micro_batches": 3}, {"stages": 3, "micro_batches": 2}, REPLICATED]
)
def test_on_ranks(plan: dict[str, Any]) -> None:
    ranks = Plan(**plan).workers
    assert run(ranks, check_on_ranks, plan=plan) == [True] * ranks


def test_small_gradients_are_not_lost() -> None:
    class Faint(nn.Module):
        """Float16 has no gradient as small as this one's."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) * 1e-7

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Faint(), nn.Identity())
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    moved = {}
    for scale in (None, 1.0, 1024):
        with Pipeline(
            layers,
            Plan(stages=2, micro_batches=2),
            loss_fn=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            extensions=[Precision(autocast=torch.float16, loss_scale=scale)],
        ) as p:
            p.step(*batch)
            state = p.state_dict()
        moved[scale] = float((state["0.weight"] - layers[0].weight).abs().max())
    assert moved[1.0] == 0.0
    assert moved[None] > 0.0


def test_a_batch_has_the_scale_that_was_there_when_its_weights_were_made() -> None:
    scale = LossScale("dynamic", versioned=True)
    scale.update(True)
    scale.update(False)
    scale.update(True)
    assert [scale.at(version) for version in range(4)] == [65536.0, 32768.0, 32768.0, 16384.0]
    scale.resume(5)
    scale.update(True)
    assert [scale.at(version) for version in (4, 5, 6)] == [16384.0, 16384.0, 8192.0]
    assert LossScale(8.0, versioned=False).at(0) == 8.0


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_without_a_flush_scales_do_not_depend_on_timing(schedule: str) -> None:
    """Nor on how many processes there are: see on_ranks below."""
    ends = [_without_flush(schedule) for _ in range(2)]
    ends += run(2, _without_flush, schedule=schedule)
    for losses, state, skipped in ends[1:]:
        assert losses == ends[0][0]
        assert skipped == ends[0][2] > 0
        assert_same_state(state, ends[0][1], 0.0)


def _without_flush(schedule: str) -> Any:
    plan = Plan(stages=2, micro_batches=2, schedule=schedule)
    losses, state, _, _, skipped = in_a_pipeline(model(), token_batches(12, 8), adamw, plan)
    return losses, state, skipped


def test_each_pipeline_has_a_scale_of_its_own() -> None:
    """An overflow in one leaves the other's updates and scale alone."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    batches = [(x, y), (x * float("inf"), y), (x, y), (x, y)]
    plan = Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=2)
    with Pipeline(
        layers, plan, loss_fn=LOSS, optimizer=momentum, extensions=[Precision(autocast=torch.float16)]
    ) as p:
        list(p.train(batches))
        assert p.skipped_updates == 1
        held = {
            i: r.loss_scale for (_, i), r in p._session.worker.trained.items() if r.loss_scale is not None
        }
        assert {i: scale.state_dict()["scale"] for i, scale in held.items()} == {0: 65536.0, 1: 32768.0}
        assert all(bool(t.isfinite().all()) for t in p.state_dict().values())


@pytest.mark.parametrize("later", [{"stages": 2}, {"stages": 3}, {"stages": 1}])
def test_a_checkpoint_goes_on_with_its_scale(later: dict[str, Any], tmp_path: Path) -> None:
    batches = token_batches(12, 9)
    plan = Plan(stages=2, micro_batches=3)
    options: dict[str, Any] = {"loss_fn": LOSS, "optimizer": momentum, "autocast": torch.float16}
    with Pipeline(model(), plan, **grouped(**options)) as p:
        list(p.train(batches[:5]))
        p.save(tmp_path)
    with Pipeline(model(), Plan(micro_batches=3, **later), **grouped(**options)) as p:
        p.load(tmp_path)
        list(p.train(batches[5:]))
        state = p.state_dict()
    _, expected, _ = on_one_device(model(), batches, 3, momentum, None)
    assert_same_state(state, expected, 1e-6)


def test_statistics_move_as_with_a_grad_scaler_where_an_update_is_left_out() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Bursts(64.0), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(9)
    ]
    _, state, _, _, skipped = in_a_pipeline(layers, batches, momentum, Plan(stages=2))
    _, expected, _ = on_one_device(layers, batches, 1, momentum, None)
    assert skipped > 0
    assert_same_state(state, expected, 1e-6)
    # but where batches shall leave no trace, they leave none
    with Pipeline(
        layers,
        Plan(),
        loss_fn=LOSS,
        optimizer=momentum,
        extensions=[Precision(autocast=torch.float16, skip_nonfinite=True)],
    ) as p:
        list(p.train(batches))
        assert int(p.state_dict()["1.num_batches_tracked"]) == 9 - p.skipped_updates


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "static", True])
def test_a_bad_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_scale must be None, 'dynamic' or a number above 0, not"):
        Pipeline(model(), Plan(), loss_fn=LOSS, optimizer=momentum, extensions=[Precision(loss_scale=scale)])
