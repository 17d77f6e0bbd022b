"""Checkpoints: bitwise resume in the same layout, the same model in any other, and refusal of damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from avgpipe import CheckpointError, Pipeline, Plan
from avgpipe.checkpoint import Manifest, Snapshot, verify_checkpoint
from avgpipe.checkpoint.snapshot import unpacked
from avgpipe.model.context import Carry
from tests.checkpoint.test_blocks import checksum_in
from tests.runner import run
from tests.runtime.cases import adamw, language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
SHAPES = [
    Plan(stages=1, micro_batches=2),
    Plan(stages=2, pipelines=2, micro_batches=2, staleness=1),
    Plan(stages=3, pipelines=2, micro_batches=3, staleness=0),
    Plan(stages=2, pipelines=3, micro_batches=2, staleness=1, period=2),
    Plan(stages=2, pipelines=2, micro_batches=2, rule="easgd"),
    Plan.for_system("ea-pipe", stages=3),
    Plan(stages=3, schedule="pipedream-2bw", micro_batches=3),
    Plan(stages=1, schedule="pipedream-2bw", micro_batches=2),
]


def make(plan: Plan, optimizer: Any = adamw) -> Pipeline:
    return Pipeline(
        language_model(dropout=0.2),
        plan,
        loss_fn=LOSS,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        seed=2,
    )


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[n], theirs[n]) for n in theirs)


def resume(plan: Plan, folder: str, cut: int) -> Any:
    """A run in one piece, and one that is saved after ``cut`` batches and goes on in a new Pipeline."""
    batches = token_batches(10, 6)
    with make(plan) as p:
        whole = [r.loss for r in p.train(batches)], p.state_dict(), p.state_dict(weights=plan.pipelines - 1)
    with make(plan) as p:
        list(p.train(batches[:cut]))
        p.save(folder)
    with make(plan) as p:
        p.load(folder)
        assert p.batches == cut
        resumed = (
            [r.loss for r in p.train(batches[cut:])],
            p.state_dict(),
            p.state_dict(weights=plan.pipelines - 1),
        )
    assert resumed[0] == whole[0][cut:]
    assert same(resumed[1], whole[1])
    assert same(resumed[2], whole[2])
    return True


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    "plan",
    SHAPES,
    ids=lambda p: f"K{p.stages}N{p.pipelines}s{p.staleness}{p.rule}{p.period}{p.system}{p.weights}",
)
@pytest.mark.parametrize("cut", [4, 7])
def test_resume_is_bitwise_in_the_same_layout(plan: Plan, cut: int, tmp_path: Path) -> None:
    resume(plan, str(tmp_path / "c"), cut)


def resume_on_ranks(K: int, folder: str) -> bool:
    for n, plan in enumerate(p for p in SHAPES if p.stages == K):
        resume(plan, f"{folder}/{n}", 5)
    return True


@pytest.mark.promise
def test_resume_is_bitwise_on_ranks(tmp_path: Path) -> None:
    results = run(2, resume_on_ranks, K=2, folder=str(tmp_path))
    assert results == [True, True]


@pytest.mark.parametrize("cut", [3, 5])  # amid a period, and amid a round
def test_a_model_with_other_strides_goes_on(cut: int, tmp_path: Path) -> None:
    def made(memory_format: torch.memory_format) -> Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2)).double()
        plan = Plan(stages=1, pipelines=2, micro_batches=2, staleness=1, period=3)
        return Pipeline(model.to(memory_format=memory_format), plan, loss_fn=LOSS, optimizer=adamw)

    g = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=g), torch.randint(2, (4,), generator=g))
        for _ in range(12)
    ]
    with made(torch.contiguous_format) as p:
        list(p.train(batches[:cut]))
        p.save(tmp_path / "c")
        before = p.state_dict()
        whole, after = [r.loss for r in p.train(batches[cut:])], p.state_dict()
    with made(torch.channels_last) as p:
        p.load(tmp_path / "c")
        assert same(p.state_dict(), before)
        assert [r.loss for r in p.train(batches[cut:])] == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(p.state_dict(), after, rtol=1e-9, atol=1e-9)


@pytest.mark.grid(6)
@pytest.mark.parametrize("before", SHAPES[:4], ids=lambda p: f"from{p.stages}x{p.pipelines}")
@pytest.mark.parametrize(("K", "N"), [(1, 1), (4, 1), (2, 2), (3, 4)])
def test_loads_under_any_layout(before: Plan, K: int, N: int, tmp_path: Path) -> None:
    with make(before) as p:
        list(p.train(token_batches(2 * before.pipelines * before.period, 6)))
        p.save(tmp_path / "c")
        saved, rate = p.state_dict(), p.optimizers[0].param_groups[0]["lr"]
        held_out = p.evaluate(token_batches(2, 5))
    with make(Plan(stages=K, pipelines=N, micro_batches=2)) as p:
        p.load(tmp_path / "c")
        assert same(p.state_dict(), saved)
        assert p.optimizers[-1].param_groups[0]["lr"] == rate
        assert all(len(o.state) == len(o.param_groups[0]["params"]) for o in p.optimizers)
        assert abs(p.evaluate(token_batches(2, 5)).loss - held_out.loss) < 1e-10
        before_loss = held_out.loss
        list(p.train(token_batches(8, 6) * 4))
        assert p.evaluate(token_batches(8, 6)).loss < before_loss + 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_load_amid_a_period_has_no_part_in_what_was_trained_before(staleness: int, tmp_path: Path) -> None:
    """Nor has a state dict, of optimizers that keep no state."""
    batches = token_batches(20, 6)

    def made(plan: Plan) -> Pipeline:
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=sgd)

    with made(Plan(micro_batches=2)) as p:
        list(p.train(batches[:4]))
        p.save(tmp_path / "c")
        saved = p.state_dict()
    plan = Plan(
        pipelines=2, micro_batches=2, staleness=staleness, period=3, rule="avgpipe", batch="per-pipeline"
    )
    found = []
    for loads in (True, False):
        with made(plan) as p:
            list(p.train(batches[4:8]))
            if loads:
                p.load(tmp_path / "c")
            else:
                p.load_state_dict(saved)
            found.append([[r.loss for r in p.train(batches[8:])], p.state_dict()])
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_one_stage_more_changes_nothing_in_the_training(tmp_path: Path) -> None:
    batches = token_batches(8, 6)
    with make(Plan(stages=2, micro_batches=2)) as p:
        list(p.train(batches[:4]))
        p.save(tmp_path / "c")
        whole = [r.loss for r in p.train(batches[4:])]
    with make(Plan(stages=4, micro_batches=2)) as p:
        p.load(tmp_path / "c")
        assert max(abs(a.loss - b) for a, b in zip(p.train(batches[4:]), whole, strict=True)) < 1e-10


class Summer(nn.Module):
    """Adds up what it has seen in earlier batches, per micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = Carry()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.carry.get()
        total = x.detach() if before is None or before.shape != x.shape else before + x.detach()
        self.carry.set(total)
        return x + 0.1 * total


