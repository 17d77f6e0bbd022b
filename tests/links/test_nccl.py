"""The link for a GPU each, without GPUs: over gloo, and with communicators that keep account of streams."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from avgpipe import Plan
from avgpipe import device as streams
from avgpipe.links import nccl
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Channel, Key, Mailbox, Message
from avgpipe.links.nccl import (
    Edge,
    NcclLink,
    NcclTransport,
    connect,
    edges_of,
    end_communicators,
    shares_of,
)
from avgpipe.links.transport import Endpoint
from avgpipe.ranks.world import meet
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.route import Route, channels_into
from tests.happens_before.clocks import Account, Operation, Work
from tests.links.ends import BACK, CHANNELS, CPU
from tests.patience import limit
from tests.runner import run

SENT = 24
LOSS, RESULT, UPDATES = (
    Channel(kind, 0, 0, 1) for kind in (Message.LOSS, Message.RESULT, Message.REFERENCE_UPDATE)
)
THERE = [*CHANNELS, LOSS, RESULT]


def value(n: int) -> Any:
    if n % 5 == 0:  # what travels as it is
        return [torch.full((2, 3), float(n), requires_grad=n % 2 == 0)]
    size = 1 + n % 3
    return [torch.full((size, 2), float(n), requires_grad=n % 2 == 0), None, f"text {n % 4}", torch.tensor(n)]


def gloo_pair(store: Any, end: int, timeout_s: float) -> Any:
    """In place of a communicator of NCCL."""
    return dist.ProcessGroupGloo(store, end, 2, timedelta(seconds=timeout_s))


def exchange(both_ways: bool) -> list[Any]:
    """Both ranks send in all their channels, in an order of their own, before they take anything."""
    world = meet(60)
    me, peer = world.rank, 1 - world.rank
    mailbox = Mailbox()
    into = [BACK, THERE][me]
    edges = [Edge(0, 1), Edge(1, 0)] if both_ways else [Edge(0, 1)]
    store = world.store()

    def make(edge: Any, end: int) -> Any:
        return gloo_pair(dist.PrefixStore(str(edge), store), end, 60)

    groups = connect(edges, me, make, CPU)
    control = partial(GroupLink, world.group, peer, partial(world.lost, peer))
    end = Endpoint(mailbox, CPU, into, [THERE, BACK][me])
    out, back = ({0: groups[edge]} if edge in groups else {} for edge in (Edge(me, peer), Edge(peer, me)))
    link = NcclLink(control, out, back, end)
    kinds = [channel.kind for channel in [BACK, THERE][peer]]
    for n in range(SENT):
        link.send(Key(Message(kinds[n % len(kinds)]), 0, me, peer, n, 0), value(n))
    kinds = [channel.kind for channel in into]
    keys = [Key(Message(kinds[n % len(kinds)]), 0, peer, me, n, 0) for n in range(SENT)]
    assert mailbox.wait_until(lambda: all(key in mailbox for key in keys), limit(60))
    got = [mailbox.take(key) for key in reversed(keys)]  # taken in another order than sent
    world.barrier()
    link.close(10)
    return [[x.detach().clone(), x.requires_grad, *map(str, rest)] for x, *rest in reversed(got)]


@pytest.mark.ranks
@pytest.mark.parametrize("both_ways", [True, False])
def test_messages_of_all_channels_arrive_in_any_order_of_taking(both_ways: bool) -> None:
    for rank in run(2, exchange, both_ways=both_ways):
        assert len(rank) == SENT
        for n, (first, wants, *rest) in enumerate(rank):
            expected, *others = value(n)
            assert torch.equal(first, expected.detach())
            assert wants == expected.requires_grad
            assert rest == [str(x) for x in others]


# ---- what waits for what -----------------------------------------------------------------------------------------


class Communicator:
    """One end of a communicator; its works have a stream, as NCCL's."""

    def __init__(self, fake: Account) -> None:
        self.fake, self.sent, self.works = fake, list[torch.Tensor](), list[Any]()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent += tensors
        return self._work()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._work()

    def _work(self) -> Any:
        self.works.append(Work(self.fake))
        self.works[-1].is_completed = lambda: True
        return self.works[-1]


class Control:
    """A control link that keeps what is sent."""

    def __init__(self, end: Endpoint) -> None:
        self.end, self.sent = end, list[tuple[Key, Any]]()

    def send(self, key: Key, value: Any) -> None:
        self.sent.append((key, value))


