"""``avgpipe check``: compares training by a plan with training on one device."""

from __future__ import annotations

from typing import Any

import torch
import typer

from avgpipe.cli.config import CheckConfig, TrainConfig
from avgpipe.cli.output import FAILED, answer, arguments, running, tell
from avgpipe.cli.resolve import check_device, joined_ranks, pipeline_options, prepare, resolve
from avgpipe.measure.check import Checked, check
from avgpipe.ranks.launch import run_on_ranks

_OWN = ("batches", "alone", "json")


def run(asked: CheckConfig) -> None:
    with arguments():
        config = _resolved(asked)
    found: dict[str, dict[str, Any]] = {}
    with running():
        tell("training in one process ...")
        here = checked(config, asked.batches)
        found["in one process"] = _summary(here)
        workers = here.plan.workers
        if here.strict.workers == workers > 1 and not asked.alone:
            tell(f"training on {workers} workers ...")
            given = {"config": config.to_json(), "batches": asked.batches}
            found[f"on {workers} workers"] = run_on_ranks(f"{__name__}:on_rank", workers, given, threads=1)[0]
        tell("")
    texts = [f"{where}: {result['text']}" for where, result in found.items()]
    answer(asked.json, {where: result["found"] for where, result in found.items()}, *texts)
    if not all(result["found"]["equal"] for result in found.values()):
        raise typer.Exit(FAILED)


def _resolved(asked: CheckConfig) -> TrainConfig:
    if joined_ranks() is not None:
        raise ValueError("check starts the plan's workers itself: run it once, without torchrun")
    if asked.isolate:
        raise ValueError(
            "--isolate: check trains in one process and on the plan's workers, which all pipelines share; leave it out"
        )
    options = {name: value for name, value in asked.explicit.items() if name not in _OWN}
    config = resolve(TrainConfig.of(**options, max_batches=asked.batches))
    check_device(config.device)
    return config


def checked(config: TrainConfig, batches: int) -> Checked:
    """Compare in this process, or as one of several processes."""
    workload, plan = prepare(config)
    return check(
        workload.layers,
        plan,
        loader=workload.train_batches(0),
        batches=batches,
        **pipeline_options(config, workload),
    )


def on_rank(config: str, batches: int) -> dict[str, Any]:
    """Compare as one of the processes that the command starts."""
    torch.set_num_threads(1)
    return _summary(checked(TrainConfig.from_json(config), batches))


def _summary(found: Checked) -> dict[str, Any]:
    return {"found": found.to_json(), "text": str(found)}
