"""The runtime trains as each system defines: weights equal those of the independent emulation."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Precision
from avgpipe.elastic.versions import Versions
from avgpipe.systems import SYSTEMS
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    token_batches,
    unequal,
)
from tests.systems import emulation

BOUNDS = {1: [0, 7], 2: [0, 4, 7], 3: [0, 2, 5, 7], 4: [0, 1, 3, 5, 7]}
OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def normed_model() -> nn.Sequential:
    """Convolutions of a signal with batch norms, so that buffers count too; classes of [b, 4, 6]."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=1),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        nn.Conv1d(6, 6, 3, padding=1),
        nn.BatchNorm1d(6, momentum=None),
        nn.Flatten(),
        nn.Linear(36, 5),
    ).double()


def signal_batches(count: int, samples: int, last: int | None) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    sizes = [samples] * (count - 1) + [last or samples]
    return [
        (torch.randn(n, 4, 6, dtype=torch.float64, generator=draw), torch.randint(5, (n,), generator=draw))
        for n in sizes
    ]


MODELS = {"tied": language_model, "normed": normed_model}


def case_of(model: nn.Sequential, options: dict[str, Any], K: int, M: int) -> emulation.Case:
    return emulation.Case(
        layers=lambda: list(copy.deepcopy(model)),
        loss_fn=options.get("loss_fn", nn.CrossEntropyLoss()),
        optimizer=OPTIMIZERS[options.get("optimizer", "momentum")],
        bounds={K: BOUNDS[K]},
        lr_scheduler=decaying if options.get("decay") else None,
        clip_grad_norm=options.get("clip"),
        micro_batches=M,
        correction=options.get("correction"),
        full=9 if any(isinstance(layer, nn.BatchNorm1d) for layer in model) else None,
    )


def trained(
    model: nn.Sequential,
    plan: Plan,
    batches: Sequence[Any],
    options: dict[str, Any],
    drains: Sequence[int] = (),
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with Pipeline(
        model,
        plan,
        loss_fn=options.get("loss_fn", nn.CrossEntropyLoss()),
        optimizer=OPTIMIZERS[options.get("optimizer", "momentum")],
        lr_scheduler=decaying if options.get("decay") else None,
        clip_grad_norm=options.get("clip"),
        extensions=[Precision(skip_nonfinite=options.get("skip_nonfinite", False))],
    ) as pipeline:
        losses, begin = [], 0
        for end in [*(j + 1 for j in drains), len(batches)]:
            losses += [result.loss for result in pipeline.train(batches[begin:end])]
            begin = end
        return losses, pipeline.state_dict()


def batches_of(kind: str, count: int, samples: int = 9, last: int | None = None) -> list[Any]:
    return token_batches(count, samples, last) if kind == "tied" else signal_batches(count, samples, last)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"optimizer": "adamw", "decay": True},
    {"clip": 0.05},
    {"clip": 0.05, "optimizer": "adamw"},
    {"recompute": "always"},
    {"last": 5},
]


def compare(
    system: str, kind: str, K: int, M: int, variant: dict[str, Any], drains: Sequence[int] = (), **plan: Any
) -> None:
    model = MODELS[kind]()
    batches = batches_of(kind, 3 * K + 4, last=variant.get("last"))
    case = case_of(model, variant, K, M)
    if system == "pipedream-2bw":
        expected = emulation.two_buffered(case, batches, K)
    else:
        sync = plan.get("weights") == "vertical-sync"
        ahead = plan.get("advance", ())
        expected = emulation.pipedream(case, batches, K, vertical_sync=sync, drains=drains, advance=ahead)
    plan.setdefault("recompute", variant.get("recompute", "never"))
    plan.setdefault("correction", variant.get("correction"))
    losses, state = trained(
        model,
        Plan(stages=K, micro_batches=M, schedule=system, partition=BOUNDS[K][1:-1], **plan),
        batches,
        variant,
        drains,
    )
    assert_same_training((losses, state), (expected.losses, expected.state))


