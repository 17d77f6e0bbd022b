"""Who waits for the sum of replicas' gradients: on the CPU a thread, on CUDA the stream of the lane that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe import device as streams
from avgpipe.errors import PeerLost
from avgpipe.links.choose import Links
from avgpipe.links.link import Key, Mailbox
from avgpipe.links.nccl import nccl_joins
from avgpipe.ranks.world import World
from avgpipe.runtime import group_sum
from avgpipe.runtime.group_sum import GroupSum, SumGroup, sum_group
from avgpipe.runtime.streams import DeviceClock, LaneStream
from tests.happens_before.clocks import Account, HostWork, Work
from tests.patience import limit, wait_until
from tests.runner import run
from tests.runtime.cases import adamw, language_model, token_batches

CUDA = torch.device("cuda", 0)
KEY = Key("Z", 0, 0, 0, -1, -1)


class Summing:
    """Lanes whose sums are of ``kind``; their tensors are the host's, which no kernel minds here."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, backend: str, kind: type[Work], sizes: Sequence[int] = (4,)
    ) -> None:
        self.fake = Account()
        self.works: list[Any] = []
        self.selected: list[torch.device] = []  # by a thread
        self.followed: list[Any] = []  # what each collective came after
        self.issued: list[
            list[int]
        ] = []  # the sizes of the buckets, by the collectives in the order of their issue
        monkeypatch.setattr(streams, "backend", self.fake)
        monkeypatch.setattr(group_sum.dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.selected.append)
        monkeypatch.setattr(group_sum.dist, "all_reduce", self._all_reduce)
        self.ended: list[str] = []
        monkeypatch.setattr(
            group_sum.dist, "destroy_process_group", lambda group: self.ended.append("in peace")
        )
        group: Any = SimpleNamespace(abort=lambda: self.ended.append("by force"))
        self._kind, self.completes = kind, True
        self.mailbox = Mailbox()
        self.group = SumGroup(group, self.mailbox, CUDA)
        clock: Any = DeviceClock.__new__(DeviceClock)
        self.streams = [self.fake.Stream() for _ in sizes]
        self.lane = self.streams[0]
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.sums = [
            GroupSum([p], self.group, self.key(n), LaneStream(CUDA, stream, self.fake.Event(), False, clock))
            for n, (p, stream) in enumerate(zip(self.parameters, self.streams))
        ]

    def key(self, lane: int) -> Key:
        return KEY._replace(pipeline=lane)

    def _all_reduce(self, flat: torch.Tensor, group: Any, async_op: bool) -> Work:
        # A bucket is filled on the stream that is current here: what that follows now, the copies did.
        self.followed.append(dict(self.fake.current_stream().clock))
        self.issued.append(flat.tolist())
        self.works.append(self._kind(self.fake))
        self.works[-1].is_completed = lambda: self.completes
        return self.works[-1]

    def backward(self, lane: int = 0, value: float = 1.0) -> None:
        with self.streams[lane]:
            self.sums[lane].arm()
            (value * self.parameters[lane]).sum().backward()

    def complete(self, number: int, lane: int = 0) -> Key:
        with self.streams[lane]:
            self.sums[lane].complete(number)
        return self.key(lane)._replace(batch=number)

    def batch(self, number: int) -> Key:
        """Last backward and the end of a batch, in steps of the lane."""
        self.sums[0].begin()
        self.backward()
        return self.complete(number)

    def take(self, key: Key) -> None:
        with self.streams[key.pipeline]:
            self.mailbox.take(key)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Summing]:
    made = Summing(monkeypatch, "nccl", Work)
    yield made
    made.group.close()


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Summing]:
    made = Summing(monkeypatch, "gloo", HostWork)
    yield made
    for work in made.works:
        work.done.set()
    made.group.close()


def test_the_lane_that_takes_the_sums_waits_for_them(nccl: Summing) -> None:
    """A work of NCCL has its stream waited for by the stream that is current where wait() is called, and by no other:
    called in another thread, as on the CPU, it would leave the lane reading what the collective still writes. That the
    memory is read too early is for a device to show; here its stream must come after.
    """
    key = nccl.batch(0)
    assert key in nccl.mailbox, "the host has nothing to wait for"
    assert not nccl.lane.follows(nccl.works[0].operation)
    nccl.take(key)
    assert nccl.lane.follows(nccl.works[0].operation)


