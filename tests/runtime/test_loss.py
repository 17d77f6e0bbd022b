"""Losses given as functions: micro-batches make the gradients of the whole batch, or a warning says why not."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from avgpipe import Pipeline, Plan, Source, StageError
from tests.isolated import Isolated
from tests.links.ends import LINKS
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    Trained,
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    train_on_one_device,
    train_pipeline,
)

IGNORED = -100
WEIGHTS = torch.linspace(0.2, 2.0, 11, dtype=torch.float64)

# ---- five kinds of losses, each as a mean and as (sum, count) ------------------------------------------------------


def ignoring(output: Any, target: Any) -> Any:
    total = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def masked(output: Any, target: Any) -> Any:
    answers, mask = target
    each = functional.cross_entropy(output, answers.clamp(min=0), reduction="none")
    return (each * mask).sum(), mask.sum()


def weighted(output: Any, target: Any) -> Any:
    kept = target.clamp(min=0)
    return functional.cross_entropy(output, kept, WEIGHTS, reduction="sum"), WEIGHTS[kept].sum()


def smoothed(output: Any, target: Any) -> Any:
    kept = target != IGNORED
    each = functional.cross_entropy(
        output, target, ignore_index=IGNORED, label_smoothing=0.1, reduction="none"
    )
    return each.sum(), int(kept.sum())


def squared(output: Any, target: Any) -> Any:
    return (output - target.clamp(min=0)[:, None]).square().mean()


class Penalised(nn.Module):
    """A module of one's own, which counts half of some samples."""

    def forward(self, output: Any, target: Any) -> Any:
        share = torch.where(target % 2 == 0, 1.0, 0.5).double()
        each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
        return (share * each).sum(), share.sum()


LOSSES = {
    "ignored targets": ignoring,
    "a mask": masked,
    "class weights": weighted,
    "label smoothing": smoothed,
    "a mean": squared,
    "a module": Penalised(),
}


def as_one_number(loss_fn: Any) -> Any:
    """As plain training has it: the sum over the count of the whole batch."""

    def mean(output: Any, target: Any) -> Any:
        loss = loss_fn(output, target)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    return mean


