"""The emulations follow recurrences in plain numbers, plain training, and each other where they must meet."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.cases import adamw, assert_same_state, language_model, momentum, token_batches
from tests.runtime.cases import train_on_one_device as plainly
from tests.runtime.norms import image_batches, image_model, slow_training
from tests.systems import emulation
from tests.systems.emulation import Case, by_counted

# ---- one number a stage --------------------------------------------------------------------------------------------

START = [0.9, 1.2, -0.7, 1.1]
RATE, MOMENTUM = 0.1, 0.9


class Scale(nn.Module):
    def __init__(self, w: float | nn.Parameter) -> None:
        super().__init__()
        self.w = w if isinstance(w, nn.Parameter) else nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean() / 2


def chain(K: int, **options: Any) -> Case:
    """y = w_0 w_1 ... w_K-1 x."""
    settings = {"loss_fn": half_square, "optimizer": partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)}
    return Case(lambda: [Scale(w) for w in START[:K]], **(settings | options))


def points(count: int, samples: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(samples, generator=generator).double(),
            torch.randn(samples, generator=generator).double(),
        )
        for _ in range(count)
    ]


def numbers(state: dict[str, torch.Tensor]) -> list[float]:
    return [float(value) for value in state.values()]


def recurrence(
    K: int,
    batches: list[Any],
    version: Any,
    *,
    stash: bool = True,
    tied: bool = False,
    clip: float = math.inf,
) -> tuple[list[float], list[float]]:
    """Weights and losses of :func:`chain`: batch t uses w_k(version(k, t)), or without stash, w_k(t) in its backwards.

    With r = y - target, dL/dw_k = r x prod_{l<k} w_l prod_{l>k} w_l, the first product as the forward had it.
    """
    w = [[START[0]] * K if tied else START[:K]]
    buffers: list[float] = []
    losses = []
    for t, (inputs, targets) in enumerate(batches):
        x, target = float(inputs), float(targets)
        used = [w[version(k, t)][k] for k in range(K)]
        behind = used if stash else w[t]
        r = math.prod(used) * x - target
        losses.append(r * r / 2)
        g = [r * x * math.prod(used[:k]) * math.prod(behind[k + 1 :]) for k in range(K)]
        norm = abs(sum(g)) if tied else math.hypot(*g)
        g = [min(1.0, clip / (norm + 1e-6)) * (sum(g) if tied else one) for one in g]
        buffers = [MOMENTUM * b + one for b, one in zip(buffers, g)] if buffers else g
        w.append([old - RATE * b for old, b in zip(w[-1], buffers)])
    return w[-1], losses


def assert_follows(trained: Any, expected: tuple[list[float], list[float]]) -> None:
    assert numbers(trained.state) == pytest.approx(expected[0], abs=1e-12)
    assert trained.losses == pytest.approx(expected[1], abs=1e-12)


LIMITS = pytest.mark.parametrize("limit", [None, 0.3])
STAGES = pytest.mark.parametrize("K", [1, 2, 3, 4])


def clip_of(limit: float | None) -> float:
    return math.inf if limit is None else limit


@LIMITS
@STAGES
def test_a_flush_has_no_delay(K: int, limit: float | None) -> None:
    batches = points(12)
    expected = recurrence(K, batches, lambda k, t: t, clip=clip_of(limit))
    assert_follows(emulation.one_device(chain(K, clip_grad_norm=limit), batches, K), expected)


@LIMITS
@STAGES
def test_pipedream_delays_stage_k_by_the_stages_behind_it(K: int, limit: float | None) -> None:
    batches = points(12)
    expected = recurrence(K, batches, lambda k, t: max(0, t - (K - 1 - k)), clip=clip_of(limit))
    assert_follows(emulation.pipedream(chain(K, clip_grad_norm=limit), batches, K), expected)


@STAGES
def test_vertical_sync_delays_all_stages_as_the_first(K: int) -> None:
    batches = points(12)
    expected = recurrence(K, batches, lambda k, t: max(0, t - (K - 1)))
    assert_follows(emulation.pipedream(chain(K), batches, K, vertical_sync=True), expected)


@pytest.mark.parametrize("K", [2, 3, 4])
def test_without_stash_a_backward_uses_the_newest_weights(K: int) -> None:
    batches = points(12)
    naive = emulation.pipedream(chain(K), batches, K, stash=False)
    assert_follows(naive, recurrence(K, batches, lambda k, t: max(0, t - (K - 1 - k)), stash=False))
    stashed = emulation.pipedream(chain(K), batches, K)
    if K == 2:  # the first stage's weight does not enter its own gradient, and the second has no delay
        assert naive.losses == stashed.losses
    else:
        assert max(abs(a - b) for a, b in zip(numbers(naive.state), numbers(stashed.state))) > 1e-3


@LIMITS
@STAGES
def test_2bw_delays_by_one(K: int, limit: float | None) -> None:
    """Here M micro-batches are the same sample M times, so that floats can follow."""
    batches = points(12)
    repeated = [(x.repeat(4), y.repeat(4)) for x, y in batches]
    expected = recurrence(K, batches, lambda k, t: max(t - 1, 0), clip=clip_of(limit))
    case = chain(K, micro_batches=4, clip_grad_norm=limit)
    assert_follows(emulation.two_buffered(case, repeated, K), expected)


def test_2bw_is_visible_on_a_bowl() -> None:
    """Of w^2/2, from 1: w(t+1) = w(t) - v w(max(t-1, 0)); a pipeline of one stage does not make it a flush."""
    case = Case(lambda: [Scale(1.0)], half_square, partial(torch.optim.SGD, lr=0.5))
    batch = (torch.ones(1).double(), torch.zeros(1).double())
    w = [1.0]
    for t in range(6):
        w.append(w[t] - 0.5 * w[max(t - 1, 0)])
        assert numbers(emulation.two_buffered(case, [batch] * (t + 1), 1).state) == [w[-1]]
    assert w[:5] == [1.0, 0.5, 0.0, -0.25, -0.25]
    assert numbers(emulation.one_device(case, [batch] * 4).state) == [0.5**4]


@LIMITS
@pytest.mark.parametrize("system", ["one_device", "pipedream", "naive"])
def test_a_tied_weight_has_one_gradient(system: str, limit: float | None) -> None:
    """y = w w x on two stages: in PipeDream the first copy is one version behind the second."""

    def layers() -> list[nn.Module]:
        first = Scale(START[0])
        return [first, Scale(first.w)]

    batches = points(12)
    case = replace(chain(2, clip_grad_norm=limit), layers=layers)
    delay = 0 if system == "one_device" else 1
    expected = recurrence(
        *(2, batches, lambda k, t: max(0, t - delay * (1 - k))),
        stash=system != "naive",
        tied=True,
        clip=clip_of(limit),
    )
    if system == "one_device":
        assert_follows(emulation.one_device(case, batches, 2), expected)
    else:
        assert_follows(emulation.pipedream(case, batches, 2, stash=system == "pipedream"), expected)


# ---- the order of work ---------------------------------------------------------------------------------------------


def words(steps: list[Any]) -> str:
    return " ".join(f"{s.kind}{s.j}" if s.m < 0 else f"{s.kind}{s.j}.{s.m}" for s in steps)


def test_a_stage_alternates_across_batches() -> None:
    assert [words(emulation.steps_of_stage(2 - k, [2, 2], ())) for k in range(2)] == [
        "F0.0 F0.1 B0.0 F1.0 B0.1 U0 F1.1 B1.0 B1.1 U1",
        "F0.0 B0.0 F0.1 B0.1 U0 F1.0 B1.0 F1.1 B1.1 U1",
    ]
    assert words(emulation.steps_of_stage(3, [1] * 4, {1})) == (
        "F0.0 F1.0 B0.0 U0 B1.0 U1 F2.0 F3.0 B2.0 U2 B3.0 U3"
    )


@pytest.mark.parametrize("M", [1, 2, 3, 5])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_versions_of_pipedream(K: int, M: int) -> None:
    """(K-1-k) micro-batches behind are as many batches, rounded up."""
    case, batches = chain(4, micro_batches=M), points(8, samples=5)
    delays = [math.ceil((K - 1 - k) / M) for k in range(K)]
    got = emulation.pipedream(case, batches, K).versions
    assert got == [[max(0, j - delay) for delay in delays] for j in range(8)]
    got = emulation.pipedream(case, batches, K, vertical_sync=True).versions
    assert got == [[max(0, j - delays[0])] * K for j in range(8)]


def test_after_a_drain_all_stages_have_all_updates() -> None:
    got = emulation.pipedream(chain(3), points(7), 3, drains={2}).versions
    assert got == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5], [4, 5, 6]]


# ---- models with everything that makes equality hard ---------------------------------------------------------------

LOSS = nn.CrossEntropyLoss()


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def language(**options: Any) -> Case:
    """Seven layers; embedding and decoder are tied, first stage to last."""
    settings = {"loss_fn": LOSS, "optimizer": momentum, "micro_batches": 4, "clip_grad_norm": 0.3}
    return Case(language_model, **(settings | options))


VARIANTS = [
    {},
    {"clip_grad_norm": None},
    {"optimizer": adamw},
    {"lr_scheduler": halved},
    {"layers": partial(language_model, frozen=True)},
    {"loss_fn": nn.CrossEntropyLoss(ignore_index=3), "shares": by_counted(3)},
    {"bounds": {2: [0, 6, 7], 3: [0, 1, 2, 7], 4: [0, 3, 4, 5, 7]}},
]
ALL = pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ",".join(options) or "plain")


def variant(options: dict[str, Any]) -> Case:
    return replace(language(), **options)


def assert_same(one: Any, other: Any) -> None:
    assert one.losses == pytest.approx(other.losses, abs=1e-11)
    assert_same_state(one.state, other.state, 1e-11)


def assert_tied_copies_are_one(trained: Any) -> None:
    embedding, decoder = trained.stages[0]["0.weight"], trained.stages[-1]["6.weight"]
    assert torch.equal(embedding, decoder)


@ALL
@pytest.mark.parametrize("K", [1, 3])
def test_one_device_is_plain_training(K: int, options: dict[str, Any]) -> None:
    case, batches = variant(options), token_batches(4, 9, last=3)
    trained = emulation.one_device(case, batches, K)
    losses, state = plainly(
        case.layers(), batches, case.loss_fn, case.optimizer, case.clip_grad_norm, case.lr_scheduler
    )
    assert trained.losses == pytest.approx(losses, abs=1e-11)
    assert_same_state(trained.state, state, 1e-11)
    assert_tied_copies_are_one(trained)


@ALL
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_pipedream_that_always_drains_is_one_device(K: int, options: dict[str, Any]) -> None:
    case, batches = variant(options), token_batches(3, 9, last=3)
    assert_same(emulation.pipedream(case, batches, K, drains=range(3)), emulation.one_device(case, batches))


@ALL
def test_pipedream_of_one_stage_is_one_device(options: dict[str, Any]) -> None:
    case, batches = variant(options), token_batches(3, 9)
    expected = emulation.one_device(case, batches)
    for settings in ({}, {"stash": False}, {"vertical_sync": True}, {"drains": {1}}):
        assert_same(emulation.pipedream(case, batches, 1, **settings), expected)


@ALL
@pytest.mark.parametrize("K", [2, 3, 4])
def test_pipedream_in_sync_with_enough_micro_batches_is_2bw(K: int, options: dict[str, Any]) -> None:
    """Two ways to one place: the event loop over stages, and the loop over batches."""
    case, batches = variant(options), token_batches(5, 9)
    ours = emulation.pipedream(case, batches, K, vertical_sync=True)
    assert_same(ours, emulation.two_buffered(case, batches, K))
    assert_tied_copies_are_one(ours)


@ALL
def test_2bw_does_not_depend_on_the_stages(options: dict[str, Any]) -> None:
    case, batches = variant(options), token_batches(5, 9)
    all_of_them = [emulation.two_buffered(case, batches, K) for K in (1, 2, 3, 4)]
    for one, other in pairwise(all_of_them):
        assert_same(one, other)
    flushed = emulation.one_device(case, batches)
    assert max(abs(a - b) for a, b in zip(flushed.losses, all_of_them[0].losses)) > 1e-4


def test_2bw_refuses_fewer_micro_batches_than_stages() -> None:
    with pytest.raises(ValueError, match="at least K = 3 micro-batches, not 2"):
        emulation.two_buffered(language(micro_batches=2), token_batches(1, 9), 3)


@ALL
@pytest.mark.parametrize("M", [1, 3])
def test_pipelines_differ_where_they_must(M: int, options: dict[str, Any]) -> None:
    case, batches = replace(variant(options), micro_batches=M), token_batches(8, 9)
    runs = {
        "one device": emulation.one_device(case, batches),
        "pipedream": emulation.pipedream(case, batches, 3),
        "naive": emulation.pipedream(case, batches, 3, stash=False),
        "in sync": emulation.pipedream(case, batches, 3, vertical_sync=True),
        "drained": emulation.pipedream(case, batches, 3, drains={3}),
    }
    for name, trained in runs.items():
        assert_tied_copies_are_one(trained)
        for other, theirs in runs.items():
            apart = max(float((trained.state[n] - theirs.state[n]).abs().max()) for n in trained.state)
            assert name == other or apart > 1e-6, (name, other)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_of_zero_changes_nothing(optimizer: Any) -> None:
    case, batches = language(optimizer=partial(optimizer, lr=0.0)), token_batches(4, 9)
    before = nn.Sequential(*case.layers()).state_dict()
    losses = [float(LOSS(nn.Sequential(*case.layers())(x), y).detach()) for x, y in batches]
    for trained in (
        emulation.one_device(case, batches),
        emulation.pipedream(case, batches, 3),
        emulation.pipedream(case, batches, 3, stash=False),
        emulation.two_buffered(case, batches, 3),
    ):
        assert trained.losses == pytest.approx(losses, abs=1e-12)
        assert_same_state(trained.state, before, 0)
    averaged = emulation.elastic(case, batches, 2)
    assert averaged.losses == pytest.approx(losses, abs=1e-12)
    for state in (averaged.reference, *averaged.replicas):
        assert_same_state(state, before, 1e-15)


# ---- BatchNorm -----------------------------------------------------------------------------------------------------


def images(**options: Any) -> Case:
    return Case(partial(image_model, twice=True, **options), LOSS, momentum)


@pytest.mark.parametrize("norm", [{}, {"momentum": None}, {"momentum": 0.3}], ids=str)
def test_batch_norms_of_whole_batches_are_those_of_torch(norm: dict[str, Any]) -> None:
    case, batches = images(**norm), image_batches(3)
    losses, state = plainly(case.layers(), batches, LOSS, momentum)
    trained = emulation.one_device(case, batches, 3)
    assert trained.losses == pytest.approx(losses, abs=1e-11)
    assert_same_state(trained.state, state, 1e-11)


def test_batch_norms_see_the_whole_batch() -> None:
    case, batches = replace(images(), micro_batches=3), image_batches(3, last=7)
    trained = emulation.one_device(case, batches)
    losses, state = slow_training(case.layers(), batches, 3)
    assert trained.losses == pytest.approx(losses, abs=1e-11)
    assert_same_state(trained.state, state, 1e-11)


def test_batch_norms_count_in_the_order_of_updates() -> None:
    """Statistics of the inputs themselves do not depend on weights, so no system may change them."""

    def layers() -> list[nn.Module]:
        return [nn.BatchNorm2d(2), *image_model()]

    case, batches = Case(lambda: [x.double() for x in layers()], LOSS, momentum), image_batches(4)
    expected = emulation.one_device(case, batches)
    for M, K in ((1, 3), (3, 3), (3, 2)):
        cut = replace(case, micro_batches=M)
        runs = [emulation.pipedream(cut, batches, K), emulation.pipedream(cut, batches, K, stash=False)]
        for trained in [*runs, emulation.two_buffered(cut, batches, K)] if M >= K else runs:
            for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
                torch.testing.assert_close(trained.state[name], expected.state[name], rtol=0, atol=1e-12)
            assert int(trained.state["2.num_batches_tracked"]) == 4


# ---- replicas ------------------------------------------------------------------------------------------------------


def elastic_recurrence(
    batches: list[Any], N: int, rule: str, staleness: int, period: int, alpha: float
) -> tuple[float, list[float]]:
    """z and x_i of the bowl (x w - y)^2 / 2 with plain SGD, by the rules; a round that is not complete moves only x."""
    z, x, begun = START[0], [START[0]] * N, [START[0]] * N
    for first in range(0, len(batches), N * period):
        part = batches[first : first + N * period]
        for n, (a, y) in enumerate(part):
            i = n % N
            x[i] -= RATE * (x[i] * float(a) - float(y)) * float(a)
        arrived = [i for i in range(N) if (period - 1) * N + i < len(part)]
        total = 0.0
        for i in arrived:
            if rule == "easgd":
                e = alpha * (x[i] - z)
                x[i] -= e
                total += e
            else:
                total += (x[i] - begun[i]) / N
                x[i] += alpha * (z - begun[i]) if staleness == 1 else 0.0
        if len(arrived) == N:
            z += total
            if rule == "avgpipe" and staleness == 0:
                x = [one + alpha * (z - one) for one in x]
            begun = list(x)
    return z, x


@pytest.mark.parametrize("count", [12, 13, 17])
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize(("rule", "staleness"), [("avgpipe", 0), ("avgpipe", 1), ("easgd", 0), ("easgd", 1)])
@pytest.mark.parametrize(("N", "alpha"), [(2, None), (3, None), (3, 0.2)])
def test_replicas_follow_the_rules(
    N: int, alpha: float | None, rule: str, staleness: int, period: int, count: int
) -> None:
    case = chain(1, optimizer=partial(torch.optim.SGD, lr=RATE))
    batches = points(count)
    got = emulation.elastic(case, batches, N, rule=rule, staleness=staleness, period=period, alpha=alpha)
    if alpha is None:
        alpha = 1 / N if rule == "avgpipe" else 0.9 / N
    z, x = elastic_recurrence(batches, N, rule, staleness, period, alpha)
    assert numbers(got.reference) == pytest.approx([z], abs=1e-12)
    assert [numbers(state)[0] for state in got.replicas] == pytest.approx(x, abs=1e-12)


@ALL
@pytest.mark.parametrize("staleness", [0, 1])
def test_one_replica_is_one_device(staleness: int, options: dict[str, Any]) -> None:
    case, batches = variant(options), token_batches(3, 9)
    averaged = emulation.elastic(case, batches, 1, staleness=staleness)
    expected = emulation.one_device(case, batches)
    assert averaged.losses == pytest.approx(expected.losses, abs=1e-11)
    for state in (averaged.reference, *averaged.replicas):
        assert_same_state(state, expected.state, 1e-11)


def test_without_elasticity_replicas_are_strangers() -> None:
    case, batches = language(optimizer=adamw, lr_scheduler=halved), token_batches(6, 9)
    averaged = emulation.elastic(case, batches, 2, alpha=0.0)
    alone = [emulation.one_device(case, batches[i::2]) for i in range(2)]
    assert averaged.losses[0::2] == alone[0].losses
    for state, expected in zip(averaged.replicas, alone):
        assert_same_state(state, expected.state, 0)
    mean = {n: (alone[0].state[n] + alone[1].state[n]) / 2 for n in averaged.reference}
    assert_same_state(averaged.reference, mean, 1e-12)


def test_buffers_of_the_reference_are_means() -> None:
    averaged = emulation.elastic(images(), image_batches(5), 2)
    for name in ("1.running_mean", "1.running_var"):
        values = [state[name] for state in averaged.replicas]
        torch.testing.assert_close(averaged.reference[name], (values[0] + values[1]) / 2, rtol=1e-12, atol=0)
    assert [int(state["1.num_batches_tracked"]) for state in averaged.replicas] == [3, 2]
    assert int(averaged.reference["1.num_batches_tracked"]) == 3