def test_no_other_stream_waits_for_the_sums(nccl: Summing) -> None:
    """The caller's stream would hold up every batch that begins after it."""
    nccl.take(nccl.batch(0))
    assert not nccl.fake.current_stream().follows(nccl.works[0].operation)


def test_the_next_batch_is_copied_in_after_the_sums_of_the_last_one(nccl: Summing) -> None:
    for n in range(3):
        nccl.take(nccl.batch(n))
    for followed, work in zip(nccl.followed[1:], nccl.works):
        name, number = work.operation
        assert followed.get(name, 0) >= number


def test_the_communicator_ends_with_the_sums(nccl: Summing, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.take(nccl.batch(0))
    nccl.group.close()
    assert nccl.ended == ["in peace"]
    monkeypatch.setattr(group_sum, "_PATIENCE_S", 0.05)
    nccl.completes = False  # as where another member died
    nccl.group.close()
    assert nccl.ended == ["in peace", "by force"]


# ---- the order of several lanes ------------------------------------------------------------------------------------


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Summing]:
    """Two lanes, whose buckets are told apart by their sizes."""
    made = Summing(monkeypatch, "nccl", Work, [4, 8])
    yield made
    made.group.close()


def test_sums_start_in_the_order_in_which_batches_have_begun(lanes: Summing) -> None:
    """Whatever order lanes come to them in, for which ranks differ."""
    for lane in (0, 1, 1, 0):
        lanes.sums[lane].begin()
    lanes.backward(1)
    assert lanes.complete(0, 1) not in lanes.mailbox
    assert lanes.issued == []
    lanes.backward(0)
    assert [len(flat) for flat in lanes.issued] == [4], "it starts from the hook"
    lanes.take(lanes.complete(0, 0))
    assert [len(flat) for flat in lanes.issued] == [4, 8], "and the next lane's at the end of its batch"
    lanes.take(lanes.key(1)._replace(batch=0))
    lanes.backward(0)
    key = lanes.complete(1, 0)
    assert len(lanes.issued) == 2
    lanes.backward(1)
    lanes.complete(1, 1)
    assert [len(flat) for flat in lanes.issued] == [4, 8, 8, 4]
    assert key in lanes.mailbox


def test_a_lane_s_turn_ends_with_its_batch(lanes: Summing) -> None:
    """Not with its last bucket: there may be none, as where a replica has no part of a batch."""
    for lane in (0, 1):
        lanes.sums[lane].begin()
    with lanes.streams[1]:
        lanes.sums[1].complete(0)
    assert lanes.issued == []
    with lanes.streams[0]:
        lanes.sums[0].complete(0)
    assert lanes.issued == [[0.0] * 4, [0.0] * 8]


def test_a_sum_that_has_waited_for_its_turn_follows_its_own_lane_alone(lanes: Summing) -> None:
    """It starts in another lane's step, after what filled its buckets, and not after that lane's work."""
    for lane in (0, 1):
        lanes.sums[lane].begin()
    lanes.backward(1)
    with lanes.streams[1]:
        filled = lanes.streams[1].operate()
    lanes.complete(0, 1)
    with lanes.streams[0]:
        other = lanes.streams[0].operate()
    lanes.backward(0)
    lanes.complete(0, 0)
    assert lanes.followed[1].get(filled.stream, 0) >= filled.number
    assert lanes.followed[1].get(other.stream, 0) < other.number


def test_a_sum_follows_a_backward_that_is_on_another_stream(lanes: Summing) -> None:
    side = lanes.fake.Stream()
    lanes.sums[0].begin()
    side.wait_stream(lanes.streams[0])
    with side:
        filled = side.operate()
        lanes.sums[0].arm()
        lanes.parameters[0].sum().backward()
    assert lanes.followed[0].get(side.number, 0) >= filled.number


def test_buckets_are_aligned_and_zero_where_there_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Summing(monkeypatch, "nccl", Work)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 5, 1)]
    summed = GroupSum(parameters, made.group, KEY, None)
    assert [summed.total(n).data_ptr() % 16 for n in range(3)] == [0, 0, 0]
    for value in (2.0, 7.0):
        summed.begin()
        summed.arm()
        (parameters[0].sum() * value + parameters[2].sum()).backward()
        summed.complete(0)
        assert made.issued[-1] == [1.0, 0, 0, 0] + [0.0] * 8 + [value] * 3 + [0]
        assert summed.total(0).tolist() == [value] * 3
        for p in parameters:
            p.grad = None
    made.group.close()


