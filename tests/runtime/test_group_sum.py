"""Who waits for the sum of replicas' gradients: on the CPU a thread, on CUDA the stream of the lane that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe.errors import PeerLost
from avgpipe.runtime import group_sum, streams
from avgpipe.runtime.group_sum import GroupSum
from avgpipe.runtime.mailbox import Mailbox
from avgpipe.runtime.message import Key
from tests.runtime.ends import eventually
from tests.runtime.fake_cuda import FakeCuda, HostWork, Stream, Work

CUDA = torch.device("cuda", 0)
KEY = Key("Z", 0, 0, 0, -1, -1)


class Summing:
    """A GroupSum whose collectives are of ``kind``; its tensors are the host's, which no kernel minds here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str, kind: type[Work]) -> None:
        self.fake, self.lane = FakeCuda(), Stream()
        self.works: list[Any] = []
        self.followed: list[Any] = []  # what the copies into the buckets came after, by collective
        monkeypatch.setattr(streams, "cuda", self.fake)
        monkeypatch.setattr(group_sum.dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(group_sum.dist, "all_reduce", self._all_reduce)
        self._kind = kind
        self.mailbox = Mailbox()
        self.parameter = nn.Parameter(torch.zeros(4))
        self.sum = GroupSum([self.parameter], None, self.mailbox, KEY, CUDA)  # type: ignore[arg-type]

    def _all_reduce(self, flat: torch.Tensor, group: Any, async_op: bool) -> Work:
        # A bucket is filled on the stream that is current here: what that follows now, the copies did.
        self.followed.append(dict(self.fake.current_stream().clock))
        self.works.append(self._kind(self.fake))
        return self.works[-1]

    def batch(self, number: int) -> Key:
        """Last backward and the end of a batch, in steps of the lane."""
        with self.fake.stream(self.lane):
            self.sum.arm()
            self.parameter.sum().backward()
        with self.fake.stream(self.lane):
            self.sum.complete(number)
        return KEY._replace(batch=number)

    def take(self, key: Key) -> None:
        with self.fake.stream(self.lane):
            self.mailbox.take(key)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Summing]:
    made = Summing(monkeypatch, "nccl", Work)
    yield made
    made.sum.close()


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Summing]:
    made = Summing(monkeypatch, "gloo", HostWork)
    yield made
    for work in made.works:
        work.done.set()
    made.sum.close()


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


def test_over_the_host_a_thread_waits_and_then_the_lane(gloo: Summing) -> None:
    """gloo adds CUDA tensors up in the host's memory: wait() keeps the host until the copy back is issued, and orders
    the current stream after that copy. So both must call it: the thread, for the scheduler must not be kept, and the
    lane, for the thread's stream is another one.
    """
    key = gloo.batch(0)
    assert key not in gloo.mailbox
    gloo.works[0].done.set()
    eventually(lambda: key in gloo.mailbox)
    assert not gloo.lane.follows(gloo.works[0].operation)
    gloo.take(key)
    assert gloo.lane.follows(gloo.works[0].operation)


class Failing(Work):
    def wait(self) -> None:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]")


def test_a_peer_that_fails_is_a_lost_peer_for_who_takes_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Summing(monkeypatch, "nccl", Failing)
    key = made.batch(3)
    with pytest.raises(PeerLost, match="the sum of gradients of batch 3 failed: Connection closed by peer"):
        made.take(key)
    made.sum.close()


def test_a_peer_that_fails_while_a_thread_waits_ends_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Summing(monkeypatch, "gloo", Failing)
    key = made.batch(3)
    with pytest.raises(PeerLost, match="the sum of gradients of batch 3 failed: Connection closed by peer"):
        made.mailbox.wait_until(lambda: key in made.mailbox, 20)
    made.sum.close()
