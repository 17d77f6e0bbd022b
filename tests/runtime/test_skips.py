"""Skip connections of traced models: where they go, and that what is computed stays the same."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

from avgpipe import Pipeline, Plan
from avgpipe.links import choose
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Key
from avgpipe.links.shared import SharedLink
from avgpipe.model.layers import layers_of
from avgpipe.model.model import Model
from avgpipe.model.parts import NO_SKIPS, SkipRoute, Skips, Values, extract_skips, insert_skips, skips_of
from avgpipe.runtime.scheduler import Scheduler
from tests.links.ends import LINKS
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    assert_same_training,
    language_model,
    momentum,
    train_on_one_device,
    unequal,
)
from tests.runtime.test_deadlock import Shuffled, any_queue
from tests.runtime.test_pipeline import Branching
from tests.systems import emulation

# ---- which way each value takes ----------------------------------------------------------------------------------


def chain(*rows: str) -> list[Values]:
    """From rows like "ab a": what a piece takes, and what of it it uses. Each gives what the next one takes."""
    cut = [(*row.split(), "", "")[:2] for row in rows]
    gives = [taken for taken, _ in cut[1:]] + [""]
    return [Values(tuple(t), tuple(g), frozenset(u)) for (t, u), g in zip(cut, gives)]


# Four steps down, four up: e, d, c and b come back in the pieces 7, 6, 5 and (at once) 4.
U_NET = chain("", "e e", "ed d", "edc c", "edcb b", "edcf cf", "edg dg", "eh eh")


def test_a_u_net_sends_each_skip_straight_to_its_other_side() -> None:
    assert skips_of(U_NET, range(9)) == [
        Skips((), ()),
        Skips((), (SkipRoute(7, (0,)),)),
        Skips((), (SkipRoute(6, (1,)),)),
        Skips((), (SkipRoute(5, (2,)),)),
        Skips((), ()),
        Skips((SkipRoute(3, (2,)),), ()),
        Skips((SkipRoute(2, (1,)),), ()),
        Skips((SkipRoute(1, (0,)),), ()),
    ]


def test_stages_of_several_pieces_hold_what_any_of_them_uses() -> None:
    assert skips_of(U_NET, [0, 2, 4, 6, 8]) == [
        Skips((), (SkipRoute(3, (0,)),)),  # e; its stage gives e and d
        Skips((), (SkipRoute(3, (1,)),)),  # d; the next stage uses c
        Skips((), ()),
        Skips((SkipRoute(0, (0,)), SkipRoute(1, (1,))), ()),
    ]
    assert skips_of(U_NET, [0, 4, 8]) == [NO_SKIPS] * 2
    assert skips_of(U_NET, [0, 8]) == [NO_SKIPS]


def test_a_value_that_several_stages_use_is_handed_on_by_each() -> None:
    hops = chain("", "ax x", "ax ax", "ax x", "ax x", "ax ax", "ax x", "ax ax")
    assert skips_of(hops, range(9)) == [
        Skips((), (SkipRoute(2, (0,)),)),
        NO_SKIPS,
        Skips((SkipRoute(0, (0,)),), (SkipRoute(5, (0,)),)),
        NO_SKIPS,
        NO_SKIPS,
        Skips((SkipRoute(2, (0,)),), (SkipRoute(7, (0,)),)),
        NO_SKIPS,
        Skips((SkipRoute(5, (0,)),), ()),
    ]


def test_values_with_one_way_share_a_message() -> None:
    both = chain("", "axb x", "axb x", "axb axb")
    assert skips_of(both, range(5)) == [
        Skips((), (SkipRoute(3, (0, 2)),)),
        NO_SKIPS,
        NO_SKIPS,
        Skips((SkipRoute(0, (0, 2)),), ()),
    ]


def test_a_chain_without_skips_has_none() -> None:
    assert skips_of(chain("", "a a", "b b", "cd cd"), range(5)) == [NO_SKIPS] * 4


PIECES = st.integers(2, 9).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(0, n - 2), st.sets(st.integers(1, n - 1), min_size=1)), min_size=1, max_size=8
    ).map(lambda values: (n, values))
)


@given(PIECES, st.data())
def test_whoever_uses_a_value_has_it_and_no_other_stage_does(
    made: tuple[int, list[tuple[int, set[int]]]], data: Any
) -> None:
    """Passes names along instead of values, where every value is made at one place and used at some later ones."""
    n, values = made
    born = {str(v): (at, {u for u in uses if u > at}) for v, (at, uses) in enumerate(values)}
    takes = [
        tuple(v for v, (at, uses) in born.items() if at < s and max(uses, default=-1) >= s) for s in range(n)
    ]
    pieces = [
        Values(takes[s], (*takes, ())[s + 1], frozenset(v for v in takes[s] if s in born[v][1]))
        for s in range(n)
    ]
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1))))
    bounds = [0, *cuts, n]
    found = skips_of(pieces, bounds)
    sent: dict[tuple[int, int], list[Any]] = {}
    given_on: tuple[Any, ...] = ()
    for k, (a, b) in enumerate(pairwise(bounds)):
        arrivals, departures = found[k]
        assert [r.stage for r in arrivals] == sorted({r.stage for r in arrivals})
        held = insert_skips(given_on, arrivals, [sent.pop((r.stage, k)) for r in arrivals])
        for name, value in zip(takes[a], held, strict=True):
            needed = any(name in piece.uses for piece in pieces[a:b])
            assert value == (name if needed else None)
        has = {v for v in held if v is not None} | {v for v, (at, _) in born.items() if a <= at < b}
        output = tuple(name if name in has else None for name in pieces[b - 1].gives)
        given_on, parts = extract_skips(output, departures)
        sent |= {(k, r.stage): values for r, values in zip(departures, parts, strict=True)}
        assert all(r.stage > k + 1 for r in departures)
    assert not sent


# ---- what is computed --------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Skips of several lengths: of activations, the input, a mask, a number, None, and a tuple whose second half gets
    no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.recur = nn.LSTM(8, 8, batch_first=True)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.down, self.middle, self.up = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.leave = nn.Linear(14, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, mask = x.size(0), x[:, :, 2:3] > 0
        entered = torch.tanh(self.enter(x))
        h, state = self.recur(entered)
        h, nothing = self.attend(h, h, h, need_weights=False)
        h = torch.tanh(self.down(h)) + 0.3 * entered
        h = torch.tanh(self.middle(h))
        h = torch.tanh(self.up(h)) * mask
        h = self.norm(h + entered)
        h = nn.functional.linear(h, self.weight, nothing) + state[0].transpose(0, 1)
        return self.leave(torch.cat([h, x], 2).view(samples, -1, 14)).mean(1)


BOUNDS = {2: [0, 3, 8], 3: [0, 2, 5, 8], 4: [0, 2, 4, 6, 8], 5: [0, 1, 2, 4, 6, 8], 6: [0, 1, 2, 3, 4, 6, 8]}
LOSS = nn.CrossEntropyLoss()


@cache
def model() -> nn.Module:
    torch.manual_seed(3)
    return Skipping().double()


@cache
def batches(count: int, samples: int = 7, last: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    sizes = [samples] * (count - 1) + [last]
    return [
        (
            torch.randn(n, 5, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


def plan_of(K: int, M: int, **options: Any) -> Plan:
    return Plan(stages=K, micro_batches=M, partition=BOUNDS[K][1:-1], **options)


def trained(plan: Plan, data: list[Any], optimizer: Any = momentum, **options: Any) -> Any:
    """Losses, final weights, an evaluation in the middle and at the end, and a prediction."""
    with Pipeline(model(), plan, **grouped(loss_fn=LOSS, optimizer=optimizer, timeout_s=20, **options)) as p:
        losses = [r.loss for r in p.train(data)]
        return losses, p.state_dict(), p.evaluate(data[:2]).loss, p.predict(data[0][0])


def compare(plan: Plan, **options: Any) -> None:
    data = batches(4)
    losses, state, evaluated, predicted = trained(plan, data, **options)
    expected = train_on_one_device(model(), data, LOSS, momentum, options.get("clip_grad_norm"))
    assert_same_training((losses, state), expected)
    whole = copy.deepcopy(model())
    whole.load_state_dict(expected[1])
    with torch.no_grad():
        torch.testing.assert_close(predicted, whole(data[0][0]), rtol=1e-10, atol=1e-10)
        means = [float(LOSS(whole(x), y)) for x, y in data[:2]]
    assert abs(evaluated - sum(means) / 2) < 1e-10


def ways(K: int) -> dict[tuple[int, int], list[str]]:
    whole = model()
    layers: list[Any] = layers_of(whole)
    cut = Model.cut(whole, layers, K, BOUNDS[K][1:-1])
    takes = [layers[n].values.takes for n in BOUNDS[K][:-1]]
    return {(r.stage, k): [takes[k][n] for n in r.places] for k in range(K) for r in cut.skips[k].arrivals}


def test_the_tracer_finds_the_users_of_each_tensor() -> None:
    state, nothing, mask, entered = "getitem_2", "getitem_4", "gt", "tanh"
    assert ways(2) == {}
    assert ways(3) == {(0, 2): ["x", "size", mask, state]}
    assert ways(5) == {(0, 3): [mask], (0, 4): ["x", "size"], (1, 4): [state], (2, 4): [nothing]}
    assert ways(6) == {
        (1, 3): [entered],
        (0, 4): [mask],
        (0, 5): ["x", "size"],
        (1, 5): [state],
        (2, 5): [nothing],
    }
    layers = language_model()
    assert Model.cut(layers, layers, 3, None).skips == [NO_SKIPS] * 3


def test_the_models_output_uses_what_it_holds() -> None:
    """``mul``, of which the last piece itself computes nothing."""
    layers = layers_of(Branching())
    assert layers[-1].values == Values(("mul", "add_3"), (), frozenset({"mul", "add_3"}))
    assert skips_of([layer.values for layer in layers], range(7)) == [
        Skips((), (SkipRoute(4, (0,)),)),
        Skips((), (SkipRoute(4, (1,)),)),  # its second use
        NO_SKIPS,
        NO_SKIPS,
        Skips((SkipRoute(0, (0,)), SkipRoute(1, (1,))), ()),
        NO_SKIPS,
    ]


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    "schedule", ["all-forward-all-backward", "1f1b", "advance-forward", "zero-bubble-h1"]
)
@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_equals_one_device(K: int, schedule: str) -> None:
    for M in (1, 3):
        compare(plan_of(K, M, schedule=schedule))


OTHERS: list[tuple[Plan, dict[str, Any]]] = [
    (plan_of(4, 3, schedule="interleaved-1f1b"), {}),
    (plan_of(6, 3, schedule="interleaved-1f1b", stages_per_worker=3), {}),
    (plan_of(4, 3, schedule="zero-bubble-v"), {}),
    (plan_of(4, 3, schedule="looped-bfs"), {}),
    (plan_of(4, 3, schedule="interleaved-zero-bubble"), {}),
    (plan_of(4, 5, schedule="dualpipe-v"), {}),
    (plan_of(3, 3, replication=[1, 2, 1]), {}),
    (plan_of(4, 3, replication=[2, 1, 3, 2]), {}),
    (plan_of(4, 3, recompute="always"), {}),
    (plan_of(4, 3, recompute="except-last"), {"clip_grad_norm": 0.05}),
]


@pytest.mark.parametrize(("plan", "options"), OTHERS, ids=lambda x: str(getattr(x, "schedule", x)))
def test_equals_one_device_on_other_workers(plan: Plan, options: dict[str, Any]) -> None:
    compare(plan, **options)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("options", [{}, {"replication": [1, 2, 1, 1]}], ids=str)
def test_several_pipelines_do_what_they_do_on_one_stage(options: dict[str, Any], spread: bool) -> None:
    data = batches(5)
    plan = plan_of(4, 3, pipelines=2, batch="per-pipeline", spread=spread, **options)
    losses, state, evaluated, predicted = trained(plan, data, adamw)
    whole = trained(Plan(stages=1, micro_batches=1, pipelines=2, batch="per-pipeline"), data, adamw)
    assert_same_training((losses, state), whole[:2])
    assert abs(evaluated - whole[2]) < 1e-10
    torch.testing.assert_close(predicted, whole[3], rtol=1e-10, atol=1e-10)


def emulated(plan: Plan, data: list[Any]) -> emulation.Trained:
    case = emulation.Case(
        layers=lambda: layers_of(copy.deepcopy(model())),
        loss_fn=LOSS,
        optimizer=momentum,
        bounds=BOUNDS,
        micro_batches=plan.micro_batches,
    )
    if plan.schedule == "pipedream-2bw":
        return emulation.two_buffered(case, data, plan.stages)
    return emulation.pipedream(case, data, plan.stages)


OVERLAPPING = [
    plan_of(3, 1, schedule="pipedream"),
    plan_of(5, 1, schedule="pipedream"),
    plan_of(4, 3, schedule="pipedream"),
    plan_of(3, 3, schedule="pipedream-2bw"),
    plan_of(4, 5, schedule="pipedream-2bw"),
]


@pytest.mark.parametrize("plan", OVERLAPPING, ids=lambda p: f"{p.schedule}-{p.stages}-{p.micro_batches}")
def test_overlapping_batches_equal_their_emulation(plan: Plan) -> None:
    data = batches(9)
    losses, state, _, _ = trained(plan, data)
    expected = emulated(plan, data)
    assert unequal(losses, expected.losses) < 1e-10
    names = {name.split(".graph.")[1]: value for name, value in expected.state.items()}
    assert names.keys() == state.keys()
    assert_same_state({name: state[name] for name in names}, names)


@pytest.mark.slow
def test_any_order_of_delivery_and_of_devices_ends_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "LocalLink", Shuffled)
    monkeypatch.setattr(Scheduler, "_most_urgent", any_queue)
    for seed, schedule in enumerate(
        ["1f1b", "advance-forward", "zero-bubble-h1", "interleaved-1f1b", "looped-bfs", "dualpipe-v"] * 2
    ):
        Shuffled.dice.seed(seed)
        compare(plan_of(4, 3, schedule=schedule))


# ---- what travels ------------------------------------------------------------------------------------------------


def test_errors_say_what_was_awaited() -> None:
    assert str(Key("X", 0, 0, 3, 7, 2)) == "the skipped activation of micro-batch 2 of batch 7"
    assert str(Key("Y", 0, 3, 0, 7, 2)) == "the skipped activation's gradient of micro-batch 2 of batch 7"


def tensor_bytes(value: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def spied(send: Any, log: list[tuple[str, int, int, int]]) -> Any:
    def noting(link: Any, key: Key, value: Any) -> None:
        log.append((key.kind, key.source, key.target, tensor_bytes(value)))
        send(link, key, value)

    return noting


class Long(nn.Module):
    """The first features, 40 wide, are wanted by the last layer alone; what lies between is 2 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second, self.third, self.fourth = (nn.Linear(2, 2) for _ in range(3))
        self.last = nn.Linear(42, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        narrow = self.fourth(self.third(self.second(wide[:, :2]).tanh()))
        return self.last(torch.cat([narrow, wide], 1))


class Crossing(nn.Module):
    """Two branches in turn: of four stages, the second gives the third nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)
        self.three, self.four, self.last = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one(x), self.two(x)
        return self.last(self.four(self.three(one)) * two)


def check_crossing(**options: Any) -> None:
    torch.manual_seed(0)
    crossing = Crossing().double()
    data = [(torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])) for _ in range(3)]
    expected = train_on_one_device(crossing, data, LOSS, momentum)
    plan = Plan(stages=4, micro_batches=2, partition=[1, 2, 3])
    with Pipeline(crossing, plan, **grouped(loss_fn=LOSS, optimizer=momentum, timeout_s=30, **options)) as p:
        assert_same_training(([r.loss for r in p.train(data)], p.state_dict()), expected)
        p.predict(data[0][0])


def test_a_stage_may_give_the_next_one_nothing() -> None:
    assert skips_of([layer.values for layer in layers_of(Crossing())], [0, 1, 2, 3, 5]) == [
        Skips((), (SkipRoute(2, (1,)),)),
        Skips((), (SkipRoute(3, (1,)),)),
        Skips((SkipRoute(0, (0,)),), ()),
        Skips((SkipRoute(1, (0,)),), ()),
    ]
    check_crossing()


def crossing_on_ranks() -> bool:
    for link in LINKS:
        check_crossing(link=link)
    return True


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stage_may_give_the_next_one_nothing_on_ranks() -> None:
    assert run(4, crossing_on_ranks, timeout_s=60) == [True] * 4


def on_ranks() -> list[tuple[str, int, int, int]]:
    """What this rank sends for one batch of 4 samples over each link; the same as on one device, too."""
    log: list[tuple[str, int, int, int]] = []
    for link in (SharedLink, GroupLink):
        link.send = spied(link.send, log)  # type: ignore[method-assign]
    torch.manual_seed(0)
    long = Long().double()
    data = [(torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))]
    expected = train_on_one_device(long, data, LOSS, momentum)
    for link in LINKS:
        plan = Plan(stages=4, micro_batches=1, partition=[1, 2, 3])
        with Pipeline(long, plan, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=30) as p:
            assert abs(next(iter(p.train(data))).loss - expected[0][0]) < 1e-10
            assert_same_state(p.state_dict(), expected[1])
            p.predict(data[0][0])
    return log


@pytest.mark.ranks
def test_stages_between_receive_nothing_of_a_skipped_tensor() -> None:
    logs = run(4, on_ranks, timeout_s=60)
    sent = [row for log in logs for row in log if row[0] in "FBXYE"]
    wide, narrow, number = 4 * 40 * 8, 4 * 2 * 8, 8
    one_link = [
        ("B", 1, 0, narrow + number),
        ("B", 2, 1, narrow + number),
        ("B", 3, 2, narrow + number),
        ("F", 0, 1, narrow),
        ("F", 1, 2, narrow),
        ("F", 2, 3, narrow),
        ("X", 0, 3, wide),
        ("Y", 3, 0, wide),
        *(("E", k, k + 1, narrow) for k in range(3)),
        ("E", 0, 3, wide),
    ]
    assert sorted(sent) == sorted(one_link * len(LINKS))
