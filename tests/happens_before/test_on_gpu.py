"""The account that torch's trace of a GPU feeds: with made-up numbers here, with real ones where there is a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.cuda import _gpu_trace

from avgpipe import Pipeline, Plan
from tests.happens_before import on_gpu
from tests.runtime.cases import adamw, language_model, token_batches

pytestmark = pytest.mark.host  # some are out of order on purpose

ONE, TWO = 0x1000, 0x2000  # streams
EVENT = 0xE000


class Pretended(on_gpu.GpuAccount):
    """Takes all tensors for the device's."""

    def holds(self, tensor):
        return True


@pytest.fixture
def trace():
    """What torch would tell: trace("event_record", event, stream)."""
    registries = {
        name: getattr(_gpu_trace, "".join(word.capitalize() for word in name.split("_")) + "Callbacks")
        for name in on_gpu._TOLD
    }
    return lambda name, *numbers: registries[name].fire_callbacks(*numbers)


class Current:
    stream = 0


@pytest.fixture
def on(monkeypatch):
    """Select the current stream by its number."""
    monkeypatch.setattr(on_gpu, "current_handle", lambda: Current.stream)
    monkeypatch.setattr(on_gpu, "handle_of", lambda stream: TWO)

    def select(stream):
        Current.stream = stream

    yield select
    Current.stream = 0


@pytest.fixture
def account(on):
    with on_gpu.watching(Pretended()) as made:
        yield made


def write_and_read(on, between):
    """Write a tensor on one stream, and read it on the other."""
    on(ONE)
    x = torch.zeros(8)
    x.add_(1)
    between()
    on(TWO)
    return x * 2


def test_a_missing_wait_is_found(account, on):
    write_and_read(on, lambda: None)
    (found,) = account.memory.found
    assert "race (writes, then reads)" in found
    assert "aten.add_" in found
    assert "aten.mul" in found


def test_a_wait_orders_two_streams(account, on, trace):
    def wait():
        trace("event_creation", EVENT)
        trace("event_record", EVENT, ONE)
        trace("event_wait", EVENT, TWO)

    write_and_read(on, wait)
    assert not account.memory.found
    assert account.memory.orderings
    assert account.waits == 1


def test_a_wait_for_an_earlier_record_does_not_order(account, on, trace):
    on(ONE)
    x = torch.zeros(8)
    trace("event_record", EVENT, ONE)
    x.add_(1)
    trace("event_wait", EVENT, TWO)
    on(TWO)
    x * 2
    assert account.memory.found


def test_the_number_of_an_event_may_come_again(account, on, trace):
    trace("event_record", EVENT, ONE)
    trace("event_deletion", EVENT)
    trace("event_creation", EVENT)  # another one, which nobody recorded
    write_and_read(on, lambda: trace("event_wait", EVENT, TWO))
    assert account.memory.found


@pytest.mark.parametrize(
    "waits", [("device_synchronization",), ("stream_synchronization", ONE), ("event_synchronization", EVENT)]
)
def test_what_the_host_has_waited_for_is_done(account, on, trace, waits):
    def wait():
        trace("event_record", EVENT, ONE)
        trace(*waits)

    write_and_read(on, wait)
    assert not account.memory.found


def test_a_write_after_an_unordered_read_is_found(account, on, trace):
    def wait():
        trace("event_record", EVENT, ONE)
        trace("event_wait", EVENT, TWO)

    on(ONE)
    x = torch.zeros(8)
    wait()
    on(TWO)
    x.sum()
    on(ONE)
    x[4:].fill_(1)
    (found,) = account.memory.found
    assert "race (reads, then writes)" in found


def test_parts_that_do_not_overlap_may_be_written_at_once(account, on, trace):
    on(ONE)
    x = torch.zeros(8)
    trace("stream_synchronization", ONE)
    x[:4].fill_(1)
    on(TWO)
    x[4:].fill_(1)
    assert not account.memory.found


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_uses_must_be_recorded(account, on, trace, recorded):
    on(ONE)
    x = torch.zeros(8)
    trace("event_record", EVENT, ONE)
    trace("event_wait", EVENT, TWO)
    on(TWO)
    x.sum()
    if recorded:
        account.record_stream(x, account.stream(TWO))
    del x
    on(ONE)
    torch.zeros(8)
    assert [("without record_stream" in what) for what in account.memory.found] == (
        [] if recorded else [True]
    )


def test_memory_is_at_home_where_it_was_allocated(account, on, trace):
    x = torch.zeros(8)
    with torch.utils._python_dispatch._disable_current_modes():
        unseen = torch.zeros(8)  # by something that is no operator
    on(ONE)
    trace("memory_allocation", unseen.data_ptr())
    on(TWO)
    unseen.sum()
    x.sum()
    homes = {
        allocation.home.number for allocation in account.memory._allocations.values() if allocation.accesses
    }
    assert account.stream(ONE).number in homes


def test_threads_and_backwards_are_seen(account, on):
    x = torch.zeros(8, requires_grad=True)
    before = account.operators
    thread = threading.Thread(target=lambda: (x * x).sum().backward())
    thread.start()
    thread.join()
    assert account.operators > before + 3


def test_a_run_on_one_stream_is_in_order(account):
    batches = token_batches(4, 8)
    plan = Plan(stages=2, pipelines=2, micro_batches=2, recompute="always")
    with Pipeline(language_model(), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw) as p:
        list(p.train(batches))
    assert account.operators > 500
    assert not account.memory.found


def test_an_account_that_fails_is_a_finding(account, trace, monkeypatch):
    monkeypatch.setattr(account, "event_wait", lambda event, stream: 1 / 0)
    trace("event_wait", EVENT, ONE)
    assert "the account failed at event_wait" in next(iter(account.memory.found))


def test_nothing_is_noted_outside(on, trace):
    with on_gpu.watching(Pretended()) as account:
        pass
    trace("event_record", EVENT, ONE)
    assert account.records == 0


# ---- a GPU's own trace ---------------------------------------------------------------------------------------


def real(between, operate):
    """Two streams of a GPU: one writes, the other one reads."""
    torch.cuda.synchronize()
    account = on_gpu.GpuAccount()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with on_gpu.watching(account):
        with torch.cuda.stream(one):
            x = torch.zeros(1 << 16, device="cuda", requires_grad=True)
            with torch.no_grad():
                x.add_(1)
        between(one, two)
        with torch.cuda.stream(two):
            x.record_stream(two)
            operate(x)
        torch.cuda.synchronize()
    return account


@pytest.mark.gpu
@pytest.mark.parametrize("operate", [lambda x: x * 2, lambda x: (x * x).sum().backward()])
def test_a_gpu_s_missing_wait_is_found_and_its_wait_seen(operate):
    assert real(lambda one, two: None, operate).memory.found
    waited = real(lambda one, two: two.wait_stream(one), operate)
    assert not waited.memory.found
    assert waited.waits
    assert waited.memory.orderings


@pytest.mark.gpu
def test_a_gpu_s_record_stream_is_seen():
    account = real(lambda one, two: two.wait_stream(one), lambda x: x * 2)
    assert any(
        allocation.recorded for found in account.memory._freed.values() for allocation in found
    ) or any(allocation.recorded for allocation in account.memory._allocations.values())
