"""Pipelines that share each batch: the rules of averaging in float64, and the limit in which they are one device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan, Precision
from tests import runner
from tests.options import grouped
from tests.runtime.cases import (
    assert_same_state,
    assert_same_training,
    assert_trains_as_one_device,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
    unequal,
)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, weight_decay=0.01),
    "momentum": momentum,
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
LOSS = nn.CrossEntropyLoss()
IGNORING = nn.CrossEntropyLoss(ignore_index=0)


def parts_of(n: int, M: int, N: int) -> list[slice]:
    """The samples of each pipeline: a batch is cut into micro-batches, and these are shared out."""
    M = min(M, n)
    sizes = [n // M + (m < n % M) for m in range(M)]
    counts = [M // N + (i < M % N) for i in range(N)]
    ends = [sum(sizes[: sum(counts[: i + 1])]) for i in range(N)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def emulate(
    model: nn.Module, batches: list[Any], N: int, M: int, case: dict[str, Any], loss_fn: nn.Module
) -> Any:
    """Train as the rules say, replica by replica: losses of whole batches, the reference, and the replicas."""
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")]
    staleness, period = case.get("staleness", 1), case.get("period", 1)
    alpha = case.get("alpha", (0.9 if case.get("rule") == "easgd" else 1.0) / N)
    reference = copy.deepcopy(model)
    z = [p.data for p in reference.parameters()]
    replicas = [copy.deepcopy(model) for _ in range(N)]
    opts = [optimizer(r.parameters()) for r in replicas]
    losses: list[float] = []
    for number, (x, y) in enumerate(batches):
        if number % period == 0:
            begin = [[p.data.clone() for p in r.parameters()] for r in replicas]
        counted = (y != 0) if loss_fn is IGNORING else torch.ones_like(y, dtype=torch.bool)
        whole = 0.0
        for i, part in enumerate(parts_of(len(x), M, N)):
            share = int(counted[part].sum()) / int(counted.sum())
            opts[i].zero_grad()
            if share:
                loss = loss_fn(replicas[i](x[part]), y[part])
                (N * share * loss).backward()
                whole += share * float(loss.detach())
            else:
                for p in replicas[i].parameters():
                    p.grad = torch.zeros_like(p) if p in opts[i].state else None
            opts[i].step()
        losses.append(whole)
        if (number + 1) % period:
            continue
        xs = [[p.data for p in r.parameters()] for r in replicas]
        for n in range(len(z)):
            old, d = z[n].clone(), [xs[i][n] - begin[i][n] for i in range(N)]
            if case.get("rule") == "easgd":
                e = [alpha * (xs[i][n] - old) for i in range(N)]
                for i in range(N):
                    xs[i][n] -= e[i]
                z[n] += sum(e)
                continue
            z[n] += sum(d) / N
            for i in range(N):
                xs[i][n] += alpha * ((z[n] - xs[i][n]) if staleness == 0 else (old - begin[i][n]))
    return losses, reference.state_dict(), [r.state_dict() for r in replicas]


def emulate_one_optimizer(
    model: nn.Module, batches: list[Any], N: int, M: int, case: dict[str, Any], loss_fn: nn.Module
) -> Any:
    """Rule "mean-gradient": z steps by the mean of all gradients, and each replica from z by its own."""
    made = OPTIMIZERS[case.get("optimizer", "momentum")]
    reference = copy.deepcopy(model)
    optimizer = made(reference.parameters())
    replicas = [copy.deepcopy(model) for _ in range(N)]
    losses: list[float] = []
    for x, y in batches:
        whole, trials, gradients = 0.0, [], []
        for replica, part in zip(replicas, parts_of(len(x), M, N)):
            share = (part.stop - part.start) / len(x)
            loss = (
                N * share * loss_fn(replica(x[part]), y[part])
                if share
                else 0 * sum(map(torch.sum, replica.parameters()))
            )
            whole += float(loss.detach()) / N
            gradients.append(torch.autograd.grad(loss, list(replica.parameters())))
            trial, state = copy.deepcopy(reference), copy.deepcopy(optimizer.state_dict())
            own = made(trial.parameters())
            own.load_state_dict(state)
            for p, g in zip(trial.parameters(), gradients[-1]):
                p.grad = g.clone()
            own.step()
            trials.append(trial)
        losses.append(whole)
        for p, *gs in zip(reference.parameters(), *gradients):
            p.grad = sum(gs) / N
        optimizer.step()
        waits = case.get("staleness", 1) == 0 or len(losses) <= case.get("warmup_rounds", 0)
        replicas = [copy.deepcopy(reference) for _ in range(N)] if waits else trials
    return losses, reference.state_dict(), [r.state_dict() for r in replicas]


CASES: list[dict[str, Any]] = [
    {"N": 2, "M": 4},
    {"N": 2, "M": 3, "staleness": 0},
    {"N": 3, "M": 4, "optimizer": "adamw", "alpha": 1.0},
    {"N": 3, "M": 3, "staleness": 0, "alpha": 0.7, "optimizer": "adamw"},
    {"N": 4, "M": 6, "period": 2},
    {"N": 2, "M": 5, "rule": "easgd"},
    {"N": 2, "M": 4, "schedule": "zero-bubble-h1"},
    {"N": 2, "M": 4, "schedule": "interleaved-1f1b"},
    {"N": 2, "M": 4, "schedule": "looped-bfs"},
    {"N": 2, "M": 8, "schedule": "dualpipe-v"},
    {"N": 2, "M": 4, "replication": True},
    {"N": 2, "M": 4, "spread": True},
    {"N": 2, "M": 4, "rule": "mean-gradient"},
    {"N": 3, "M": 5, "rule": "mean-gradient", "optimizer": "adamw"},
    {"N": 2, "M": 4, "rule": "mean-gradient", "staleness": 0, "optimizer": "adamw"},
    {"N": 2, "M": 4, "rule": "mean-gradient", "optimizer": "adamw", "spread": True},
    {"N": 2, "M": 4, "rule": "mean-gradient", "optimizer": "sgd", "replication": True},
    {"N": 3, "M": 5, "rule": "mean-gradient", "optimizer": "adamw", "warmup_rounds": 3},
    {"N": 2, "M": 4, "rule": "mean-gradient", "optimizer": "adamw", "warmup_rounds": 8, "spread": True},
    {"N": 2, "M": 4, "rule": "mean-gradient", "optimizer": "adamw", "warmup_rounds": 4, "spread": True},
]
NOT_OF_THE_PLAN = ("N", "M", "optimizer", "replication")


def plan_of(K: int, case: dict[str, Any]) -> Plan:
    options = {name: value for name, value in case.items() if name not in NOT_OF_THE_PLAN}
    options.setdefault("rule", "avgpipe")
    if case.get("replication"):
        options["replication"] = [2, *[1] * (K - 1)]
    return Plan(stages=K, pipelines=case["N"], micro_batches=case["M"], **options)


def run(K: int, case: dict[str, Any], loss_fn: nn.Module = LOSS, last: int = 7, count: int = 8) -> Any:
    batches = token_batches(count, 13, last=last)
    model = language_model()
    optimizer = OPTIMIZERS[case.get("optimizer", "momentum")]
    with Pipeline(model, plan_of(K, case), loss_fn=loss_fn, optimizer=optimizer, timeout_s=60) as p:
        results = list(p.train(batches))
        assert all(r.pipeline is None for r in results)
        assert [(r.batch, r.samples) for r in results] == [(j, len(x)) for j, (x, _) in enumerate(batches)]
        states = [p.state_dict(), *(p.state_dict(weights=i) for i in range(case["N"]))]
    emulated = emulate_one_optimizer if case.get("rule") == "mean-gradient" else emulate
    return [r.loss for r in results], states, emulated(model, batches, case["N"], case["M"], case, loss_fn)


def assert_as_emulated(found: Any) -> None:
    losses, states, (expected, reference, replicas) = found
    assert unequal(losses, expected) < 1e-10
    for ours, theirs in zip(states, [reference, *replicas], strict=True):
        assert_same_state(ours, theirs)


@pytest.mark.grid(20)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("K", [1, 3])
def test_follows_the_rules_step_by_step(K: int, case: dict[str, Any]) -> None:
    if case.get("schedule") in ("interleaved-1f1b", "looped-bfs", "dualpipe-v"):
        K += 1  # it has two stages on each of its workers
    assert_as_emulated(run(K, case))


@pytest.mark.parametrize("rule", ["avgpipe", "mean-gradient"])
@pytest.mark.parametrize("last", [1, 2, 3], ids="{} samples".format)
def test_a_last_batch_may_be_shorter_than_there_are_pipelines(last: int, rule: str) -> None:
    """Those that have nothing of it go on with their momentum, as one device does."""
    assert_as_emulated(run(2, {"N": 3, "M": 6, "rule": rule}, last=last))


@pytest.mark.parametrize("staleness", [0, 1])
def test_shares_weigh_by_what_their_loss_counts(staleness: int) -> None:
    assert_as_emulated(run(2, {"N": 3, "M": 6, "staleness": staleness}, loss_fn=IGNORING))


@pytest.mark.promise(0)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[11], CASES[12], CASES[15]], ids=str)
def test_on_ranks_it_is_the_same(case: dict[str, Any]) -> None:
    workers = plan_of(2, case).workers
    for found in runner.run(workers, run, K=2, case=case):
        assert_as_emulated(found)


# ---- the limit in which elastic pipelines are data parallelism ---------------------------------------------------


class SumLoss(nn.Module):
    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.05 * nn.functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("loss_fn", [LOSS, IGNORING, SumLoss()], ids=["mean", "ignoring", "sum"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize(("K", "N", "M"), [(1, 2, 2), (3, 2, 5), (2, 4, 4)])
def test_with_whole_elasticity_they_are_one_device(
    K: int, N: int, M: int, optimizer: str, loss_fn: Any
) -> None:
    batches, make = token_batches(12, 12, last=5), OPTIMIZERS[optimizer]
    plan = Plan(stages=K, pipelines=N, micro_batches=M, alpha=1.0, staleness=0)
    assert_trains_as_one_device(language_model(), plan, batches, loss_fn, make, timeout_s=60)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("K", "N", "M"), [(1, 2, 2), (3, 2, 5), (2, 4, 4)])
def test_with_one_optimizer_that_no_pipeline_is_ahead_of_they_are_one_device(
    K: int, N: int, M: int, optimizer: str
) -> None:
    batches, make = token_batches(12, 12, last=5), OPTIMIZERS[optimizer]
    plan = Plan(stages=K, pipelines=N, micro_batches=M, rule="mean-gradient", staleness=0)
    assert_trains_as_one_device(language_model(), plan, batches, LOSS, make, timeout_s=60)


CLIPPED: dict[str, dict[str, Any]] = {
    "stages": {"plan": {"stages": 3}},
    "schedule": {"plan": {"stages": 2, "schedule": "1f1b", "recompute": "always"}},
    "more pipelines": {"plan": {"stages": 2, "pipelines": 4}},
    "replicas": {"plan": {"stages": 2, "replication": (2, 1), "micro_batches": 8}},
    "tied weights": {"plan": {"stages": 2}, "model": "tied"},
    "a frozen layer": {"plan": {"stages": 2}, "model": "frozen"},
    "targets that are ignored": {"plan": {"stages": 2}, "loss_fn": IGNORING},
    "a sum and a count": {"plan": {"stages": 2}, "loss_fn": "counted"},
    "a short last batch": {"plan": {"stages": 2, "pipelines": 4}, "last": 3},
    "skipping": {"plan": {"stages": 2}, "options": {"skip_nonfinite": True}},
    "a scaled loss": {"plan": {"stages": 2}, "options": {"loss_scale": 128.0}},
}


def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
    kept = target != 0
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


class Tied(nn.Sequential):
    """The last layer has the weight of the first one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        self[3].weight = self[0].weight
        self.double()


