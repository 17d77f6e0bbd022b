"""The emulations follow recurrences in plain numbers; `test_semantics.py` compares the rest with the runtime."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.cases import language_model, momentum, token_batches
from tests.systems import emulation
from tests.systems.emulation import Case

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
STAGES = pytest.mark.parametrize("K", [1, 3])


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


@pytest.mark.parametrize("K", [2, 4])
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


@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("K", [2, 4])
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


# ---- a model -------------------------------------------------------------------------------------------------------

LOSS = nn.CrossEntropyLoss()


def assert_tied_copies_are_one(trained: Any) -> None:
    embedding, decoder = trained.stages[0]["0.weight"], trained.stages[-1]["6.weight"]
    assert torch.equal(embedding, decoder)


@pytest.mark.parametrize("M", [1, 3])
def test_pipelines_differ_where_they_must(M: int) -> None:
    """A comparison with the runtime must tell one from another. Embedding and decoder are tied."""
    case, batches = (
        Case(language_model, LOSS, momentum, micro_batches=M, clip_grad_norm=0.3),
        token_batches(8, 9),
    )
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


@pytest.mark.parametrize(("count", "period"), [(12, 1), (17, 2)])
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