class Ends:
    """Both ends of a link from rank 0 to rank 1."""

    def __init__(self, fake: Account) -> None:
        self.groups = [Communicator(fake) for _ in range(2)]
        self.box = Mailbox()
        self.there = [*CHANNELS, UPDATES]
        self.sender = NcclLink(Control, {0: self.groups[0]}, {}, Endpoint(Mailbox(), CPU, [], self.there))  # type: ignore[arg-type]
        self.receiver = NcclLink(Control, {}, {0: self.groups[1]}, Endpoint(self.box, CPU, self.there, []))  # type: ignore[arg-type]

    def send(self, kind: str, value: Any) -> Key:
        key = Key(Message(kind), 0, 0, 1, 0, 0)
        self.sender.send(key, value)
        control: Any = self.sender._control
        self.receiver._intake.deliver(*control.sent.pop())
        return key


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Account:
    fake = Account()
    monkeypatch.setattr(streams, "backend", fake)
    return fake


def test_activations_are_sent_from_where_they_are(fake: Account) -> None:
    ends, x = Ends(fake), torch.randn(3, 5)
    for sent in (x, [x]):
        ends.send("F", sent)
        assert ends.groups[0].sent[-1].data_ptr() == x.data_ptr()
        assert ends.groups[0].sent[-1].numel() == 60  # bytes: no padding


def test_what_may_be_written_again_is_copied_first(fake: Account) -> None:
    """On the lane's stream, which writes it again later; and what is no block of memory is gathered so too."""
    ends, x = Ends(fake), torch.ones(4, 6)
    for kind, sent in (("V", [x]), ("F", x.T), ("F", [x, x]), ("E", x)):
        ends.send(kind, sent)
        given = {x.data_ptr() + 4 * n for n in range(x.numel())}
        assert ends.groups[0].sent[-1].data_ptr() not in given


def test_a_receive_waits_for_nothing_that_the_caller_holds(fake: Account) -> None:
    ends, lane = Ends(fake), fake.Stream()
    key = ends.send("F", torch.ones(3))
    held: Operation = fake.current_stream().operate()
    ends.box.collect()
    ends.receiver._collect()
    (work,) = ends.groups[1].works
    assert not work.stream.follows(held)
    with lane:
        ends.box.take(key)
    assert lane.follows(work.operation)
    assert not lane.follows(held)