@pytest.mark.parametrize("what", CLIPPED)
def test_the_limit_is_of_the_batch_s_gradient(what: str) -> None:
    case = CLIPPED[what]
    plan = Plan(**({"pipelines": 2, "micro_batches": 4, "staleness": 0} | case["plan"]))
    loss_fn = {"counted": counted}.get(case.get("loss_fn"), case.get("loss_fn", LOSS))  # type: ignore[arg-type]
    if case.get("model") == "tied":
        draw = torch.Generator().manual_seed(3)
        model: nn.Module = Tied()
        data = [
            (torch.randn(8, 8, generator=draw, dtype=torch.float64), torch.randint(8, (8,), generator=draw))
            for _ in range(5)
        ]
    else:
        model, data = language_model(frozen=case.get("model") == "frozen"), token_batches(5, 8)
    if last := case.get("last"):
        data.append((data[0][0][:last], data[0][1][:last]))

    def one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = loss_fn(output, target)
        return found[0] / found[1] if isinstance(found, tuple) else found

    for clip in (0.05, 0.3, 100.0):
        options = {"clip_grad_norm": clip, **case.get("options", {})}
        assert_same_training(
            train_pipeline(model, plan, data, loss_fn, momentum, **options),
            train_on_one_device(model, data, one, momentum, clip),
        )


