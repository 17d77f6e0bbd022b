"""PipelineModule under Lightning's Trainer against a plain loop: weights, logs, checkpoints, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Plan
from tests.interop.lightning.cases import (
    LOSS,
    TRAINING,
    VALIDATION,
    Classifier,
    checkpoints,
    lightning,
    model,
    module,
    trainer,
)
from tests.runner import run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Losses(lightning.Callback):  # type: ignore[misc]
    """Keeps what was logged after every batch and every validation."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.training.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validation.append(float(trainer.callback_metrics["val_loss"]))


def plain_loop(epochs: int, limit: float) -> tuple[nn.Module, list[float], list[float]]:
    """Train on one device; return the model, its losses, and those of validation."""
    whole, losses, validation = model(), [], []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(epochs):
        for x, y in TRAINING:
            optimizer.zero_grad()
            loss = LOSS(whole(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(whole.parameters(), limit)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            x, y = VALIDATION.dataset.tensors
            validation.append(float(LOSS(whole(x), y)))
    return whole, losses, validation


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=tolerance)


def test_it_trains_to_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    expected, losses, validation = plain_loop(4, 0.5)
    seen = Losses()
    runner, trained = trainer(tmp_path, 4, seen, num_sanity_val_steps=0), module(clip_grad_norm=0.5)
    runner.fit(trained, TRAINING, VALIDATION)
    assert runner.global_step == 20
    assert seen.training == pytest.approx(losses, rel=1e-6)
    assert seen.validation == pytest.approx(validation, rel=1e-6)
    assert_same(trained.model, expected, 1e-12)


def test_several_pipelines_learn(tmp_path: Path) -> None:
    seen, plan = Losses(), Plan(stages=2, pipelines=2, micro_batches=4)
    trainer(tmp_path, 8, seen).fit(module(plan), TRAINING, VALIDATION)
    assert seen.validation[-1] < 0.8 * seen.validation[0]


def test_it_validates_tests_and_predicts_with_the_trained_weights(tmp_path: Path) -> None:
    runner, trained = trainer(tmp_path, 2), module()
    before = runner.validate(trained, VALIDATION, verbose=False)[0]["val_loss"]
    runner.fit(trained, TRAINING)
    after = runner.test(trained, VALIDATION, verbose=False)[0]["test_loss"]
    assert after < before
    x, y = VALIDATION.dataset.tensors
    with torch.no_grad():
        output = trained.model(x)
    assert after == pytest.approx(float(LOSS(output, y)), rel=1e-6)
    torch.testing.assert_close(torch.cat(runner.predict(trained, VALIDATION)), output)
    inputs_alone = torch.utils.data.DataLoader(x, 15)
    torch.testing.assert_close(torch.cat(runner.predict(trained, inputs_alone)), output)


def test_training_stops_early(tmp_path: Path) -> None:
    stop = lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    runner = trainer(tmp_path, 9, stop)
    runner.fit(module(), TRAINING, VALIDATION)
    assert runner.current_epoch == 2


def test_a_step_of_ones_own(tmp_path: Path) -> None:
    class Own(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("norm", self.train_on(batch).grad_norm)

    runner = trainer(tmp_path, 1)
    runner.fit(module(kind=Own, clip_grad_norm=float("inf")), TRAINING)
    assert runner.callback_metrics["norm"] > 0
    assert runner.global_step == 5


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelines", [1, 2])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(pipelines: int, tmp_path: Path) -> None:
    plan = Plan(stages=2, pipelines=pipelines, micro_batches=4)
    whole = module(plan)
    trainer(tmp_path, 4, checkpoints(tmp_path, save_top_k=-1)).fit(whole, TRAINING, VALIDATION)
    again, runner = module(plan), trainer(tmp_path, 4)
    runner.fit(again, TRAINING, VALIDATION, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert runner.global_step == 20
    assert_same(again.model, whole.model)


def test_a_checkpoint_loads_as_a_modules_and_under_another_plan(tmp_path: Path) -> None:
    whole = module()
    trainer(tmp_path, 2, checkpoints(tmp_path, save_top_k=-1)).fit(whole, TRAINING, VALIDATION)
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    fresh = module()
    fresh.load_state_dict(saved["state_dict"])
    assert_same(fresh.model, whole.model)
    other = module(Plan(stages=1))
    trainer(tmp_path, 2).fit(other, TRAINING, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(other.model, whole.model, 1e-12)


def test_old_checkpoints_go_with_their_folders(tmp_path: Path) -> None:
    keeps = checkpoints(tmp_path, save_top_k=1, monitor="epoch", mode="max", save_last="link")
    trainer(tmp_path, 3, keeps).fit(module(), TRAINING, VALIDATION)
    names = {"epoch=2.ckpt", "epoch=2.ckpt.pipeline"}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "last.ckpt"}
    runner = trainer(tmp_path, 4)
    runner.fit(module(), TRAINING, ckpt_path=tmp_path / "last.ckpt")
    assert runner.global_step == 20


def test_weights_alone_are_a_checkpoint_too(tmp_path: Path) -> None:
    whole = module()
    trainer(tmp_path, 1, checkpoints(tmp_path, save_weights_only=True)).fit(whole, TRAINING)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]
    runner, other = trainer(tmp_path, 1), module()
    runner.validate(other, VALIDATION, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert_same(other.model, whole.model)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def fit_on_a_rank(folder: str) -> tuple[list[float], dict[str, torch.Tensor], int, str]:
    seen, trained = Losses(), module()
    keeps = checkpoints(Path(folder), monitor="val_loss", save_top_k=1)
    runner = trainer(folder, 3, seen, keeps)
    runner.fit(trained, TRAINING, VALIDATION)
    found = seen.training + seen.validation
    return found, trained.model.state_dict(), runner.global_step, Path(keeps.best_model_path).name


@pytest.mark.ranks
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    first, second = run(2, fit_on_a_rank, folder=str(tmp_path / "ranks"))
    alone = fit_on_a_rank(str(tmp_path / "alone"))
    assert first[0] == second[0] == alone[0]
    assert first[2:] == second[2:] == alone[2:]
    for name, value in alone[1].items():
        assert torch.equal(first[1][name], value)
        assert torch.equal(second[1][name], value)
    ranks, one = (sorted(path.name for path in (tmp_path / which).iterdir()) for which in ("ranks", "alone"))
    assert ranks == one


# ---- what is refused -----------------------------------------------------------------------------------------------


class Plain(lightning.LightningModule):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError

    def configure_optimizers(self) -> Any:
        raise AssertionError


def test_a_module_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="runs a PipelineModule, not Plain"):
        trainer(tmp_path, 1).fit(Plain(), TRAINING)


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"use lightning.Trainer\(strategy=PipelineStrategy\(\)"):
        trainer(tmp_path, 1, strategy="auto").fit(module(), TRAINING)


def test_sixteen_bits_of_the_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"precision='bf16-mixed' must be set in the pipeline"):
        trainer(tmp_path, 1, precision="bf16-mixed").fit(module(), TRAINING)


def test_accumulation_and_plans_without_flush_are_refused() -> None:
    with pytest.raises(TypeError, match="leave accumulate out"):
        module(accumulate=2)
    with pytest.raises(ValueError, match="use one that flushes"):
        module(Plan(stages=2, schedule="pipedream", micro_batches=1))
