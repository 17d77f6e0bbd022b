"""Steps and channels: what is sent is expected, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from avgpipe import Plan
from avgpipe.links.link import Channel, Message
from avgpipe.model.parts import skips_of
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.route import Route, channels_into
from tests.runtime.test_skips import U_NET, plan_of


def sent_by(route: Route, M: int) -> set[Channel]:
    """What a lane sends for batches of up to M micro-batches, from its steps."""
    placement, replica, stage, i = route.placement, route.replica, route.stage, route.pipeline
    last = placement.stages - 1
    to: list[tuple[str, int]] = []
    for m in range(M):
        if placement.replica_for(stage, m) == replica:
            to += [("F", placement.replica_for(stage + 1, m))] if stage < last else []
            to += [("B", placement.replica_for(stage - 1, m))] if stage > 0 else []
    to += [("A", peer) for peer in route.peers]
    to += [("T", other) for k in route.shared for other in placement.receivers_of(replica, k)]
    if route.norm and stage < last:
        to += [("C", other) for other in placement.receivers_of(replica, stage + 1)]
    if route.norm and stage > 0:
        to += [("N", other) for other in placement.receivers_of(replica, stage - 1)]
    to += [("L", other) for other in (*route.loss_receivers, *route.result_receivers)]
    return {Channel(Message(kind), i, replica, other) for kind, other in to}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 3), st.booleans(), st.data())
def test_receivers_expect_exactly_what_senders_send(
    replication: list[int], N: int, norm: bool, data: Any
) -> None:
    K = len(replication)
    pairs = data.draw(st.sets(st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)), max_size=4))
    shared: dict[int, set[int]] = {}
    for a, b in pairs:
        if a != b:
            shared.setdefault(a, set()).add(b)
            shared.setdefault(b, set()).add(a)
    ranks = sum(replication)
    plan = Plan(
        stages=K,
        schedule="all-forward-all-backward",
        micro_batches=6,
        pipelines=N,
        batch="per-pipeline",
        replication=replication,
    )
    placement = Placement.of(plan, ranks)
    routes = {
        (replica, i): Route(placement, replica, i, tuple(sorted(shared.get(stage, ()))), norm)
        for replica, (stage, _, _) in enumerate(placement.replicas)
        for i in range(N)
    }
    into = [channels_into(r, placement, [routes[r, i] for i in range(N)]) for r in range(ranks)]
    found = [channel for channels in into for channel in channels]
    assert len(set(found)) == len(found)
    first = [placement.replicas_of(k)[0] for k in range(K)]
    expected = set().union(*(sent_by(route, 6) for route in routes.values()))
    expected |= {Channel("E", 0, a, b) for a, b in pairwise(first)}
    expected |= {Channel("R", 0, first[-1], r) for r in range(ranks) if r != first[-1]}
    assert set(found) == expected
    assert all(channel.target == r for r, channels in enumerate(into) for channel in channels)


def test_workers_with_several_stages_exchange_nothing_with_themselves() -> None:
    placement = Placement.of(Plan(stages=4, schedule="interleaved-1f1b", micro_batches=2), 2)
    assert placement.workers == ((0, 2), (1, 3))
    into = channels_into(0, placement, [Route(placement, n, 0) for n in (0, 2)])
    assert set(into) == {
        *(Channel("B", 0, 1, 0), Channel("F", 0, 1, 2), Channel("B", 0, 3, 2)),
        *(Channel("E", 0, 1, 2), Channel("R", 0, 3, 0)),
    }


def test_channels_are_those_of_the_stages_and_replicas_that_skips_join() -> None:
    placement = Placement.of(plan_of(4, 2, replication=[1, 1, 2, 2]), 6)  # replicas 0, 1, 2 and 3, 4 and 5
    found = skips_of(U_NET, [0, 2, 4, 6, 8])
    routes = [
        Route(placement, replica, 0, skips=found[stage])
        for replica, (stage, _, _) in enumerate(placement.replicas)
    ]
    into = [channels_into(n, placement, [routes[n]]) for n in range(6)]
    assert into[4] == [
        *(Channel("F", 0, 2, 4), Channel("X", 0, 0, 4), Channel("X", 0, 1, 4)),
        Channel("A", 0, 5, 4),
        *(Channel("E", 0, 2, 4), Channel("E", 0, 0, 4), Channel("E", 0, 1, 4)),
    ]
    skipping = {channel for channels in into for channel in channels if channel.kind in "XY"}
    assert skipping == {
        *(Channel("X", 0, a, b) for a in (0, 1) for b in (4, 5)),
        *(Channel("Y", 0, b, a) for a in (0, 1) for b in (4, 5)),
    }
