"""The checker finds what is out of order, by any operator, and says nothing of what is in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DEVICE, DeviceAccount

pytestmark = pytest.mark.host  # they have an account of their own


@pytest.fixture
def account() -> Iterator[DeviceAccount]:
    with on_streams(DeviceAccount()) as account:
        yield account


def found(account: DeviceAccount) -> list[str]:
    return sorted(account.memory.found)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("late", ["add_", "mul", "copy_"])
def test_an_access_that_does_not_wait_for_another_stream_s_write(
    account: DeviceAccount, waits: bool, late: str
) -> None:
    one, other = account.Stream(), account.Stream()
    with one:
        x = torch.zeros(4, device=DEVICE)
        x.add_(1)
    if waits:
        other.wait_stream(one)
    with other:
        getattr(x, late)(torch.ones(4, device=DEVICE))
    assert bool(found(account)) is not waits
    assert all(text.startswith("race (writes, then ") for text in found(account))


def test_readers_need_not_wait_for_each_other_but_a_writer_for_both(account: DeviceAccount) -> None:
    streams = [account.Stream() for _ in range(3)]
    x = torch.ones(4, device=DEVICE)
    for stream in streams[:2]:
        stream.wait_stream(account.default)
        with stream:
            x.sum()
    assert not found(account)
    streams[2].wait_stream(streams[0])
    with streams[2]:
        x.zero_()
    assert len(found(account)) == 1  # of the second reader
    assert "race (reads, then writes): aten.sum" in found(account)[0]


def test_parts_of_the_same_memory_are_apart(account: DeviceAccount) -> None:
    one, other = account.Stream(), account.Stream()
    x = torch.empty(8, device=DEVICE)
    with one:
        x[:4].zero_()
    with other:
        x[4:].zero_()
        assert not found(account)
        x[3:5].zero_()
    assert len(found(account)) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_used_again_while_another_stream_reads_it(
    account: DeviceAccount, recorded: bool
) -> None:
    home, reader = account.Stream(), account.Stream()
    with home:
        x = torch.ones(4, device=DEVICE)
    reader.wait_stream(home)
    with reader:
        x.sum()
        if recorded:
            account.record_stream(x, reader)
    del x
    with home:
        torch.ones(4, device=DEVICE)
    assert bool(found(account)) is not recorded
    assert all("without record_stream" in text for text in found(account))


def test_backwards_are_seen(account: DeviceAccount) -> None:
    one, other = account.Stream(), account.Stream()
    layer = nn.Linear(4, 4, device=DEVICE)
    x = torch.ones(2, 4, device=DEVICE)
    one.wait_stream(account.default)
    with one:
        loss = layer(x).sum()
        loss.backward()
    other.wait_stream(account.default)
    with other:
        layer.weight.grad.add_(1)  # type: ignore[union-attr]
    assert found(account)


def test_the_host_s_waits_order_and_are_listed(account: DeviceAccount) -> None:
    one, other = account.Stream(), account.Stream()
    with one:
        x = torch.ones((), device=DEVICE)
        float(x)
    with other:
        x.add_(1)
    assert not found(account)
    assert sum(account.waited.values()) == 1
    assert "_local_scalar_dense" in next(iter(account.waited))


HOST_READS: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.cpu,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.nonzero,
    lambda x: x[0].item(),
    lambda x: x.to("cpu"),
    lambda x: torch.equal(x, x),
    lambda x: torch.zeros(4).copy_(x),
]


@pytest.mark.parametrize("read", HOST_READS)
def test_the_host_s_reads_are_in_the_order_of_the_current_stream(
    account: DeviceAccount, read: Callable[[torch.Tensor], Any]
) -> None:
    """It waits for that stream alone, which need not come after the one that has written."""
    with account.Stream() as other:
        x = torch.ones(4, device=DEVICE)
    read(x)
    assert len(found(account)) == 1
    account.memory.found.clear()
    account.default.wait_stream(other)
    read(x)
    assert not found(account)


def test_a_host_that_reads_what_is_still_copied(account: DeviceAccount) -> None:
    on_host = torch.zeros(4)
    x = torch.ones(4, device=DEVICE)
    on_host.copy_(x, non_blocking=True)
    copied = account.default.record_event()
    copied.synchronize()
    on_host.tolist()
    assert not found(account)
    on_host.copy_(x, non_blocking=True)
    on_host.tolist()
    assert "race (writes, then the host reads)" in found(account)[0]


def test_a_collective_is_over_for_the_stream_that_waited(account: DeviceAccount) -> None:
    """As NCCL has it: wait() in another thread, or on another stream, orders nothing here."""
    from tests.happens_before.on_cpu import NcclWork

    class Inner:
        def wait(self) -> None:
            pass

    lane, other, nccl = account.Stream(), account.Stream(), account.Stream()
    with lane:
        x = torch.ones(4, device=DEVICE)
        work = NcclWork(account, nccl, Inner(), [x])
    with other:
        work.wait()
    with lane:
        x.mul_(2)
    assert found(account)
    account.memory.found.clear()
    with lane:
        work = NcclWork(account, nccl, Inner(), [x])
        work.wait()
        x.mul_(2)
    assert not found(account)


def test_a_span_is_not_reported_before_it_is_over(account: DeviceAccount) -> None:
    stream = account.Stream()
    start, end = account.Event(), account.Event()
    start.record(stream)
    with stream:
        torch.ones(4, device=DEVICE)
    end.record(stream)
    with pytest.raises(AssertionError, match="they may not be over"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_asking_again_and_again_waits_in_the_end(account: DeviceAccount) -> None:
    stream = account.Stream()
    with stream:
        torch.ones(4, device=DEVICE)
    event: Any = stream.record_event()
    assert not event.query()
    assert any(event.query() for _ in range(20))