@pytest.mark.grid(12)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_pipedream_runs_each_batch_on_one_version(K: int, kind: str, variant: dict[str, Any]) -> None:
    for M in (1, 3):
        compare("pipedream", kind, K, M, variant)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_vertical_sync_runs_each_batch_on_the_first_stage_s_version(K: int, kind: str) -> None:
    for M in (1, 2):
        compare("pipedream", kind, K, M, {"optimizer": "adamw"}, weights="vertical-sync")
        compare("pipedream", kind, K, M, {"clip": 0.05}, drains=[2, 5], weights="vertical-sync")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_a_pipeline_that_runs_dry_goes_on_with_the_newest_weights(K: int, kind: str) -> None:
    for M in (1, 2):
        compare("pipedream", kind, K, M, {}, drains=[0, 3, 4])


@pytest.mark.grid(12)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_2bw_runs_each_batch_on_the_version_before_the_newest(
    K: int, kind: str, variant: dict[str, Any]
) -> None:
    for M in (K, K + 2):
        compare("pipedream-2bw", kind, K, M, variant)
    compare("pipedream-2bw", kind, K, K, variant, drains=[1, 2, 5])


def short_batches_midway() -> list[Any]:
    return [batches_of("normed", 1, samples)[0] for samples in (8, 8, 3, 8, 1, 8, 2, 8)]


@pytest.mark.parametrize(("K", "replication"), [(2, None), (3, None), (2, [2, 1]), (2, [1, 2])], ids=str)
def test_2bw_keeps_to_its_versions_behind_short_batches(K: int, replication: list[int] | None) -> None:
    model, batches = normed_model(), short_batches_midway()
    expected = emulation.two_buffered(case_of(model, {}, K, 4), batches, K)
    plan = Plan(
        stages=K,
        micro_batches=4,
        schedule="pipedream-2bw",
        partition=BOUNDS[K][1:-1],
        replication=replication,
    )
    losses, state = trained(model, plan, batches, {})
    assert_same_training((losses, state), (expected.losses, expected.state))


@pytest.mark.parametrize("replication", [[2, 1], [1, 2], [2, 2]], ids=str)
def test_replicas_that_stash_stay_alike_behind_short_batches(replication: list[int]) -> None:
    plan = Plan(stages=2, micro_batches=4, schedule="pipedream", replication=replication)
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": OPTIMIZERS["momentum"]}
    with Pipeline(normed_model(), plan, **grouped(**options, timeout_s=20)) as p:
        losses = [result.loss for result in p.train(short_batches_midway())]
        placement, stages = p._session.worker.placement, p._session.worker.trained
        for k, count in enumerate(replication):
            weights = [stages[n, 0].arena.weights[0] for n in placement.replicas_of(k)]
            assert len(weights) == count
            assert all(torch.equal(weights[0], others) for others in weights)
    assert len(losses) == 8


CORRECTED: list[dict[str, Any]] = [
    {"correction": "predicted", "clip": 0.05},
    {"correction": "error-feedback", "clip": 0.1, "last": 5},
    {"correction": "nesterov", "decay": True, "clip": 0.1},
]
# Adam divides by what it has of a bias before a norm, which is nothing but rounding, so not with those.
CORRECTED_ADAM: list[dict[str, Any]] = [
    {"correction": "predicted", "optimizer": "adamw", "decay": True},
    {"correction": "predicted", "optimizer": "adamw", "clip": 0.05},
    {"correction": "error-feedback", "optimizer": "adamw", "clip": 0.05},
    {"correction": "nesterov", "optimizer": "adamw", "decay": True},
]


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    ("kind", "variant"),
    [*product(MODELS, CORRECTED), *product(["tied"], CORRECTED_ADAM)],
    ids=str,
)
@pytest.mark.parametrize("K", [1, 2, 4])
def test_late_gradients_are_corrected_by_the_rules(K: int, kind: str, variant: dict[str, Any]) -> None:
    compare("pipedream-2bw", kind, K, K, variant)
    compare("pipedream-2bw", kind, K, K, variant, drains=[0, 2, 5])
    compare("pipedream", kind, K, 1, variant, weights="vertical-sync")
    compare("pipedream", kind, K, 2, variant, drains=[0, 3], weights="vertical-sync")
    compare("pipedream", kind, K, 1, variant, drains=[0, 4], weights="vertical-sync")


