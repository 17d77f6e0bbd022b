"""The rules, step by step, against an independent float64 emulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from avgpipe.rules import RULES, Rule
from tests.elastic.cases import Crew, assert_bitwise, assert_follows, set_gradients, weights
from tests.elastic.emulation import AdamW, Emulation, Momentum, Nesterov


@pytest.mark.grid(24)
@pytest.mark.parametrize("outer", [None, Nesterov], ids=["plain", "outer"])
@pytest.mark.parametrize("inner", [Momentum, AdamW])
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("staleness", [0, 1, "asynchronous"])
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
def test_every_step_follows_the_rule(rule, staleness, period, inner, outer):
    for n in (1, 2, 3, 4):
        crew = Crew(n, inner, rule=rule, staleness=staleness, period=period, outer=outer and outer.torch)
        emulated = Emulation(n, rule, staleness, period, None, inner, outer)
        for _ in range(7):
            crew.step()
            emulated.step()
            # The order of sums differs from the emulation's, and AdamW divides by small numbers.
            assert_follows(crew, emulated, 1e-11)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("staleness", [0, 1])
def test_alpha_is_as_given(alpha, staleness):
    for n in (1, 3):
        crew = Crew(n, alpha=alpha, staleness=staleness)
        emulated = Emulation(n, staleness=staleness, alpha=alpha)
        for _ in range(5):
            crew.step()
            emulated.step()
            assert_follows(crew, emulated)


def test_one_replica_is_its_reference_bit_for_bit():
    crew = Crew(1, AdamW, dtype=torch.float32)
    # no exchange at all
    alone = Crew(1, AdamW, dtype=torch.float32, fused=False, rule="easgd", alpha=0.0)
    for _ in range(5):
        crew.step()
        alone.step()
        assert_bitwise([crew.reference.parameters], [crew.x[0]])
        assert_bitwise([crew.x[0]], [alone.x[0]])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("period", [1, 2])
def test_the_reference_does_not_lag_behind_the_mean(staleness, period):
    """mean_i(x_i) - z decays as (1-a)^t, whatever the updates are."""
    n, a = 3, 0.25
    crew = Crew(n, alpha=a, staleness=staleness, period=period)
    with torch.no_grad():
        for x in crew.x:
            for p in x:
                p += 1.0  # the replicas start away from z
    for t in range(1, 13):
        for _ in range(period):
            crew.step()
        for k, z in enumerate(crew.reference.parameters):
            gap = sum(x[k].detach() for x in crew.x) / n - z
            np.testing.assert_allclose(gap.numpy(), (1 - a) ** t, rtol=1e-12)


ORDERS = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]


@pytest.mark.parametrize("outer", [None, Nesterov], ids=["plain", "outer"])
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_arrival_changes_no_bit(rule, staleness, period, outer, dtype):
    ends = []
    for shift in range(len(ORDERS)):
        crew = Crew(
            4, dtype=dtype, rule=rule, staleness=staleness, period=period, outer=outer and outer.torch
        )
        for t in range(6):
            crew.step(ORDERS[(t + shift) % len(ORDERS)] if shift else ORDERS[0])
        ends.append(crew.state())
    assert_bitwise(ends[0], ends[1])
    assert_bitwise(ends[0], ends[2])


def test_replicas_may_run_ahead_inside_a_period():
    """Staleness 1: the next period's local steps need no other replica; only its last one does."""
    crew, turns = (Crew(2, staleness=1, period=3) for _ in range(2))
    for t in range(5):  # a whole period, and two steps of the next
        crew.step_one(0, t)
    assert not crew.opts[0].ready
    for t in range(6):
        crew.step_one(1, t)
        if t == 2:
            assert crew.opts[0].ready
    crew.step_one(0, 5)
    for _ in range(6):
        turns.step()
    assert_bitwise(crew.state(), turns.state())


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("inner", [Momentum, AdamW])
@pytest.mark.parametrize(
    ("rule", "staleness"),  # from_step, from_force, force_after_step, joins, averages
    [
        (
            Rule(
                from_step=0.5,
                from_force=0.25,
                force_after_step=False,
                joins=False,
                averages=True,
                beta=0.6,
                alone=0,
            ),
            1,
        ),
        (
            Rule(
                from_step=0.0,
                from_force=0.5,
                force_after_step=False,
                joins=False,
                averages=False,
                beta=0.6,
                alone=0,
            ),
            0,
        ),
        (
            Rule(
                from_step=2.0,
                from_force=0.0,
                force_after_step=True,
                joins=True,
                averages=True,
                beta=0.6,
                alone=0,
            ),
            0,
        ),
    ],
)
def test_another_linear_rule_is_another_row(monkeypatch, rule, staleness, inner, fused):
    monkeypatch.setitem(RULES, "another", rule)
    n, a = 3, 0.2
    crew = Crew(n, inner, rule="another", staleness=staleness, fused=fused)
    z, xs = [p.detach() for p in weights()], [weights() for _ in range(n)]
    opts = [inner.torch(x) for x in xs]
    for t in range(4):
        crew.step()
        updates = []
        for i, (x, opt) in enumerate(zip(xs, opts)):
            before = [p.detach().clone() for p in x]
            set_gradients(x, i, t)
            opt.step()
            steps = [p.detach() - b for p, b in zip(x, before)]
            seen = [p.detach().clone() if rule.force_after_step else b for p, b in zip(x, before)]
            forces = [0 * p if rule.joins else a * (p - v) for p, v in zip(seen, z)]
            updates.append([rule.from_step * d + rule.from_force * f for d, f in zip(steps, forces)])
            with torch.no_grad():
                for p, f in zip(x, forces):
                    p -= f
        z = [v + sum(us) / (n if rule.averages else 1) for v, us in zip(z, zip(*updates))]
        with torch.no_grad():
            for x in xs if rule.joins else ():
                for p, v in zip(x, z):
                    p += a * (v - p)
        for mine, theirs in [(crew.reference.parameters, z), *zip(crew.x, xs)]:
            for p, q in zip(mine, theirs, strict=True):
                torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-10)