def test_pipelines_with_workers_of_their_own_say_that_they_know_their_share_alone(caplog: Any) -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, spread=True)
    train_pipeline(language_model(), plan, token_batches(3, 8), counted, momentum, clip_grad_norm=1.0)
    limit, count = [record.getMessage() for record in caplog.records]
    assert limit.startswith("clip_grad_norm limits the gradient of each pipeline's share of a batch")
    assert count.startswith(
        "loss_fn returns (sum, count), and pipelines with workers of their own do not exchange"
    )
    caplog.clear()
    train_pipeline(language_model(), plan, token_batches(3, 8), LOSS, momentum, clip_grad_norm=math.inf)
    assert not caplog.records


@pytest.mark.parametrize("pipelines", [1, 2, 4])
def test_the_reported_norm_is_the_batch_s(pipelines: int) -> None:
    model, data = language_model(), token_batches(1, 8)
    copied = copy.deepcopy(model)
    LOSS(copied(data[0][0]), data[0][1]).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in copied.parameters() if p.grad is not None]))
    plan = Plan(stages=2, pipelines=pipelines, micro_batches=4)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum, clip_grad_norm=math.inf) as p:
        (result,) = p.train(data)
    assert result.grad_norm == pytest.approx(expected, rel=1e-12)


def test_a_share_that_is_not_finite_skips_the_whole_batch_as_on_one_device() -> None:
    model, data, bad = language_model(), token_batches(6, 8), 1

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        return loss * math.inf if bool((target == bad).all()) else loss

    for _, y in data:
        y[y == bad] = 0
    for _, y in data[2:4]:
        y[:2] = bad  # the first micro-batch, which is the first pipeline's
    plan = Plan(stages=2, pipelines=2, micro_batches=4, staleness=0)
    with Pipeline(
        model, plan, loss_fn=loss_fn, optimizer=momentum, extensions=[Precision(skip_nonfinite=True)]
    ) as p:
        results = list(p.train(data))
        state = p.state_dict()
    assert [r.skipped for r in results] == [False, False, True, True, False, False]
    _, expected = train_on_one_device(model, data[:2] + data[4:], LOSS, momentum)
    assert all(torch.allclose(state[name], value, rtol=0, atol=1e-12) for name, value in expected.items())


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("N", [2, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_count_is_that_of_the_whole_batch(N: int, K: int, clip: float | None) -> None:
    """Shares that count more, less, or nothing at all."""
    data = token_batches(5, 8)
    for n, (_, y) in enumerate(data):
        y[: 2 * n] = 0  # of the last batch no target is left

    def one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total, count = counted(output, target)
        return total / count

    plan = Plan(stages=K, pipelines=N, micro_batches=4, staleness=0)
    assert_same_training(
        train_pipeline(language_model(), plan, data[:4], counted, momentum, clip_grad_norm=clip),
        train_on_one_device(language_model(), data[:4], one, momentum, clip),
    )


def test_they_draw_what_one_pipeline_draws() -> None:
    """Dropout of micro-batch m is that of micro-batch m, whoever trains on it."""
    batches = token_batches(6, 12, last=7)

    def trained(**options: Any) -> Any:
        plan = Plan(micro_batches=6, **options)
        return train_pipeline(language_model(dropout=0.3), plan, batches, LOSS, momentum)

    one = trained()
    for K, N in ((1, 2), (2, 3)):
        assert_same_training(trained(stages=K, pipelines=N, alpha=1.0, staleness=0), one)


def test_a_loss_of_sum_and_count_weighs_shares_by_samples() -> None:
    def counting(output: torch.Tensor, target: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    batches = token_batches(5, 12, last=7)
    plan = Plan(stages=2, pipelines=2, micro_batches=4, alpha=1.0, staleness=0)
    ours = train_pipeline(language_model(), plan, batches, counting, momentum)
    assert_same_training(ours, train_pipeline(language_model(), Plan(), batches, LOSS, momentum))


# ---- other things that know of batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 2, 3])
def test_one_pipeline_is_what_it_was(M: int) -> None:
    """Bit for bit: it has nobody to share with."""
    found = []
    for batch in ("global", "per-pipeline"):
        plan = Plan(stages=2, micro_batches=M, batch=batch)
        with Pipeline(language_model(dropout=0.3), plan, loss_fn=LOSS, optimizer=momentum) as p:
            results = list(p.train(token_batches(5, 8, last=3)))
            assert {r.pipeline for r in results} == {0}
            found.append(([r.loss for r in results], p.state_dict()))
    (losses, state), (others, other) = found
    assert losses == others
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_step_trains_on_one_batch() -> None:
    (x, y), *_ = token_batches(1, 12)
    plan = Plan(stages=2, pipelines=3, micro_batches=6)
    with (
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as stepped,
        Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as trained,
    ):
        losses = [stepped.step(x, y) for _ in range(4)]
        assert losses == [r.loss for r in trained.train([(x, y)] * 4)]
        assert stepped.batches == 4
        assert_same_state(stepped.state_dict(), trained.state_dict())


def test_the_learning_rate_steps_once_for_each_batch() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    plan = Plan(stages=2, pipelines=2, micro_batches=4)
    options: Any = {"loss_fn": LOSS, "optimizer": momentum, "lr_scheduler": schedule}
    with Pipeline(language_model(), plan, **grouped(**options)) as p:
        list(p.train(token_batches(3, 8)))
        rates = {group["lr"] for o in p.optimizers for group in o.param_groups}
    assert rates == {0.1 * 0.5**3}


def test_a_batch_that_overflows_in_one_share_is_reported() -> None:
    x, y = token_batches(1, 8)[0]

    class Bad(nn.Module):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = LOSS(output, target)
            return loss * math.inf if bool((target == y[-1]).all()) else loss

    plan = Plan(stages=2, pipelines=2, micro_batches=8)
    with Pipeline(
        language_model(), plan, loss_fn=Bad(), optimizer=momentum, extensions=[Precision(skip_nonfinite=True)]
    ) as p:
        (result,) = p.train([(x, y)])
        assert not math.isfinite(result.loss)
        assert p.skipped_updates >= 1
        assert all(bool(value.isfinite().all()) for value in p.state_dict().values())


@pytest.mark.parametrize("rule", ["avgpipe", "mean-gradient"])
def test_checkpoints_go_on_bit_for_bit(tmp_path: Any, rule: str) -> None:
    batches = token_batches(9, 8, last=5)
    plan = Plan(stages=2, pipelines=3, micro_batches=6, rule=rule)

    def made() -> Pipeline:
        return Pipeline(language_model(dropout=0.2), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"])

    with made() as p:
        losses = [r.loss for r in p.train(batches[:4])]
        p.save(tmp_path / "saved")
        losses += [r.loss for r in p.train(batches[4:])]
        whole = p.state_dict()
    with made() as p:
        p.load(tmp_path / "saved")
        assert [r.loss for r in p.train(batches[4:])] == losses[4:]
        assert all(torch.equal(value, whole[name]) for name, value in p.state_dict().items())


@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_checkpoint_of_the_other_kind_of_batch_loads_by_name(tmp_path: Any, batch: str) -> None:
    """Between kinds, pipelines begin a round together, whatever rounds the saved ones were in."""
    other = "global" if batch == "per-pipeline" else "per-pipeline"
    plans = [Plan(stages=2, pipelines=2, micro_batches=4, batch=kind) for kind in (other, batch)]
    with Pipeline(language_model(), plans[0], loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train(token_batches(3, 8)))
        p.save(tmp_path / "saved")
        saved = p.state_dict()
    with Pipeline(language_model(), plans[1], loss_fn=LOSS, optimizer=momentum) as p:
        p.load(tmp_path / "saved")
        assert_same_state(p.state_dict(), saved)
        assert len(list(p.train(token_batches(4, 8)))) == 4


ONE = Plan(stages=1, micro_batches=4)
SHARING = [
    Plan(stages=3, pipelines=2, micro_batches=4, rule="mean-gradient", staleness=0),
    Plan(stages=2, pipelines=4, micro_batches=4, rule="mean-gradient", staleness=0),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [(ONE, SHARING[0]), (SHARING[0], ONE), (SHARING[0], SHARING[1])],
    ids=["to", "from", "on"],
)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_shared_optimizer_s_state_loads_under_any_layout(
    tmp_path: Any, before: Plan, after: Plan, optimizer: str
) -> None:
    batches, make = token_batches(10, 12, last=7), OPTIMIZERS[optimizer]
    _, state = train_on_one_device(language_model(), batches, LOSS, make)
    options: Any = {"loss_fn": LOSS, "optimizer": make}
    with Pipeline(language_model(), before, **grouped(**options)) as p:
        list(p.train(batches[:5]))
        p.save(tmp_path / "saved")
    with Pipeline(language_model(), after, **grouped(**options)) as p:
        p.load(tmp_path / "saved")
        list(p.train(batches[5:]))
        assert_same_state(p.state_dict(), state)


def test_a_frozen_parameter_is_not_stepped_by_the_shared_optimizer() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, rule="mean-gradient")
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"]) as p:
        list(p.train(token_batches(3, 8)))
        p.requires_grad_("1", False)
        before = p.state_dict()
        list(p.train(token_batches(3, 8, seed=1)))
        after = p.state_dict()
    assert torch.equal(before["1.weight"], after["1.weight"])
    assert not torch.equal(before["3.lin.weight"], after["3.lin.weight"])


def test_the_learning_rate_of_the_shared_optimizer_follows_the_schedule() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    batches = token_batches(8, 12)
    make = OPTIMIZERS["momentum"]
    _, state = train_on_one_device(language_model(), batches, LOSS, make, lr_scheduler=schedule)
    options: Any = {"loss_fn": LOSS, "optimizer": make, "lr_scheduler": schedule}
    with Pipeline(language_model(), SHARING[0], **grouped(**options)) as p:
        list(p.train(batches))
        assert_same_state(p.state_dict(), state)


@pytest.mark.parametrize("options", [{"alpha": 0.5}, {"period": 2}, {"staleness": "asynchronous"}], ids=str)
def test_one_optimizer_has_no_elasticity(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="steps the reference once for each round of gradients"):
        Plan(pipelines=2, rule="mean-gradient", **options)


# ---- gradients inside of layers ------------------------------------------------------------------------------------


class Clamps(nn.Module):
    """Limits the gradient of what it returns, element by element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return y


def clamping() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(4, 8), Clamps(), nn.Tanh(), nn.Linear(8, 8), Clamps(), nn.Tanh(), nn.Linear(8, 11)]
    return nn.Sequential(*layers).double()


def float_batches(count: int, samples: int, last: int | None = None, wants: bool = False) -> list[Any]:
    draw = torch.Generator().manual_seed(6)
    sizes = [samples] * (count - 1) + [last or samples]
    return [
        (
            torch.randn(n, 4, generator=draw, dtype=torch.float64).requires_grad_(wants),
            torch.randint(11, (n,), generator=draw),
        )
        for n in sizes
    ]


INSIDE = [
    {"stages": 2},
    {"stages": 1},
    {"stages": 3, "schedule": "zero-bubble-h1"},
    {"stages": 2, "recompute": "always"},
    {"stages": 2, "rule": "avgpipe", "alpha": 1.0},
]


@pytest.mark.parametrize("loss_fn", [LOSS, IGNORING, SumLoss()], ids=["mean", "ignoring", "sum"])
@pytest.mark.parametrize("options", INSIDE, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3])
def test_layers_see_the_gradients_that_one_device_has(N: int, options: dict[str, Any], loss_fn: Any) -> None:
    batches, model = float_batches(4, 12, last=7), clamping()
    plan = Plan(pipelines=N, micro_batches=2 * N, staleness=0, **options)
    assert_trains_as_one_device(model, plan, batches, loss_fn, momentum, timeout_s=60)


def test_the_limit_changes_what_is_trained() -> None:
    """Or the test before would compare nothing."""
    batches, model = float_batches(4, 12, last=7), clamping()
    without = nn.Sequential(*(layer for layer in model if not isinstance(layer, Clamps)))
    losses, expected = (train_on_one_device(m, batches, LOSS, momentum)[0] for m in (model, without))
    assert unequal(losses, expected) > 1e-3


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("N", [1, 2, 3])
def test_inputs_that_want_gradients_get_those_of_one_device(N: int, K: int) -> None:
    ours, theirs = (float_batches(3, 12, last=7, wants=True) for _ in range(2))
    plan = Plan(stages=K, pipelines=N, micro_batches=2 * N, staleness=0)
    assert_same_training(
        train_pipeline(clamping(), plan, ours, LOSS, momentum),
        train_on_one_device(clamping(), theirs, LOSS, momentum),
    )
    for (mine, _), (x, _) in zip(ours, theirs):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, x.grad, rtol=1e-10, atol=1e-12)


# ---- what the body of the loop does, where no stream runs ahead of it ----------------------------------------------


def plain_loop(batches: list[Any], optimizer: Any, body: Any) -> Any:
    model = language_model()
    made, losses = optimizer(model.parameters()), []
    for j, (x, y) in enumerate(batches):
        made.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
        body(j, [made])
    return losses, model.state_dict()


def lower(j: int, optimizers: Any) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7


def forget(j: int, optimizers: Any) -> None:
    for optimizer in optimizers if j % 3 == 2 else ():
        optimizer.state.clear()


def decay(j: int, optimizers: Any) -> None:
    with torch.no_grad():
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)


ALONE: dict[str, Any] = {"pipelines": 1}
NOBODY_AHEAD: list[dict[str, Any]] = [{"staleness": 0}, {"warmup_rounds": 100}]
BODIES = [
    *((body, plan) for body in (lower, forget, decay) for plan in (ALONE, {**ALONE, "schedule": "1f1b"})),
    *((body, plan) for body in (lower, forget) for plan in NOBODY_AHEAD),
]


@pytest.mark.host
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("body", "options"), BODIES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_what_the_loop_does_with_optimizers_is_done_before_the_next_batch(
    body: Any, options: dict[str, Any], optimizer: str
) -> None:
    batches, made, losses = token_batches(8, 8), OPTIMIZERS[optimizer], []
    plan = Plan(**{"stages": 2, "pipelines": 2, "micro_batches": 4, **options})
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=made) as p:
        for result in p.train(batches):
            losses.append(result.loss)
            body(result.batch, p.optimizers)
        state = p.state_dict()
    assert_same_training((losses, state), plain_loop(batches, made, body))


@pytest.mark.host
def test_whole_elasticity_forgets_what_the_loop_clears() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=4, rule="avgpipe", alpha=1.0, staleness=0)
    batches, losses = token_batches(8, 8), []
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        for result in p.train(batches):
            losses.append(result.loss)
            forget(result.batch, p.optimizers)
        state = p.state_dict()
    assert_same_training((losses, state), plain_loop(batches, momentum, forget))
