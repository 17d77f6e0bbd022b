"""Several stages per worker, split backwards and replicated stages train exactly as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from tests.links.ends import LINKS
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_training,
    assert_trains_as_one_device,
    language_model,
    momentum,
    token_batches,
    train_pipeline,
)

LOSS = nn.CrossEntropyLoss()
SPLIT = [
    {"schedule": "interleaved-1f1b", "stages": 4},
    {"schedule": "interleaved-1f1b", "stages": 6, "stages_per_worker": 3},
    {"schedule": "interleaved-1f1b", "stages": 2},
    {"schedule": "zero-bubble-h1", "stages": 1},
    {"schedule": "zero-bubble-h1", "stages": 3},
    {"schedule": "zero-bubble-v", "stages": 2},
    {"schedule": "zero-bubble-v", "stages": 6},
    {"schedule": "looped-bfs", "stages": 4},
    {"schedule": "looped-bfs", "stages": 6, "stages_per_worker": 3},
    {"schedule": "interleaved-zero-bubble", "stages": 4},
    {"schedule": "interleaved-zero-bubble", "stages": 6, "stages_per_worker": 3},
    {"schedule": "dualpipe-v", "stages": 2},
    {"schedule": "dualpipe-v", "stages": 4},
    {"schedule": "dualpipe-v", "stages": 6},
]
REPLICATED = [
    {"stages": 1, "replication": [2]},
    {"stages": 1, "replication": [3], "schedule": "all-forward-all-backward"},
    {"stages": 2, "replication": [2, 1], "schedule": "1f1b"},
    {"stages": 2, "replication": [1, 3]},
    {"stages": 3, "replication": [2, 1, 2], "schedule": "all-forward-all-backward"},
    {"stages": 3, "replication": [3, 1, 2]},
]
PLACED = [
    {"stages": 3, "placement": [[2], [0], [1]]},
    {"stages": 2, "replication": [2, 1], "placement": [[0, 2], [1]]},
    {"stages": 4, "schedule": "interleaved-1f1b", "placement": [[1], [0], [1], [0]]},
    {"stages": 4, "schedule": "dualpipe-v", "placement": [[1], [0], [0], [1]]},
    {"stages": 3, "schedule": "pipedream", "weights": "vertical-sync", "placement": [[1], [2], [0]]},
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"clip": 0.05, "adamw": True},
    {"frozen": True, "reduction": "sum"},
    {"last": 5},
    {"last": 1, "reduction": "sum"},
    {"ignore": 3},
    {"recompute": "always"},
]


def compare(options: dict[str, Any], M: int, variant: dict[str, Any], **others: Any) -> Any:
    model = language_model(frozen=variant.get("frozen", False))
    batches = token_batches(4, 9, variant.get("last"))
    loss_fn = nn.CrossEntropyLoss(
        reduction=variant.get("reduction", "mean"), ignore_index=variant.get("ignore", -100)
    )
    optimizer, clip = (adamw if variant.get("adamw") else momentum), variant.get("clip")
    plan = Plan(micro_batches=M, recompute=variant.get("recompute", "never"), **options)
    return assert_trains_as_one_device(model, plan, batches, loss_fn, optimizer, clip, **others)


@pytest.mark.grid(24)
@pytest.mark.parametrize("options", [*SPLIT, *REPLICATED, *PLACED[:4]], ids=str)
@pytest.mark.parametrize("M", [3, 4, 7])
def test_equals_one_device(options: dict[str, Any], M: int) -> None:
    for variant in VARIANTS:
        compare(options, M, variant)


def on_ranks(options: dict[str, Any]) -> bool:
    for M, variant in [(3, VARIANTS[0]), (4, VARIANTS[1]), (4, VARIANTS[3]), (5, VARIANTS[4])]:
        (losses, state), *others = (compare(options, M, variant, link=link) for link in LINKS)
        for other_losses, other_state in others:
            assert other_losses == losses
            assert all(torch.equal(state[name], other_state[name]) for name in state)
    return True


@pytest.mark.promise(0)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *(SPLIT[0], SPLIT[4], SPLIT[6], SPLIT[7], SPLIT[9], SPLIT[12]),
        *(REPLICATED[0], REPLICATED[2], REPLICATED[5], *PLACED[:4]),
    ],
    ids=str,
)
def test_equals_one_device_on_ranks(options: dict[str, Any]) -> None:
    workers = Plan(micro_batches=3, **options).workers
    assert run(workers, on_ranks, options=options, timeout_s=110) == [True] * workers


def elastic(options: dict[str, Any], M: int, N: int) -> Any:
    plan = Plan(micro_batches=M, pipelines=N, batch="per-pipeline", **options)
    return train_pipeline(language_model(), plan, token_batches(7, 9), LOSS, adamw, clip_grad_norm=0.5)


@pytest.mark.parametrize(
    "options",
    [SPLIT[0], SPLIT[4], SPLIT[6], SPLIT[7], SPLIT[9], SPLIT[12], REPLICATED[2], REPLICATED[5]],
    ids=str,
)
def test_several_pipelines_do_what_they_do_on_one_stage(options: dict[str, Any]) -> None:
    assert_same_training(elastic(options, 3, 2), elastic({"stages": 1}, 1, 2))


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"stages": 4, "schedule": "interleaved-1f1b"}, ("worker 0", "worker 1")),
        ({"stages": 2, "replication": [2, 1]}, ("stage 0, replica 0", "stage 0, replica 1", "stage 1")),
        (
            {"stages": 1, "pipelines": 2, "batch": "per-pipeline", "spread": True},
            ("pipeline 0, stage 0", "pipeline 1, stage 0"),
        ),
        ({"stages": 2}, ()),
    ],
    ids=str,
)
def test_a_timeline_has_a_row_for_each_worker(options: dict[str, Any], labels: tuple[str, ...]) -> None:
    plan = Plan(micro_batches=2, **options)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw) as p:
        list(p.train(token_batches(2, 4)))
        timeline = p.timeline()
        timeline.explain()
    assert timeline.labels == labels
    assert timeline.stages == plan.workers
    forwards = {(e.stage, e.worker) for e in timeline.events if e.kind == "F"}
    assert len(forwards) == max(plan.stages, plan.workers)


@pytest.mark.parametrize(
    ("weights", "clip", "said"), [("stash", 0.5, 1), ("stash", None, 0), ("vertical-sync", 0.5, 0)]
)
def test_needless_waits_are_warned_of(weights: str, clip: float | None, said: int, caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan(stages=2, schedule="pipedream", weights=weights)
    with Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=momentum, clip_grad_norm=clip):
        pass
    assert len([r for r in caplog.records if "vertical-sync" in r.getMessage()]) == said


@pytest.mark.parametrize("options", PLACED, ids=str)
def test_a_placement_changes_only_which_worker_runs_what(options: dict[str, Any]) -> None:
    usual = {name: value for name, value in options.items() if name != "placement"}
    found, expected = (trained(each) for each in (options, usual))
    assert found == expected


def trained(options: dict[str, Any]) -> list[float]:
    plan = Plan(micro_batches=4, **options)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        return [r.loss for r in p.train(token_batches(4, 8))]
