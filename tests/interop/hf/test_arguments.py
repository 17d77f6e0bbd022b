"""What a PipelineTrainer refuses, each in a sentence with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from avgpipe import MovingAverage, Plan, Precision
from avgpipe.interop.hf.trainer import pipeline_options_of
from tests.interop.hf.cases import arguments, causal, pipelined, texts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": True}, r"use Plan\(recompute='always'\)"),
        ({"auto_find_batch_size": True}, "raise the plan's micro_batches"),
        ({"bf16_full_eval": True}, "evaluation is in the dtype of the weights"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0\) cannot train stages: a hook on the model"),
        (
            {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
            "use another schedule, such as 'cosine'",
        ),
        ({"label_names": ["start_positions"]}, "have their targets as 'labels'"),
    ],
)
def test_arguments_that_stages_cannot_follow(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pipelined(causal(), arguments(tmp_path, **settings), texts())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(stages=2, schedule="pipedream", micro_batches=1), "use one that flushes, such as '1f1b'"),
        (Plan(stages=2, pipelines=2, batch="per-pipeline"), r"use Plan\(batch='global'\)"),
    ],
)
def test_plans_that_gain_nothing_where_every_update_ends(plan: Plan, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pipelined(causal(), arguments(tmp_path), texts(), plan)


def test_optimizers_of_the_whole_model(tmp_path: Path) -> None:
    model = causal()
    made = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(TypeError, match="optimizers must be two functions"):
        pipelined(model, arguments(tmp_path), texts(), optimizers=made)
    kind = (torch.optim.SGD, {"lr": 0.1, "params": [{"params": list(model.parameters())}]})
    trainer = pipelined(model, arguments(tmp_path), texts(), optimizer_cls_and_kwargs=kind)
    with pytest.raises(ValueError, match=r"needs the whole model, .* or optimizers=\(function, None\)"):
        trainer.train()


def test_options_that_follow_from_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True, max_grad_norm=0, gradient_accumulation_steps=3, ddp_timeout=60)
    assert pipeline_options_of(args) == {
        "device": "cpu",
        "seed": 3,
        "timeout_s": 60,
        "clip_grad_norm": None,
        "accumulate": 3,
        "extensions": [Precision(autocast=torch.bfloat16)],
    }


def test_options_of_the_pipeline_go_first(tmp_path: Path) -> None:
    options = {"extensions": [MovingAverage(0.5)], "clip_grad_norm": 0.25}
    trainer = pipelined(causal(), arguments(tmp_path, max_steps=1), texts(), pipeline_options=options)
    trainer.train()
    assert trainer.pipeline.state_dict("ema").keys() == trainer.model.state_dict().keys()
