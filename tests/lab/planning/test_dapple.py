from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import partition
from avgpipe.planning.profile import Profile
from avgpipe_lab.planning.dapple import Span, append_first, fresh_first, latency_s, pivot, scatter_first
from tests.planning import chains

FAST, SLOW = 20.0, 1.0
Placed = list[
    tuple[int, int, tuple[int, ...]]
]  # first layer, the one after the last, devices of each machine


def one_by_one(policy: str, free: tuple[int, ...], size: int, count: int) -> tuple[int, ...]:
    """A device at a time, always the one that the policy likes best."""
    taken = [0] * len(free)
    for _ in range(count):
        usable = [m for m in range(len(free)) if taken[m] < free[m]]
        if policy == "scatter":
            best = max(usable, key=lambda m: (free[m] - taken[m], -m))
        else:
            fresh = {m: free[m] == size for m in usable}
            begun = [m for m in usable if taken[m]]
            wanted = [m for m in usable if fresh[m] == (policy == "fresh")]
            best = min(begun or wanted or usable)
        taken[best] += 1
    return tuple(taken)


def every(p: Profile, machines: int, devices: int) -> list[Placed]:
    found = []
    for blocks, replicas in chains.plans(len(p.layers), machines * devices):
        for policies in itertools.product(("fresh", "append", "scatter"), repeat=len(blocks)):
            free = (devices,) * machines
            placed: Placed = []
            for (a, b), count, policy in zip(blocks, replicas, policies):
                taken = one_by_one(policy, free, devices, count)
                placed.append((a, b, taken))
                free = tuple(f - t for f, t in zip(free, taken))
            if placed not in found:
                found.append(placed)
    return found


def spans(p: Profile, placed: Placed) -> list[tuple[float, float, float]]:
    found: list[tuple[float, float, float]] = []
    for k, (first, last, taken) in enumerate(placed):
        if k:
            before = placed[k - 1][2]
            used = [m for m, (a, b) in enumerate(zip(before, taken)) if a or b]
            crosses = len(used) > 1
            if crosses:
                lanes = min(sum(n > 0 for n in before), sum(n > 0 for n in taken))
            else:
                lanes = min(sum(before), sum(taken))
            seconds = chains.crossing(p, first) / lanes / (SLOW if crosses else FAST)
            found.append((seconds, seconds, 0.0))
        m = sum(taken)
        speed = SLOW if sum(n > 0 for n in taken) > 1 else FAST
        forward_s = sum(row.forward_s[0] for row in p.layers[first:last]) / m
        backward_s = sum(row.backward_s[0] for row in p.layers[first:last]) / m
        found.append((forward_s, backward_s, 2 * (m - 1) * chains.weights(p, first, last) / (m * speed)))
    return found


def slow_latency_s(rows: list[tuple[float, float, float]], micro_batches: int) -> float:
    """The formula of algorithms.md, word by word."""
    forward, backward, reduce = zip(*rows)
    steady = [(micro_batches - 1) * (f + b) for f, b in zip(forward, backward)]
    q = len(rows) - 1
    for s in range(len(rows) - 2, -1, -1):
        if steady[s] > steady[q] + sum(forward[a] + backward[a] for a in range(s + 1, q)):
            q = s
    ends = [reduce[s] + sum(backward[a] for a in range(s, q + 1)) for s in range(q + 1)]
    ends += [reduce[s] - sum(backward[a] for a in range(q, s + 1)) for s in range(q + 1, len(rows))]
    return sum(forward[: q + 1]) + steady[q] + max(ends)


def largest(p: Profile, placed: Placed, micro_batches: int) -> float:
    replicas = tuple(sum(taken) for _, _, taken in placed)
    found = []
    for k, (first, last, _) in enumerate(placed):
        own = math.ceil(micro_batches / replicas[k])
        flight = min(own, 1 + math.ceil(chains.behind(replicas, k) / replicas[k]))
        found.append(
            2 * chains.weights(p, first, last)
            + chains.optimizer(p, first, last)
            + flight * chains.held(p, first, last)
        )
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "devices"), [(2, 2), (1, 4), (1, 3), (4, 1)])
def test_no_plan_has_a_shorter_latency(machines: int, devices: int) -> None:
    for seed in range(12 if machines == 2 else 30):
        p = chains.random_profile(seed, most_layers=5 if machines == 2 else 10)
        if machines == 4:
            levels, plans = [(1, FAST), (4, SLOW)], every(p, 1, 4)
            plans = [[(a, b, _first_free(x, k, plan)) for k, (a, b, x) in enumerate(plan)] for plan in plans]
        else:
            levels, plans = [(devices, FAST), (machines, SLOW)], every(p, machines, devices)
        found = partition(p, method="dapple", micro_batches=3, levels=levels)
        best = min(slow_latency_s(spans(p, plan), 3) for plan in plans)
        assert found.value == pytest.approx(best, rel=1e-9, abs=1e-12), seed