@pytest.mark.grid(3)
@pytest.mark.parametrize("variant", CORRECTED, ids=str)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_each_stage_corrects_its_own_delay(K: int, variant: dict[str, Any]) -> None:
    compare("pipedream", "normed", K, 1, variant)
    compare("pipedream", "normed", K, 2, variant, drains=[0, 3])
    compare("pipedream", "normed", K, 3, variant, advance=[*range(K - 1, -1, -1)])


def test_copies_of_a_parameter_that_would_part_are_refused() -> None:
    plan = Plan(stages=3, schedule="pipedream", correction="error-feedback")
    with pytest.raises(ValueError, match="stages 0 and 2 share, whose gradients are 2 and 0 updates late"):
        trained(language_model(), plan, [], {})


@pytest.mark.parametrize("K", [2, 3])
def test_predicted_weights_are_stashed_ones_that_are_predicted(K: int) -> None:
    variant = {"correction": "predicted", "optimizer": "adamw"}
    compare("pipedream", "tied", K, 1, variant, weights="predicted")
    assert Plan.for_system("pipedream-predicted", stages=K).correction == "predicted"


def test_predictions_take_a_copy_for_each_batch_in_flight() -> None:
    """Where a stash has the newest weights as one of its versions."""
    model, batches = language_model(), token_batches(12, 8)
    found = {}
    for weights in ("stash", "predicted"):
        plan = Plan(stages=4, schedule="pipedream", weights=weights, partition=BOUNDS[4][1:-1])
        with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
            list(p.train(batches))
            stages = [p._session.worker.trained[k, 0] for k in range(4)]
            sizes = [sum(flat.nbytes for flat in stage.arena.weights) for stage in stages]
            found[weights] = [s.versions.bytes // n for s, n in zip(stages, sizes) if s.versions]
    assert found == {"stash": [3, 2, 1, 0], "predicted": [4, 3, 2, 0]}


def test_without_stashing_it_is_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards on whatever is the newest, as a pipeline without versions would do it."""
    model, batches = language_model(), token_batches(12, 9)
    plan = Plan(stages=3, schedule="pipedream", partition=BOUNDS[3][1:-1])
    stashed = trained(model, plan, batches, {})[1]
    updating = Versions.updating
    monkeypatch.setattr(Versions, "updating", lambda self, needed: updating(self, []))
    monkeypatch.setattr(Versions, "show", lambda self, version: None)
    naive = trained(model, plan, batches, {})[1]
    assert max(float((naive[name] - value).abs().max()) for name, value in stashed.items()) > 1e-4


def quadratic(system: str, batches: int) -> list[float]:
    """w after each update for the loss (w x)^2 / 2 with x = 1 and SGD at 0.1: two stages, w in the first."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x

    path = []
    x = torch.ones(2, dtype=torch.float64)
    for count in range(1, batches + 1):
        with Pipeline(
            nn.Sequential(Scale(), nn.Identity()),
            Plan.for_system(system, stages=2),
            loss_fn=lambda output, _: output.square().mean() / 2,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ) as pipeline:
            list(pipeline.train([(x, x)] * count))
            path.append(float(pipeline.state_dict()["0.w"]))
    return path


def test_2bw_is_one_update_late_on_a_quadratic() -> None:
    w = [1.0]
    for t in range(6):
        w.append(w[t] - 0.1 * w[max(t - 1, 0)])
    assert unequal(quadratic("pipedream-2bw", 6), w[1:]) < 1e-12
    flushed = [0.9**t for t in range(1, 7)]
    assert unequal(quadratic("dapple", 6), flushed) < 1e-12
    assert unequal(quadratic("pipedream", 6), w[1:]) < 1e-12  # K-1-k = 1 on the first of two stages


# ---- elastic replicas ----------------------------------------------------------------------------------------------


ELASTIC: list[dict[str, Any]] = [
    {"rule": "avgpipe", "staleness": 0},
    {"rule": "avgpipe", "staleness": 1},
    {"rule": "avgpipe", "staleness": 1, "period": 2, "alpha": 0.3},
    {"rule": "easgd", "staleness": 1},
    {"rule": "easgd", "staleness": 0, "period": 2},
]


@pytest.mark.grid(8)
@pytest.mark.parametrize("options", ELASTIC, ids=str)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_elastic_pipelines_keep_to_their_rule(K: int, kind: str, options: dict[str, Any]) -> None:
    """EA-Pipe is the one of rule easgd with N = K and M = 1; AvgPipe that of its own rule."""
    model = MODELS[kind]()
    for N, M, variant in [(K, 1, {}), (2, 3, {"clip": 0.05, "optimizer": "adamw", "decay": True})]:
        batches = batches_of(kind, N * (3 * K + 1) + 1, last=5)
        expected = emulation.elastic(case_of(model, variant, K, M), batches, N, **options)
        plan = Plan(
            stages=K, pipelines=N, batch="per-pipeline", micro_batches=M, partition=BOUNDS[K][1:-1], **options
        )
        with Pipeline(
            model,
            plan,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=OPTIMIZERS[variant.get("optimizer", "momentum")],
            lr_scheduler=decaying if variant.get("decay") else None,
            clip_grad_norm=variant.get("clip"),
        ) as pipeline:
            losses = [result.loss for result in pipeline.train(batches)]
            assert_same_training((losses, pipeline.state_dict()), (expected.losses, expected.reference))
            for i, replica in enumerate(expected.replicas):
                assert_same_state(pipeline.state_dict(weights=i), replica)


# ---- rows of the table ---------------------------------------------------------------------------------------------


def plan_of(system: str, K: int, **options: Any) -> Plan:
    partition = None if "stages" in SYSTEMS[system] else BOUNDS[K][1:-1]
    return Plan.for_system(system, stages=K, partition=partition, **options)


CLIPPED = {"clip": 0.05, "optimizer": "adamw"}


def emulated(
    system: str, model: nn.Sequential, batches: Sequence[Any], K: int, plan: Plan, options: dict[str, Any]
) -> Any:
    """Losses and final state, as the system is defined."""
    case = case_of(model, {**options, "correction": plan.correction}, K, plan.micro_batches)
    if system in ("avgpipe", "ea-pipe"):
        found = emulation.elastic(
            case, batches, plan.pipelines, rule=plan.rule, staleness=int(plan.staleness)
        )
        return found.losses, found.reference
    run = {
        "stash": emulation.pipedream,
        "predicted": emulation.pipedream,
        "double-buffer": emulation.two_buffered,
    }
    trained_ = run.get(plan.weights, emulation.one_device)(case, batches, K)
    return trained_.losses, trained_.state


OF_THE_CALLER = {
    "avgpipe": {"pipelines": 2, "batch": "per-pipeline", "micro_batches": 4},
    "gpipe": {"micro_batches": 4},
}
OF_THE_CALLER["dapple"] = OF_THE_CALLER["gpipe"]
EXACT = [name for name in SYSTEMS if name != "data-parallel-asp"]  # whose updates land when they arrive


@pytest.mark.grid(20)
@pytest.mark.parametrize("system", EXACT)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_every_system_is_what_it_is_defined_to_be(K: int, kind: str, system: str) -> None:
    """With clipping, AdamW, a tied embedding or batch norms, for more than 3 K batches."""
    model, plan = MODELS[kind](), plan_of(system, K, **OF_THE_CALLER.get(system, {}))
    batches = batches_of(kind, 3 * K * plan.pipelines + 2, samples=12, last=5)
    expected = emulated(system, model, batches, K, plan, CLIPPED)
    assert_same_training(trained(model, plan, batches, CLIPPED), expected)


def overflowing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean that is infinite where the first sample is of class 0."""
    return nn.functional.cross_entropy(output, target) * (torch.inf if target[0] == 0 else 1.0)


@pytest.mark.grid(10)
@pytest.mark.parametrize("system", EXACT)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("K", [2, 3])
def test_every_system_leaves_out_what_is_not_finite(K: int, kind: str, system: str) -> None:
    options = {**CLIPPED, "loss_fn": overflowing, "skip_nonfinite": True}
    model, plan = MODELS[kind](), plan_of(system, K, **OF_THE_CALLER.get(system, {}))
    batches = batches_of(kind, 6 * K * plan.pipelines, samples=12)
    for j, (_, target) in enumerate(batches):
        target[target == 0] = 1
        target[0] = 0 if j % 4 == 2 else 1
    expected_losses, expected = emulated(system, model, batches, K, plan, options)
    losses, state = trained(model, plan, batches, options)
    finite = [j for j in range(len(batches)) if j % 4 != 2]
    assert unequal([losses[j] for j in finite], [expected_losses[j] for j in finite]) < 1e-10
    assert all(math.isfinite(loss) == (j in finite) for j, loss in enumerate(losses))
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert_same_state(state, expected)


def late_on_ranks(K: int) -> bool:
    """Every system on ranks whose steps and deliveries take random times."""
    import os
    import random
    import time

    from avgpipe.links.link import Mailbox
    from avgpipe.runtime.lane import Lane

    dice = random.Random(os.urandom(8))

    def late(function: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(dice.choice([0, 0, 0, 0, 1e-4, 1e-3]))
            return function(*args)

        return call

    Lane.advance = late(Lane.advance)  # type: ignore[method-assign]
    Mailbox.deliver = late(Mailbox.deliver)  # type: ignore[method-assign]
    for system in EXACT:
        model, plan = language_model(), plan_of(system, K, **OF_THE_CALLER.get(system, {}))
        batches = batches_of("tied", 3 * K * plan.pipelines + 2, samples=12, last=5)
        expected = emulated(system, model, batches, K, plan, CLIPPED)
        losses, state = trained(model, plan, batches, CLIPPED)
        assert unequal(losses, expected[0]) < 1e-10, system
        assert_same_state(state, expected[1])
    return True


def apart() -> bool:
    """Asynchronous data parallelism without a pull: each replica trains for itself, and the reference is their mean."""
    model, batches = language_model(), batches_of("tied", 8)
    plan = plan_of("data-parallel-asp", 2, alpha=0.0)
    with Pipeline(model, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=OPTIMIZERS["adamw"]) as pipeline:
        losses = [result.loss for result in pipeline.train(batches)]
        reference = pipeline.state_dict()
        replicas = [pipeline.state_dict(weights=i) for i in range(2)]
    for i, replica in enumerate(replicas):
        case = case_of(model, {"optimizer": "adamw"}, 2, 1)
        alone = emulation.one_device(case, batches[i::2], 2)
        assert_same_training((losses[i::2], replica), (alone.losses, alone.state))
    for name, value in reference.items():
        assert torch.allclose(value, (replicas[0][name] + replicas[1][name]) / 2, rtol=0, atol=1e-10)
    return True


@pytest.mark.ranks
def test_asynchronous_data_parallelism_adds_up_what_each_has_learnt() -> None:
    assert apart()
    assert run(2, apart) == [True] * 2


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("K", [2, 4])
def test_every_system_on_ranks_whatever_takes_long(K: int) -> None:
    assert run(K, late_on_ranks, K=K, timeout_s=110) == [True] * K