# ---- who waits -----------------------------------------------------------------------------------------------------


def test_over_the_host_a_thread_waits_and_then_the_lane(gloo: Summing) -> None:
    """gloo adds CUDA tensors up in the host's memory: wait() keeps the host until the copy back is issued, and orders
    the current stream after that copy. So both must call it: the thread, for the scheduler must not be kept, and the
    lane, for the thread's stream is another one.
    """
    key = gloo.batch(0)
    assert key not in gloo.mailbox
    gloo.works[0].done.set()
    wait_until(lambda: key in gloo.mailbox)
    assert not gloo.lane.follows(gloo.works[0].operation)
    gloo.take(key)
    assert gloo.selected == [CUDA]
    assert gloo.lane.follows(gloo.works[0].operation)


class Failing(Work):
    def wait(self) -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]")


def test_a_peer_that_fails_is_a_lost_peer_where_sums_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Summing(monkeypatch, "nccl", Failing)
    key = made.batch(3)
    with pytest.raises(PeerLost, match="the sum of gradients of batch 3 failed: Connection closed by peer"):
        made.take(key)
    made.group.close()


def test_a_peer_that_fails_while_a_thread_waits_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Summing(monkeypatch, "gloo", Failing)
    key = made.batch(3)
    with pytest.raises(PeerLost, match="the sum of gradients of batch 3 failed: Connection closed by peer"):
        made.mailbox.wait_until(lambda: key in made.mailbox, limit(20))
    made.group.close()


# ---- which group ----------------------------------------------------------------------------------------------------


def test_nccl_joins_workers_that_have_a_device_each() -> None:
    assert nccl_joins(["a", "b", "c"])
    assert not nccl_joins(["a", "b", "a"])
    assert not nccl_joins(["a", None, "b"])  # one computes on its CPU, or lacks NCCL
    assert not nccl_joins([None, None])


def backends(devices: Sequence[str | None]) -> list[str]:
    """On a rank: what the groups of a replicated stage were made for, made for gloo instead."""
    named: list[str] = []

    def made(world: World, ranks: Sequence[int], device: torch.device, backend: str) -> Any:
        named.append(backend)
        return sum_group(world, ranks, device, "gloo")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(group_sum, "sum_group", made)
        monkeypatch.setattr(
            Links, "_nccl_devices", property(lambda _: devices, lambda *_: None), raising=False
        )
        plan = Plan(stages=2, replication=[2, 2], micro_batches=2)
        with Pipeline(
            language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw, timeout_s=60
        ) as p:
            for _ in p.train(token_batches(2, 4)):
                pass
    return named


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("devices", "named"),
    [("abcd", ["nccl", "nccl"]), ("abcc", ["nccl", "gloo"]), (["a", None, "b", "c"], ["gloo", "nccl"])],
)
def test_replicas_use_nccl_where_those_of_their_stage_may(
    devices: Sequence[str | None], named: list[str]
) -> None:
    """Replicas that share a device, which NCCL refuses at its first collective, are summed by gloo; so are those of
    which one computes on its CPU. All ranks name the same. What each of them makes of CUDA tensors is for devices to
    show.
    """
    assert run(4, backends, devices=list(devices)) == [named] * 4


@pytest.mark.parametrize(
    ("rank", "backend", "sums"), [(0, "nccl", 0), (1, "nccl", 1), (2, "nccl", 1), (1, "gloo", 0)]
)
def test_members_of_a_group_connect_before_anything_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, backend: str, sums: int
) -> None:
    """Over NCCL. gloo's connect when the group is made."""
    made: list[Any] = []
    summed: list[Any] = []
    monkeypatch.setattr(
        group_sum, "dist", SimpleNamespace(all_reduce=lambda tensor, group: summed.append(group))
    )
    world: Any = SimpleNamespace(
        rank=rank,
        timeout_s=60.0,
        new_group=lambda ranks, *how: made.append((ranks, *how)) or "the group",
    )
    monkeypatch.setattr(group_sum, "options", "options for {} s".format)
    assert sum_group(world, [1, 2], torch.device("cpu"), backend) == "the group"
    assert made == [([1, 2], backend, "options for 60.0 s" if backend == "nccl" else None)]
    assert summed == ["the group"] * sums