def _first_free(taken: tuple[int, ...], k: int, plan: Placed) -> tuple[int, ...]:
    """So many of four machines with one device each, behind those of the stages before."""
    begin = sum(x[0] for _, _, x in plan[:k])
    return tuple(int(begin <= m < begin + taken[0]) for m in range(4))


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.floats(0.3, 2))
def test_none_that_fits_into_memory_has(seed: int, share: float) -> None:
    p = chains.random_profile(seed, most_layers=6)
    plans = every(p, 1, 4)
    least = min(largest(p, plan, 3) for plan in plans)
    limit = share * least + 1e-6
    if abs(limit - least) < 1e-4 * least:
        return
    options = {"method": "dapple", "micro_batches": 3, "levels": [(4, FAST)], "memory_limit_bytes": limit}
    fitting = [plan for plan in plans if largest(p, plan, 3) <= limit]
    if not fitting:
        chains.assert_refused(p, options, limit, least)
        return
    found = partition(p, **options)
    best = min(slow_latency_s(spans(p, plan), 3) for plan in fitting)
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert max(found.memory_bytes) <= limit * (1 + 1e-9)


def test_as_many_stages_are_made_as_are_asked_for() -> None:
    p = chains.random_profile(11)
    for stages in range(1, min(4, len(p.layers)) + 1):
        assert partition(p, stages, method="dapple", levels=[(2, FAST), (2, SLOW)]).stages == stages


def test_local_search_comes_close_to_the_best_of_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = []
    for seed in range(40):
        p = chains.random_profile(seed)
        options = {"method": "dapple", "micro_batches": 4, "levels": [(2, FAST), (2, SLOW)]}
        best = partition(p, **options)
        with monkeypatch.context() as patched:
            patched.setattr("avgpipe_lab.planning.dapple.MOST_PLANS", 0)
            found = partition(p, **options)
        assert "local search" in found.notes[-1]
        ratios.append(found.value / best.value if best.value else 1.0)
    assert min(ratios) >= 1 - 1e-9
    assert sorted(ratios)[int(0.85 * len(ratios))] == pytest.approx(1)
    assert max(ratios) < 1.4


@pytest.mark.parametrize(
    ("policy", "free", "count", "taken"),
    [
        (fresh_first, (1, 4, 4), 3, (0, 3, 0)),
        (fresh_first, (1, 4, 4), 9, (1, 4, 4)),
        (fresh_first, (3, 2, 4), 5, (1, 0, 4)),
        (append_first, (1, 4, 4), 3, (1, 2, 0)),
        (append_first, (4, 2, 3), 6, (1, 2, 3)),
        (scatter_first, (4, 4, 4), 3, (1, 1, 1)),
        (scatter_first, (1, 4, 4), 5, (0, 3, 2)),
        (scatter_first, (1, 4, 4), 9, (1, 4, 4)),
    ],
)
def test_policies_choose_devices(policy: object, free: object, count: int, taken: object) -> None:
    assert policy(free, 4, count) == taken


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_policies_choose_as_one_device_at_a_time(free: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, sum(free)))
    for name, policy in (("fresh", fresh_first), ("append", append_first), ("scatter", scatter_first)):
        assert policy(tuple(free), 4, count) == one_by_one(name, tuple(free), 4, count)


def test_latency_of_equal_stages_is_that_of_1f1b() -> None:
    stages = [Span(1.0, 2.0)] * 4
    assert latency_s(stages, 8) == (8 + 4 - 1) * 3.0
    assert pivot(stages, 8) == 3


def test_the_pivot_is_the_stage_without_bubbles() -> None:
    assert pivot([Span(1.0, 1.0), Span(5.0, 5.0), Span(1.0, 1.0)], 8) == 1
    # T_w = 1 + 5; T_s = 7 x 10; T_e: the first stage's backward follows the pivot's.
    assert latency_s([Span(1.0, 1.0), Span(5.0, 5.0), Span(1.0, 1.0)], 8) == 6 + 70 + 6
    assert latency_s([Span(1.0, 1.0), Span(5.0, 5.0), Span(1.0, 1.0, 20.0)], 8) == 6 + 70 + (20 - 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, r"micro_batches=0: must be an int of at least 1"),
        ({"levels": [(2, 1.0)] * 3}, r"levels has 3"),
        ({"stages": 4}, r"stages=4: 3 layers"),
        ({"stages": 3, "workers": 2}, r"workers=2: 3 stages need"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    p = chains.profile(chains.layer(), chains.layer(), chains.layer())
    with pytest.raises(ValueError, match=message):
        partition(p, method="dapple", **options)