def test_the_allocator_knows_the_readers_of_what_has_arrived(
    fake: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is of the stream on which the receive was posted."""
    told: list[tuple[int, Any]] = []
    monkeypatch.setattr(fake, "holds", lambda tensor: True)
    monkeypatch.setattr(
        fake, "record_stream", lambda tensor, stream: told.append((tensor.data_ptr(), stream))
    )
    ends, lane = Ends(fake), fake.Stream()
    key = ends.send("F", torch.ones(3))
    ends.box.collect()
    ends.receiver._collect()
    with lane:
        arrived = ends.box.take(key)
    assert told == [(arrived.data_ptr(), lane)]


class Ended:
    """A group; the other side never meets what it has posted, if it is ``stuck``."""

    def __init__(self, stuck: bool) -> None:
        self.calls: list[str] = []
        self.works: list[Any] = [type("", (), {"is_completed": lambda _: not stuck})()]

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def abort(self) -> None:
        self.calls.append("abort")


def test_communicators_end_in_peace_or_by_force() -> None:
    groups = [Ended(False), Ended(True), Ended(False)]
    end_communicators([(g, g.shutdown, g.works) for g in groups], 0.05)
    assert [g.calls for g in groups] == [["shutdown"], ["abort"], ["shutdown"]]


# ---- how many ----------------------------------------------------------------------------------------------------


def into(plan: Plan) -> list[dict[Channel, int]]:
    """For each rank, the channels that end there, and the ranks where they begin."""
    placement = Placement.of(plan, plan.workers)
    found = []
    for rank in range(placement.ranks):
        routes = [
            Route(placement, n, i, norm=True)
            for n in placement.held_by(rank)
            for i in placement.pipelines_of(n)
        ]
        channels = channels_into(rank, placement, routes)
        found.append({channel: placement.rank_of(channel.source) for channel in channels})
    return found


class Store:
    """A store that all ranks see. ``asked``: how often, by rank."""

    def __init__(self, size: int, names: Iterable[Any]) -> None:
        self.asked = [0] * size
        self._there = {name: threading.Event() for name in names}

    def set(self, rank: int, name: Any) -> None:
        self.asked[rank] += 1
        self._there[name].set()

    def get(self, rank: int, name: Any) -> None:
        self.asked[rank] += 1
        assert self._there[name].wait(20), f"rank {rank} waits for {name} for ever"


class Meeting:
    """One end of a communicator of NCCL: the first message connects, for which both ends must have come, 0 with what
    it has put into the store.
    """

    def __init__(self, store: Store, met: dict[Any, threading.Barrier], edge: Any, end: int) -> None:
        self._store, self._met, self._edge, self._rank = store, met[edge], edge, edge[end]

    def send(self, *_: Any) -> Any:
        self._store.set(self._rank, self._edge)
        return self._connect()

    def recv(self, *_: Any) -> Any:
        self._store.get(self._rank, self._edge)
        return self._connect()

    def _connect(self) -> Any:
        self._met.wait(20)
        return self

    def wait(self) -> None:
        pass


STARTS = [
    # in all, of a rank at most, turns in which they connect
    (Plan(stages=64), 126, 4, 4),
    (Plan(stages=8, pipelines=8, spread=True), 560, 18, 18),
    (Plan(stages=2, replication=[2, 2], micro_batches=2), 4, 2, 2),
]


@pytest.mark.parametrize(("plan", "count", "most", "turns"), STARTS, ids=["chain", "spread", "replicas"])
def test_a_rank_connects_to_ranks_that_it_sends_much(plan: Plan, count: int, most: int, turns: int) -> None:
    """A store is asked once for each communicator of a rank, there is no barrier, and none waits for ever."""
    edges = edges_of(into(plan))
    assert len(edges) == len(set(edges)) == count
    own = [[edge for edge in edges if rank in edge[:2]] for rank in range(plan.workers)]
    assert max(map(len, own)) == most
    # When each connects at the earliest: after what both of its ends connect before.
    done = [0] * plan.workers
    for a, b, _ in edges:
        done[a] = done[b] = max(done[a], done[b]) + 1
    assert max(done) == turns
    store, met = Store(plan.workers, edges), {edge: threading.Barrier(2) for edge in edges}
    made: list[Any] = [None] * plan.workers

    def start(rank: int) -> None:
        made[rank] = connect(own[rank], rank, partial(Meeting, store, met), CPU)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(plan.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
    assert [list(groups) for groups in made] == own
    assert store.asked == [len(edges) for edges in own]


def test_losses_and_norms_need_no_communicators() -> None:
    """They go to all who have no part in a pipeline, or from stage to stage the other way round."""
    for plan in (plan for plan, *_ in STARTS):
        kinds = {channel.kind for channels in into(plan) for channel in channels}
        assert Message.RESULT in kinds
        small = [{c: n for c, n in of.items() if c.kind not in nccl._LARGE} for of in into(plan)]
        assert any(small)
        assert edges_of(small) == []


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        (["a", "b", "b"], None),
        (["a", "b", None], None),
        (["a", "a", "b"], "a GPU of its own"),
        ([None, "a", "b"], "a GPU of its own"),
    ],
)
def test_a_pair_has_nccl_whatever_others_have(offers: Sequence[str | None], why: str | None) -> None:
    world: Any = type("", (), {"rank": 1})()
    transport = NcclTransport(world, [], CPU, {})
    if why is None:
        transport.open(0, offers)
        return
    with pytest.raises(ValueError, match=why):
        transport.open(0, offers)


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        (Plan(stages=4), 1),
        (Plan(stages=2, pipelines=4, batch="per-pipeline"), 4),
        (Plan(stages=4, pipelines=4, batch="per-pipeline"), 4),
        (Plan(stages=4, pipelines=8, batch="per-pipeline"), 4),
        (Plan(stages=8, pipelines=8, spread=True), 1),
    ],
)
def test_pipelines_share_communicators_where_queues_would_not_suffice(plan: Plan, shares: int) -> None:
    """Not the lanes of a middle stage, whose worker has four neighbours to send to or receive from."""
    channels = into(plan)
    assert shares_of(channels) == shares
    ends = [edge[:2] for edge in edges_of(channels)]
    assert max(sum(rank in pair for pair in ends) for rank in range(plan.workers)) <= max(
        16, 18 * plan.spread
    )


def test_a_communicator_outlasts_our_limit_and_has_a_stream_that_is_no_lane_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    made: Any = type("ProcessGroupNCCL", (), {"Options": Options})
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", made, raising=False)
    options = nccl.options(60)
    assert options.is_high_priority_stream
    assert options._timeout > timedelta(seconds=60)