@pytest.mark.parametrize("stages", [2, 3])
def test_carried_state_is_saved_and_survives_recomputation(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Summer(), nn.Linear(4, 3)).double()
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(4, 4, dtype=torch.float64, generator=generator),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(6)
    ]
    ends = []
    for plan, cut in [
        (Plan(stages=2, pipelines=1, micro_batches=2), 6),
        (Plan(stages=stages, pipelines=1, micro_batches=2, recompute="always"), 3),
    ]:
        with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum) as p:
            losses = [r.loss for r in p.train(batches[:cut])]
            p.save(tmp_path / "c")
        with Pipeline(model, Plan(stages=2, micro_batches=2), loss_fn=LOSS, optimizer=momentum) as p:
            p.load(tmp_path / "c")
            ends.append(losses + [r.loss for r in p.train(batches[cut:])])
    assert max(abs(a - b) for a, b in zip(*ends, strict=True)) < 1e-10


def test_a_replica_takes_what_its_own_micro_batches_carry(tmp_path: Path) -> None:
    """What the others' carry would grow old there, and be saved again beside the newer ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Summer(), nn.Linear(4, 3)).double()
    batch = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    with Pipeline(model, Plan(micro_batches=4), loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train([batch]))
        p.save(tmp_path / "c")
    replicated = Plan(micro_batches=4, schedule="1f1b", replication=[2])
    for _ in range(2):  # by name, and bit for bit
        with Pipeline(model, replicated, loss_fn=LOSS, optimizer=momentum) as p:
            p.load(tmp_path / "c")
            carried = [next(iter(p._session.worker.trained[n, 0].stage.carries)).values for n in range(2)]
            assert [sorted(values) for values in carried] == [[0, 2], [1, 3]]
            p.save(tmp_path / "c")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with make(SHAPES[1]) as p:
        list(p.train(token_batches(2, 6)))
        p.save(tmp_path / "c")
    return tmp_path / "c"


def test_saving_again_replaces_and_leaves_nothing_behind(saved: Path) -> None:
    with make(SHAPES[1]) as p:
        p.load(saved)
        list(p.train(token_batches(2, 6)))
        p.save(saved)
        assert sorted(f.name[:7] for f in saved.iterdir()) == [".lock", "manifes", "stage-0", "stage-1"]
        assert verify_checkpoint(saved).batches == 4


def refuse(folder: Path, match: str, model: nn.Module | None = None, verify: bool = True) -> None:
    with Pipeline(model or language_model(), SHAPES[1], loss_fn=LOSS, optimizer=momentum) as p:
        if verify:
            with pytest.raises(CheckpointError, match=match):
                verify_checkpoint(folder, p._spec.model.signature())
        with pytest.raises(CheckpointError, match=match) as caught:
            p.load(folder)
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    shard = next(saved.glob("stage-1-*"))
    data, manifest = shard.read_bytes(), (saved / "manifest.json").read_text()
    shard.write_bytes(data[:-10])
    refuse(saved, rf"corrupt checkpoint: .*stage-1.* has {len(data) - 10} bytes instead of {len(data)}")
    shard.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    refuse(saved, "corrupt checkpoint: the content of .*stage-1.* has changed")
    shard.unlink()
    refuse(saved, "corrupt checkpoint: .*stage-1.* is missing")
    shard.write_bytes(data)
    (saved / "manifest.json").write_text(manifest[:-20])
    refuse(saved, "corrupt checkpoint: .*manifest.json is damaged")
    (saved / "manifest.json").write_text(json.dumps({"format": 9}))
    refuse(saved, "has format 9; this version reads 3")
    refuse(tmp_path, "no checkpoint in .*: it has no manifest.json")


def test_another_models_checkpoint_is_refused(saved: Path) -> None:
    wider = language_model()
    wider[1] = nn.Linear(8, 8, bias=False).double()
    refuse(
        saved,
        r"checkpoint of another model: '1.bias' is float64 of shape \(8,\) there and absent here",
        wider,
    )


def test_nothing_is_unpickled(saved: Path) -> None:
    for shard in saved.glob("stage-*"):
        torch.load(shard, weights_only=True)
    evil = saved.parent / "evil"
    shutil.copytree(saved, evil)
    shard = next(evil.glob("stage-0-*"))
    torch.save({"reference": print}, shard)
    manifest = Manifest.read(evil)
    manifest.files[0] = [shard.name, shard.stat().st_size, checksum_in(shard)]
    manifest.write(evil)
    refuse(evil, "corrupt checkpoint: .*stage-0.* does not load", verify=False)


# ---- optimizers of named parameters --------------------------------------------------------------------------------


def named_adamw(named_params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named_params, lr=0.01)


@pytest.mark.parametrize("saves", [adamw, named_adamw], ids=["plain", "named"])
@pytest.mark.parametrize(("K", "N"), [(2, 1), (1, 1), (3, 1), (2, 2), (1, 2)])
def test_names_of_parameters_stay_with_their_stage(saves: Any, K: int, N: int, tmp_path: Path) -> None:
    before = Plan(stages=2, pipelines=N, micro_batches=2)
    after = Plan(stages=K, pipelines=N, micro_batches=2)
    batches = token_batches(8, 6)
    model = language_model()
    with Pipeline(model, before, loss_fn=LOSS, optimizer=saves) as p:
        list(p.train(batches[:4]))
        p.save(tmp_path / "c")
        p.load(tmp_path / "c")
        expected = [r.loss for r in p.train(batches[4:])], p.state_dict()
    with Pipeline(model, after, loss_fn=LOSS, optimizer=named_adamw) as p:
        p.load(tmp_path / "c")
        for (stage, _), trained in p._session.worker.trained.items():
            (group,) = trained.optimizer.param_groups  # type: ignore[union-attr]
            assert group["param_names"] == p._spec.model.trainable[stage]
        assert [r.loss for r in p.train(batches[4:])] == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(p.state_dict(), expected[1], rtol=1e-10, atol=1e-10)


def test_a_load_amid_a_loop_takes_no_results_from_it(tmp_path: Path) -> None:
    with make(SHAPES[1]) as p:
        p.save(tmp_path / "c")
        found = []
        for result in p.train(token_batches(10, 6)):
            found.append(result.batch)
            if len(found) == 4:
                p.load(tmp_path / "c")
    assert len(found) == 10


class NumpyRate(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose rates, and what it notes of itself, are numbers of NumPy."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 0.5 * (1 + np.cos(step / 9)))
        self.half = np.float32(0.5)
        self.noted: Any = np.int64(3)


@pytest.mark.parametrize("rule", [None, "avgpipe", "mean-gradient"])
def test_numbers_of_numpy_are_saved_as_pythons(rule: str | None, tmp_path: Path) -> None:
    plan = Plan(stages=2, pipelines=1 if rule is None else 2, micro_batches=2, rule=rule)
    given, snapshot = token_batches(8, 6), Snapshot()

    def made() -> Pipeline:
        return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, lr_scheduler=NumpyRate)

    with made() as p:
        list(p.train(given[:4]))
        p.save(tmp_path / "c")
        p.save(tmp_path / "meanwhile", wait=False)
        snapshot.begin(p._spec.model, p._session.worker, p.batches, lambda: None)
        snapshot.finish()
        assert unpacked(snapshot.packed()).keys() == snapshot.contents.keys()
        expected = [r.loss for r in p.train(given[4:])]
    for name in ("c", "meanwhile"):
        with made() as p:
            p.load(tmp_path / name)
            assert [r.loss for r in p.train(given[4:])] == expected
            assert p.optimizers[0].param_groups[0]["lr"] > 0


def test_what_could_not_be_read_is_not_saved(tmp_path: Path) -> None:
    with make(Plan(stages=2, micro_batches=2)) as p:
        p.save(tmp_path / "c")
        schedule: Any = p._session.worker.trained[0, 0].lr_scheduler
        schedule.table = np.zeros(3)
        for save in (p.save, lambda folder: (p.save(folder, wait=False), p.wait_for_save())):
            with pytest.raises(
                CheckpointError, match=r"'table' is of numpy.ndarray, which no checkpoint can hold"
            ):
                save(tmp_path / "c")
        assert verify_checkpoint(tmp_path / "c").batches == 0
        schedule.table = [np.float64(2)]
        p.save(tmp_path / "c")