def batches_for(name: str, count: int = 4, samples: int = 9, last: int | None = None) -> list[Any]:
    """A third of the targets is ignored, and of the second batch all but the last ones: whole micro-batches."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for j in range(count):
        n = last if last is not None and j == count - 1 else samples
        x = torch.randint(11, (n,), generator=generator)
        y = torch.randint(11, (n,), generator=generator)
        kept = torch.rand(n, generator=generator) > 0.3
        if j == 1:
            kept[: -n // 3] = False
        kept[-1] = True
        y = y.where(kept, IGNORED)
        batches.append((x, (y, kept.double()) if name == "a mask" else y))
    return batches


def compare(name: str, plan: dict[str, Any], **options: Any) -> Any:
    batches = batches_for(name, last=options.pop("last", None))
    loss_fn, optimizer = LOSSES[name], options.pop("optimizer", momentum)
    clip = options.get("clip_grad_norm")
    with Pipeline(
        language_model(), Plan(**plan), **grouped(loss_fn=loss_fn, optimizer=optimizer, **options)
    ) as pipeline:
        losses = [r.loss for r in pipeline.train(batches)]
        state = pipeline.state_dict()
        evaluated = pipeline.evaluate(batches).loss
    one = as_one_number(loss_fn)
    expected = train_on_one_device(language_model(), batches, one, optimizer, clip)
    assert_same_training((losses, state), expected)
    model = language_model().eval()
    model.load_state_dict(state)
    joined = [torch.cat(column) for column in zip(*((x, *_leaves(y)) for x, y in batches))]
    target = tuple(joined[1:]) if name == "a mask" else joined[1]
    assert abs(evaluated - float(one(model(joined[0]), target))) < 1e-10
    return losses, state


def _leaves(target: Any) -> tuple[torch.Tensor, ...]:
    return target if isinstance(target, tuple) else (target,)


@pytest.mark.grid(10)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_a_loss_given_as_a_function_trains_as_on_one_device(K: int, name: str) -> None:
    for M in (1, 2, 4):
        compare(name, {"stages": K, "micro_batches": M})
    compare(name, {"stages": K, "micro_batches": 3, "schedule": "1f1b"}, last=5, clip_grad_norm=0.05)
    compare(name, {"stages": K, "micro_batches": 3, "recompute": "always"}, last=1, optimizer=adamw)
    compare(name, {"stages": K, "micro_batches": 4, "schedule": "all-forward-all-backward"})


@pytest.mark.parametrize(
    "schedule",
    [
        *("zero-bubble-h1", "zero-bubble-v", "interleaved-1f1b"),
        *("looped-bfs", "interleaved-zero-bubble", "dualpipe-v"),
    ],
)
def test_in_every_kind_of_schedule(schedule: str) -> None:
    stages = {"zero-bubble-h1": 2}.get(schedule, 4)
    compare("ignored targets", {"stages": stages, "micro_batches": 4, "schedule": schedule})


REPLICATED = [[2, 1], [1, 2], [2, 2]]


@pytest.mark.parametrize("replication", REPLICATED)
@pytest.mark.parametrize("name", ["ignored targets", "a mask", "a mean"])
def test_where_stages_have_replicas(name: str, replication: list[int]) -> None:
    plan = {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": replication}
    compare(name, plan)
    compare(name, plan, clip_grad_norm=0.05, last=3)
    compare(name, plan, last=1)


def check_on_ranks(K: int) -> bool:
    for name in LOSSES:
        for link in LINKS:
            compare(name, {"stages": K, "micro_batches": 3}, link=link, last=5)
    compare("ignored targets", {"stages": K, "micro_batches": 4}, clip_grad_norm=0.05)
    return True


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 3])
def test_on_ranks(K: int) -> None:
    assert run(K, check_on_ranks, K=K, timeout_s=110) == [True] * K


def check_replicas_on_ranks(replication: list[int]) -> bool:
    plan = {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": replication}
    for name in ("ignored targets", "a mean"):
        compare(name, plan)
        compare(name, plan, clip_grad_norm=0.05, last=3)
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("replication", REPLICATED)
def test_where_stages_have_replicas_on_ranks(replication: list[int]) -> None:
    ranks = sum(replication)
    assert run(ranks, check_replicas_on_ranks, replication=replication) == [True] * ranks


def elastic(spread: bool, loss_fn: Any, without_flush: bool = False) -> Any:
    plan = Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=3, spread=spread)
    if without_flush:
        plan = Plan(stages=2, micro_batches=2, schedule="pipedream-2bw")
    batches = batches_for("", count=6)
    return train_pipeline(language_model(), plan, batches, loss_fn, adamw, clip_grad_norm=0.5)


def spread_on_ranks() -> Any:
    return elastic(True, ignoring)


@pytest.mark.ranks
def test_several_pipelines_and_schedules_without_a_flush_agree_with_cross_entropy() -> None:
    """nn.CrossEntropyLoss says by its targets what micro-batches weigh: the same numbers, found in another way."""
    known = nn.CrossEntropyLoss(ignore_index=IGNORED)
    for spread, without_flush in [(False, False), (True, False), (False, True)]:
        ours = elastic(spread, ignoring, without_flush)
        assert_same_training(ours, elastic(spread, known, without_flush))
    ours = elastic(True, ignoring)
    for theirs in run(4, spread_on_ranks):
        assert_same_training(theirs, ours, 0.0)


def test_step_weighs_pipelines_by_what_their_losses_count() -> None:
    (x, y), *_ = batches_for("", count=1, samples=12)
    model = language_model()
    expected = float(as_one_number(ignoring)(model(x), y))
    with Pipeline(
        model,
        Plan(stages=2, pipelines=2, batch="per-pipeline", micro_batches=2),
        loss_fn=ignoring,
        optimizer=momentum,
    ) as p:
        assert abs(p.step(x, y) - expected) < 1e-10


# ---- batches that count nothing --------------------------------------------------------------------------------------


def without_targets(name: str, empty: Sequence[int]) -> list[Any]:
    """Batches of 12 samples, some of which have no target that counts."""
    batches = batches_for(name, count=8, samples=12)
    for j in empty:
        x, y = batches[j]
        batches[j] = x, ((y[0], y[1] * 0) if name == "a mask" else torch.full_like(y, IGNORED))
    return batches


def joined(batches: list[Any], accumulate: int) -> list[Any]:
    """Join the batches of one update."""
    groups = [batches[j : j + accumulate] for j in range(0, len(batches), accumulate)]
    return [tuple(torch.cat(column) for column in zip(*group)) for group in groups]


def marked(losses: list[float]) -> list[float]:
    """Losses to compare: NaN, which equals nothing, as a number."""
    return [-1.0 if math.isnan(loss) else loss for loss in losses]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("N", "M"), [(1, 1), (1, 4), (2, 4), (3, 3)])
def test_a_batch_that_counts_nothing_has_gradients_of_zero(
    N: int, M: int, accumulate: int, clip: float | None
) -> None:
    """As on one device: its loss is 0/0, and the weights move by momentum alone."""
    batches = without_targets("ignored targets", [2, 3, 6, 7])
    one = as_one_number(ignoring)
    for optimizer in (momentum, adamw):
        expected = train_on_one_device(language_model(), joined(batches, accumulate), one, optimizer, clip)
        plan = Plan(stages=2, pipelines=N, micro_batches=M, staleness=0)
        options = {"accumulate": accumulate, "clip_grad_norm": clip}
        losses, state = train_pipeline(language_model(), plan, batches, ignoring, optimizer, **options)
        assert sum(math.isnan(loss) for loss in losses) == 4 / accumulate
        assert_same_training((marked(losses), state), (marked(expected[0]), expected[1]))


@pytest.mark.parametrize("replication", REPLICATED)
def test_a_batch_that_counts_nothing_where_stages_have_replicas(replication: list[int]) -> None:
    batches = without_targets("", [0, 3])
    plan = Plan(stages=2, micro_batches=4, schedule="1f1b", replication=replication)
    losses, state = train_pipeline(language_model(), plan, batches, ignoring, momentum)
    expected = train_on_one_device(language_model(), batches, as_one_number(ignoring), momentum)
    assert_same_training((marked(losses), state), (marked(expected[0]), expected[1]))


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_a_batch_that_counts_nothing_leaves_the_scale_of_losses(scale: Any) -> None:
    """The scale is lowered, and the update skipped, where gradients are not finite."""
    batches = without_targets("", [1, 4])
    expected = train_on_one_device(language_model(), batches, as_one_number(ignoring), momentum)
    ours = train_pipeline(
        language_model(), Plan(stages=2, micro_batches=4), batches, ignoring, momentum, loss_scale=scale
    )
    assert_same_training((marked(ours[0]), ours[1]), (marked(expected[0]), expected[1]))


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_weights_that_are_all_zero_count_nothing() -> None:
    """In plain torch the gradients of such a batch are NaN, since its loss is divided by zero and masked after."""
    batches = without_targets("a mask", [2])
    plan = Plan(stages=2, micro_batches=4)
    losses, state = train_pipeline(language_model(), plan, batches[:3], masked, plain)
    _, before = train_pipeline(language_model(), plan, batches[:2], masked, plain)
    assert math.isnan(losses[2])
    assert_same_state(state, before, 0.0)


def in_pipelines_of_their_own(isolate: bool) -> Trained:
    options = {"batch": "per-pipeline", "staleness": 0, "isolate": isolate}
    plan = Plan(stages=1, pipelines=2, micro_batches=3, **options)
    batches = without_targets("", [0, 3, 5])
    losses, state = train_pipeline(language_model(), plan, batches, ignoring, momentum)
    return marked(losses), state


@pytest.mark.ranks
def test_a_batch_that_counts_nothing_in_isolated_pipelines() -> None:
    run = Isolated(2, 1, in_pipelines_of_their_own, isolate=True)
    assert not run.failures
    expected = in_pipelines_of_their_own(isolate=False)
    assert [j for j, loss in enumerate(expected[0]) if loss < 0] == [0, 3, 5]
    for ours in run.results.values():
        assert_same_training(ours, expected)


# ---- a scalar that is no mean --------------------------------------------------------------------------------------


def warnings_of(loss_fn: Any, caplog: Any, batches: list[Any], M: int = 3, **options: Any) -> list[str]:
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, logger="avgpipe"),
        Pipeline(
            language_model(),
            Plan(stages=2, micro_batches=M),
            **grouped(loss_fn=loss_fn, optimizer=momentum, **options),
        ) as p,
    ):
        list(p.train(batches))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.host
def test_a_scalar_that_is_no_mean_over_samples_is_warned_of_once_with_the_way_out(caplog: Any) -> None:
    def contrasting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - output.mean(0)).square().mean()

    batches = batches_for("")
    for loss_fn in (
        as_one_number(ignoring),
        as_one_number(weighted),
        as_one_number(Penalised()),
        contrasting,
    ):
        (text,) = [text for text in warnings_of(loss_fn, caplog, batches) if "no mean over the" in text]
        assert "(sum, count)" in text
        assert "loss_weight" in text
    for M in (9, 5):  # micro-batches of one sample too, whose loss may be a mean over nothing
        said = warnings_of(as_one_number(ignoring), caplog, batches, M)
        assert said
        assert all("(sum, count)" in text for text in said)
    (text,) = warnings_of(lambda o, y: squared(o, y) * len(y), caplog, batches)
    assert 'reduction = "sum"' in text


def test_nothing_is_said_of_means_and_of_what_says_what_it_weighs(caplog: Any) -> None:
    batches = batches_for("")
    assert warnings_of(squared, caplog, batches) == []
    assert warnings_of(functional.cross_entropy, caplog, [(x, y.clamp(min=0)) for x, y in batches]) == []
    assert warnings_of(ignoring, caplog, batches) == []
    assert warnings_of(nn.CrossEntropyLoss(), caplog, batches) == []
    assert warnings_of(as_one_number(ignoring), caplog, batches, M=1) == []
    counted = lambda y: (y != IGNORED).sum()  # noqa: E731
    assert warnings_of(as_one_number(ignoring), caplog, batches, loss_weight=counted) == []
    total = lambda o, y: squared(o, y) * len(y)  # noqa: E731
    total.reduction = "sum"  # type: ignore[attr-defined]
    assert warnings_of(total, caplog, batches) == []
    # what cannot be told is not told: a function that takes three samples at a time
    assert warnings_of(lambda o, y: squared(o.view(3, 11), y.view(3)), caplog, batches) == []


@pytest.mark.host
def test_a_micro_batch_without_a_target_brings_no_nan(caplog: Any) -> None:
    x, y = torch.arange(9) % 11, torch.arange(9) % 11
    y[:3] = IGNORED
    scalar = lambda o, t: functional.cross_entropy(o, t, ignore_index=IGNORED)  # noqa: E731
    said = warnings_of(scalar, caplog, [(x, y)] * 3)
    assert len([text for text in said if "NaN for a micro-batch" in text]) == 1
    with Pipeline(language_model(), Plan(stages=2, micro_batches=3), loss_fn=scalar, optimizer=momentum) as p:
        list(p.train([(x, y)]))
        assert all(bool(t.isfinite().all()) for t in p.state_dict().values())
        (result,) = p.train([(x, torch.full_like(y, IGNORED))])
        assert math.isnan(result.loss), "as on one device"
        assert all(bool(t.isfinite().all()) for t in p.state_dict().values())


def test_a_loss_that_cannot_be_used_is_refused_with_the_way_out() -> None:
    bad = {
        r"returned tuple; .*\(sum, count\)": lambda o, y: (o.sum(), "3"),
        r"returned shape \(3, 11\)": lambda o, y: o,
        r"returned dict": lambda o, y: {"loss": o.sum()},
    }
    for message, loss_fn in bad.items():
        with (
            Pipeline(language_model(), Plan(micro_batches=3), loss_fn=loss_fn, optimizer=momentum) as p,
            pytest.raises(StageError, match=message),
        ):
            list(p.train(batches_for("", count=1)))
    changing = lambda o, y: ignoring(o, y) if len(y) == 3 else squared(o, y)  # noqa: E731
    with (
        Pipeline(language_model(), Plan(micro_batches=3), loss_fn=changing, optimizer=momentum) as p,
        pytest.raises(StageError, match=r"\(sum, count\) for some micro-batches and one number for others"),
    ):
        list(p.train(batches_for("", count=1, samples=7)))
    with (
        Pipeline(
            language_model(),
            Plan(),
            loss_fn=ignoring,
            optimizer=momentum,
            extensions=[Source(loss_weight=len)],
        ) as p,
        pytest.raises(StageError, match="leave out Source\\(loss_weight\\)"),
    ):
        list(p.train(batches_for("", count=1)))
