"""PipelineTrainer against transformers' own Trainer: losses, weights, evaluation, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from avgpipe import Plan, WeightsFrom
from tests.interop.hf.cases import (
    arguments,
    assert_near,
    assert_same_weights,
    causal,
    classifier,
    images,
    llama,
    masked,
    mixture,
    numbers,
    pictures,
    pipelined,
    sentences,
    texts,
    transformers,
    translations,
    translator,
)
from tests.runner import run


def both(model: Any, folder: Path, data: Any, *, settings: Any = None, **given: Any) -> tuple[Any, Any]:
    """Train with both trainers; return ours and theirs."""
    other = copy.deepcopy(model)
    ours = pipelined(model, arguments(folder / "ours", **(settings or {})), data, **given)
    ours.train()
    more = {name: value for name, value in given.items() if name != "plan"}
    theirs = transformers.Trainer(
        other,
        arguments(folder / "theirs", **(settings or {})),
        train_dataset=data,
        eval_dataset=data[:10],
        **more,
    )
    theirs.train()
    return ours, theirs


# ---- the same as Trainer -------------------------------------------------------------------------------------------

EVERYTHING = {
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 3,
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("make", [causal, llama])
def test_language_models_train_to_the_same_losses_and_weights(make: Any, tmp_path: Path) -> None:
    assert_near(*both(make(), tmp_path, texts(), settings=EVERYTHING))


@pytest.mark.slow
def test_masked_language_models_train_to_the_same(tmp_path: Path) -> None:
    assert_near(*both(masked(), tmp_path, texts(), settings={"max_steps": 5, "optim": "sgd"}))


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("make", "data", "micro_batches"),
    [
        (images, pictures, 4),
        (translator, translations, 2),
        (mixture, texts, 1),
    ],  # a router's loss is of a micro-batch
)
def test_other_kinds_of_models_train_to_the_same(
    make: Any, data: Any, micro_batches: int, tmp_path: Path
) -> None:
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    plan = Plan(stages=2, micro_batches=micro_batches)
    assert_near(*both(make(), tmp_path, data(), settings=settings, plan=plan))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def test_classifiers_train_to_the_same_with_their_metrics(tmp_path: Path) -> None:
    settings = {"eval_strategy": "epoch", "label_smoothing_factor": 0.1, "max_grad_norm": 0.3}
    ours, theirs = both(classifier(), tmp_path, sentences(), settings=settings, compute_metrics=accuracy)
    assert_near(ours, theirs)
    for mine, their in zip(ours.predict(sentences()[:5])[:2], theirs.predict(sentences()[:5])[:2]):
        np.testing.assert_allclose(mine, their, atol=1e-5)


def test_a_loss_function_of_ones_own(tmp_path: Path) -> None:
    def squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        found = (outputs.logits.float() ** 2).mean(-1)[labels != -100]
        return found.sum() / num_items_in_batch

    settings = {"max_steps": 4, "gradient_accumulation_steps": 2}
    assert_near(*both(llama(), tmp_path, texts(), settings=settings, compute_loss_func=squares))


def test_a_loss_function_that_is_a_mean_over_samples(tmp_path: Path) -> None:
    def plain(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs["logits"], labels)

    assert_near(
        *both(classifier(), tmp_path, sentences(24), settings={"max_steps": 4}, compute_loss_func=plain)
    )


class Stream(torch.utils.data.IterableDataset[Any]):
    """Texts one after another, without a length."""

    def __iter__(self) -> Any:
        return iter(texts(16))


def test_a_stream_of_texts_ends_its_epochs_alike(tmp_path: Path) -> None:
    settings = {"max_steps": 5, "gradient_accumulation_steps": 2}
    other, args = causal(), arguments(tmp_path / "theirs", **settings)
    ours = pipelined(causal(), arguments(tmp_path / "ours", **settings), Stream(), eval_dataset=texts(4))
    theirs = transformers.Trainer(other, args, train_dataset=Stream())
    ours.train()
    theirs.train()
    found, expected = ([n for _, n in numbers(t, "loss", "epoch")] for t in (ours, theirs))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_several_pipelines_learn(tmp_path: Path) -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4)
    trainer = pipelined(causal(), arguments(tmp_path, num_train_epochs=8), texts(), plan)
    trainer.train()
    losses = [loss for _, loss in numbers(trainer, "loss")]
    assert losses[-1] < 0.9 * losses[0]
    assert trainer.state.global_step == len(losses) == 56


def test_autocast_follows_from_the_arguments(tmp_path: Path) -> None:
    exact, rounded = (
        pipelined(causal(), arguments(tmp_path, max_steps=2, **more), texts())
        for more in ({}, {"bf16": True})
    )
    exact.train()
    rounded.train()
    (_, a), (_, b) = numbers(exact, "loss")[0], numbers(rounded, "loss")[0]
    assert a != b
    assert a == pytest.approx(b, rel=1e-2)


def test_optimizers_of_ones_own_are_functions(tmp_path: Path) -> None:
    names = []

    def optimizer(named_params: Any) -> Any:
        names.extend(name for name, _ in named_params)
        return torch.optim.SGD(named_params, lr=0.5)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = pipelined(causal(), arguments(tmp_path, max_steps=3), texts(), optimizers=(optimizer, schedule))
    trainer.train()
    assert set(names) == {name for name, _ in trainer.model.named_parameters()}
    assert [lr for _, lr in numbers(trainer, "learning_rate")] == [0.5, 0.25, 0.125]


# ---- callbacks and checkpoints -------------------------------------------------------------------------------------


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks for a checkpoint after the second update, and for the end after the third."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 3
        return control


def test_callbacks_are_in_control(tmp_path: Path) -> None:
    trainer = pipelined(causal(), arguments(tmp_path), texts(), callbacks=[Stops()])
    trainer.train()
    assert trainer.state.global_step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.grid(1)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(accumulated: int, tmp_path: Path) -> None:
    settings = {
        "save_strategy": "steps",
        "save_steps": 3,
        "gradient_accumulation_steps": accumulated,
        "lr_scheduler_type": "cosine",
    }
    plan = Plan(stages=2, pipelines=2, micro_batches=4)
    whole = pipelined(causal(), arguments(tmp_path, **settings), texts(), plan)
    whole.train()
    again = pipelined(causal(), arguments(tmp_path, **settings), texts(), plan)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == whole.state.global_step
    assert numbers(again, "loss", "learning_rate") == numbers(whole, "loss", "learning_rate")
    assert_same_weights(again.model, whole.model)


def test_a_checkpoint_loads_as_the_model_and_under_another_plan(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 7}
    trainer = pipelined(causal(), arguments(tmp_path, **settings), texts())
    trainer.train()
    alone = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-14")
    assert_same_weights(alone, trainer.model)
    other = pipelined(causal(), arguments(tmp_path, **settings), texts(), Plan(stages=1))
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert_same_weights(other.model, trainer.model, 1e-5)


def test_a_checkpoint_of_the_model_alone_begins_with_fresh_optimizers(tmp_path: Path, caplog: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 7, "save_only_model": True}
    pipelined(causal(), arguments(tmp_path, **settings), texts()).train()
    other = pipelined(causal(), arguments(tmp_path, **settings), texts())
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert "pipeline is not there: optimizers and schedules start from scratch" in caplog.text
    assert other.state.global_step == 14


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    settings = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "mark",
        "greater_is_better": True,
        "save_total_limit": 2,
        "num_train_epochs": 3,
    }
    marks = iter([1.0, 3.0, 2.0])
    trainer = pipelined(
        causal(),
        arguments(tmp_path, **settings),
        texts(),
        compute_metrics=lambda _: {"mark": next(marks, 0.0)},
    )
    trainer.train()
    losses = [loss for _, loss in numbers(trainer, "eval_loss")]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[1], rel=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-14", "checkpoint-21"}
    best = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-14")
    assert_same_weights(best, trainer.model)


def test_it_evaluates_and_saves_without_training(tmp_path: Path) -> None:
    trainer = pipelined(causal(), arguments(tmp_path), texts())
    theirs = transformers.Trainer(causal(), arguments(tmp_path), eval_dataset=texts()[:10])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-6)
    trainer.save_model(tmp_path / "saved")
    assert_same_weights(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), causal())
    trainer.close()


def test_a_model_on_the_meta_device_gets_values_when_it_is_saved(tmp_path: Path) -> None:
    tied = llama(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "given")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(tied.config)
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    options = {"extensions": [WeightsFrom(str(tmp_path / "given"))]}
    trainer = pipelined(empty, arguments(tmp_path / "meta", **settings), texts(), pipeline_options=options)
    trainer.train()
    expected = pipelined(tied, arguments(tmp_path / "here", **settings), texts())
    expected.train()
    assert_same_weights(trainer.model, expected.model)
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "meta" / "checkpoint-2")
    assert all(p.isfinite().all() for p in saved.parameters())


# ---- adapters ------------------------------------------------------------------------------------------------------


def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="adapters of their own package")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = llama()
    torch.manual_seed(5)
    return peft.get_peft_model(base, config)


def test_adapters_train_to_the_same_and_are_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters of their own package")
    ours, theirs = both(adapted(), tmp_path, texts(), settings={"save_strategy": "epoch"})
    assert_near(ours, theirs)
    folder = tmp_path / "ours" / "checkpoint-14"
    assert {"adapter_model.safetensors", "pipeline"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("model*.safetensors"))
    loaded = peft.PeftModel.from_pretrained(llama(), folder)
    assert_same_weights(loaded, ours.model)
    again = pipelined(adapted(), arguments(tmp_path / "ours", save_strategy="epoch"), texts())
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-7"))
    assert_same_weights(again.model, ours.model)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def train_on_a_rank(folder: str) -> tuple[Any, Any, int, int]:
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "gradient_accumulation_steps": 2}
    model = llama()
    for (
        name,
        parameter,
    ) in model.named_parameters():  # the whole of the first stage, which then has no optimizer
        parameter.requires_grad_("embed" not in name and "layers.0" not in name)
    trainer = pipelined(model, arguments(Path(folder), **settings), texts())
    trainer.train()
    trainer.save_model()
    trainer.close()
    shown = numbers(trainer, "loss", "eval_loss", "learning_rate")
    return shown, trainer.model.state_dict(), trainer.args.world_size, trainer.state.global_step


@pytest.mark.ranks
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    first, second = run(2, train_on_a_rank, folder=str(tmp_path / "ranks"))
    alone = train_on_a_rank(str(tmp_path / "alone"))
    assert first[0] == second[0] == alone[0]
    assert first[2:] == second[2:] == (1, 8)
    for name, value in alone[1].items():
        assert torch.equal(first[1][name], value)
        assert torch.equal(second[1][name], value)
    saved, expected = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / which) for which in ("ranks", "alone")
    )
    assert_same_weights(saved, expected)
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }
