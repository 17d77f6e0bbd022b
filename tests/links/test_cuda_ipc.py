"""The link through slots of device memory, with slots in host memory and streams that keep account."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from avgpipe import device as streams
from avgpipe.links import cuda, slots
from avgpipe.links.codec import Format
from avgpipe.links.cuda import CudaIpcLink
from avgpipe.links.link import Channel, LocalLink, Mailbox, Message
from avgpipe.links.shared import Inbox
from avgpipe.links.slots import DeviceMemory, DeviceSlots, Driver
from avgpipe.links.transport import Endpoint
from avgpipe_ext import ring
from tests.happens_before.clocks import Account, Event, Operation
from tests.links.ends import BACK, CHANNELS, CPU, Ends
from tests.patience import limit

pytestmark = pytest.mark.skipif(not ring.supported(), reason="needs Linux")


UPDATES = Channel(Message.REFERENCE_UPDATE, 0, 0, 1)
SECOND = Channel(Message.ACTIVATION, 1, 0, 1)  # of another pipeline


class Host:
    """Two devices in host memory, which all ends in this process can open, and events that keep account.

    ``accesses``: whether a device reaches the other one's memory.
    """

    def __init__(self, fake: Account, accesses: bool = True) -> None:
        self.fake, self.accesses = fake, accesses
        self.memory: list[tuple[torch.Tensor, HostDriver]] = []  # with its owner
        self.events: list[tuple[Event, HostDriver]] = []


class OnItsDevice:
    """An event as one end has it: made there, or opened. Only a stream of the device that made it may record it."""

    def __init__(self, event: Event, number: int, made_on: str, here: str) -> None:
        self.event, self._number, self._crosses = event, number, made_on != here
        self.wait, self.query = event.wait, event.query

    @property
    def clock(self) -> dict[int, int]:
        return self.event.clock

    def record(self, stream: Any = None) -> None:
        assert not self._crosses, "an event of another device"
        self.event.record(stream)

    def ipc_handle(self) -> bytes:
        return self._number.to_bytes(slots.HANDLE_BYTES, "little")


class HostDriver:
    """Of one process, for one of a host's devices."""

    device = CPU

    def __init__(self, host: Host, identity: str = "A") -> None:
        self._host, self.identity = host, identity
        self.copied: list[Operation] = []

    @property
    def allocated(self) -> list[torch.Tensor]:
        return [memory for memory, maker in self._host.memory if maker is self]

    def check_access(self, identity: str) -> None:
        if not self._host.accesses:
            raise ValueError("no peer access")

    def allocate(self, size: int) -> tuple[int, bytes]:
        self._host.memory.append((torch.zeros(size, dtype=torch.uint8), self))
        number = len(self._host.memory)
        return self._host.memory[-1][0].data_ptr(), number.to_bytes(slots.HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return self._host.memory[int.from_bytes(handle, "little") - 1][0].data_ptr()

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        self.copied.append(stream.operate())
        ctypes.memmove(target, source, size)

    def event(self) -> OnItsDevice:
        self._host.events.append((self._host.fake.Event(), self))
        return self._event(len(self._host.events) - 1)

    def open_event(self, handle: bytes) -> OnItsDevice:
        return self._event(int.from_bytes(handle, "little"))

    def _event(self, number: int) -> OnItsDevice:
        event, maker = self._host.events[number]
        return OnItsDevice(event, number, maker.identity, self.identity)

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        (maker,) = [
            maker
            for block, maker in self._host.memory
            if block.data_ptr() <= memory.pointer < block.data_ptr() + block.numel()
        ]
        assert maker.identity == self.identity, "kernels work in the memory of their own device"

        class Owned(ctypes.Array):
            _type_, _length_ = ctypes.c_ubyte, memory.size

        owned = Owned.from_address(memory.pointer)
        owned.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(owned, dtype=torch.uint8)


class DeviceEnds(Ends):
    """Stage 0 and 1; each receives on a stream of its own. ``slots``: of both; ``crosses``: between two devices."""

    def __init__(
        self,
        fake: Account,
        wire_dtype: torch.dtype | None,
        slots: list[DeviceSlots] | None = None,
        crosses: bool = False,
    ) -> None:
        into = [BACK, [*CHANNELS, UPDATES, SECOND]]
        inboxes = [Inbox.create(channels) for channels in into]
        opened = [Inbox.open(inbox.offer(), channels) for inbox, channels in zip(inboxes, into)]
        boxes = [Mailbox(inbox.bell) for inbox in inboxes]
        self.slots, self.crosses = slots or slots_of_two(Host(fake), crosses), crosses
        links = [
            CudaIpcLink(
                *(inboxes[k], opened[1 - k], os.getpid()),
                Endpoint(boxes[k], CPU, into[k], into[1 - k], wire_dtype),
                self.slots[k],
                crosses,
            )
            for k in range(2)
        ]
        super().__init__(links, boxes)
        self.fake, self.lanes = fake, [fake.Stream(), fake.Stream()]

    def copies(self, channel=CHANNELS[0]):
        return self.links[0]._copies[channel]

    def send(self, value, kind="F"):
        with self.lanes[kind == "B"]:
            return super().send(value, kind)

    def receive(self, key, timeout_s=20):
        with self.lanes[key.target]:
            return super().receive(key, timeout_s)

    def close(self) -> None:
        for link in self.links:
            link.leave()
        for link in self.links:
            link.close(10)


def slots_of_two(host: Host, crosses: bool) -> list[DeviceSlots]:
    """Those of each end: of two processes, which have a device each or share one."""
    return [DeviceSlots(HostDriver(host, name)) for name in ("A", "B" if crosses else "A")]


@pytest.fixture
def fake(monkeypatch):
    fake = Account()
    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(slots, "cuda", fake)
    return fake


@pytest.fixture(params=[False, True], ids=["one device", "two devices"])
def made(fake, request):
    made = DeviceEnds(fake, None, crosses=request.param)
    yield made
    made.close()


VALUES = [
    torch.arange(6.0).view(2, 3),
    {"x": torch.arange(5), "y": [torch.tensor(2.5, dtype=torch.float64), None, "text", 3]},
    [torch.zeros(0, 3), None],
    "no tensor",
]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_any_message_arrives(made, value, kind):
    for _ in range(3):
        arrived = made.pass_on(value, kind)
        assert str(arrived) == str(value)


def test_gradients_are_wanted_of_what_wanted_them(made):
    arrived = made.pass_on([torch.ones(2, requires_grad=True) * 2, torch.ones(2)])
    assert [x.requires_grad for x in arrived] == [True, False]
    assert arrived[0].is_leaf


def slots_in_use(made):
    return len(made.links[0]._outgoing_slots)


def test_a_slot_is_not_written_while_a_tensor_reads_it(made):
    kept = [made.pass_on(torch.full((1000,), float(n))) for n in range(12)]
    views = [x[500:] for x in kept]
    del kept
    made.pass_on(torch.full((1000,), 99.0))
    assert [float(v[0]) for v in views] == [float(n) for n in range(12)]
    assert slots_in_use(made) == 13
    assert [len(end._driver.allocated) for end in made.slots] == [1, made.crosses]  # carved up


def test_slots_are_used_again(made):
    for n in range(50):
        assert float(made.pass_on(torch.full((1000,), float(n))).sum()) == 1000.0 * n
    assert slots_in_use(made) <= 2


def test_slots_grow_and_the_outgrown_serve_others(made):
    for n in (10, 100_000, 10, 2_000_000):
        assert float(made.pass_on(torch.ones(n)).sum()) == n
    for end in made.slots if made.crosses else made.slots[:1]:
        assert [memory.numel() for memory in end._driver.allocated] == [2 << 20, 2 << 20, 8 << 20]
        assert len(end._spare) == len(end._own) - slots_in_use(made)


def test_events_order_writing_and_reading(made):
    sender, receiver = made.lanes
    source = sender.operate()
    arrived = made.pass_on(torch.ones(1000))
    assert receiver.follows(source)
    read = receiver.operate()
    del arrived
    made.receive(made.send(torch.ones(1000)))
    (slot,) = made.links[0]._outgoing_slots.values()
    copies = made.copies()
    assert copies.follows(read)  # else the copy could overwrite what is still being read
    assert not sender.follows(read)  # the sending lane waits for nobody
    assert slot.full.clock[sender.number] >= source[1]


def test_the_allocator_knows_that_what_is_sent_is_copied_later(made, monkeypatch):
    recorded = []
    monkeypatch.setattr(made.fake, "holds", lambda tensor: True)
    monkeypatch.setattr(made.fake, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    value = torch.ones(10)
    made.pass_on(value)
    assert [(tensor.data_ptr(), stream) for tensor, stream in recorded] == [(value.data_ptr(), made.copies())]


@pytest.mark.parametrize("crosses", [False, True])
def test_activations_may_travel_narrower(fake, crosses):
    made = DeviceEnds(fake, torch.bfloat16, crosses=crosses)
    value = torch.randn(64)
    arrived = made.pass_on(value)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, value.bfloat16().float())
    evaluated = made.pass_on(value, "E")
    assert torch.equal(evaluated, value)
    del arrived, evaluated  # they read their slots, which closing waits for
    made.close()


@pytest.fixture
def copied(fake, monkeypatch):
    """The operations that copied something into a slot."""
    found = []
    write = Format.write

    def noted(*arguments):
        found.append(fake.current_stream().operate())
        write(*arguments)

    monkeypatch.setattr(Format, "write", noted)
    return found


def test_an_update_may_be_written_again_as_soon_as_it_is_sent(made, copied):
    """The next step writes the same memory: on the lane's stream, which is not the one that copies."""
    made.pass_on(torch.ones(10), "V")
    assert made.lanes[0].follows(copied[-1])


def test_no_lane_waits_for_copies_of_activations(made, copied):
    """Nothing writes to them, so that the lane may go on while a slot is not free yet."""
    made.pass_on(torch.ones(10), "F")
    assert not made.lanes[0].follows(copied[-1])


def test_a_slot_is_not_written_while_another_lane_reads_it(made, monkeypatch):
    """What a stage passes on as it is, is read by the lane of another stage of the same worker too."""
    monkeypatch.setattr(made.fake, "holds", lambda tensor: True)
    box, other = Mailbox(), made.fake.Stream()
    arrived = made.pass_on(torch.ones(1000))
    key = made.key()
    with made.lanes[1]:
        LocalLink(box, CPU).send(key, arrived)
    with other:
        passed = box.take(key)
    read = other.operate()
    del arrived, passed
    assert not made.lanes[1].follows(read)
    made.receive(made.send(torch.ones(1000)))
    assert made.copies().follows(read)


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("crosses", [False, True])
def test_no_message_waits_for_the_work_of_another_lane(fake, monkeypatch, crosses, mutant):
    """One that is late: its message was sent before, and is copied after. One stream for all would be found."""
    if mutant:
        monkeypatch.setattr(cuda, "copy_stream", cache(cuda.copy_stream))
    made = DeviceEnds(fake, None, crosses=crosses)
    late, second = made.lanes[0], made.fake.Stream()
    held = late.operate()
    made.send(torch.ones(1000))
    key = made.key()._replace(pipeline=1)
    with second:
        made.links[0].send(key, torch.full((1000,), 2.0))
    reader = made.fake.Stream()
    box = made.mailboxes[1]
    assert box.wait_until(lambda: key in box, limit(20))
    with reader:
        assert float(box.take(key)[0]) == 2
    assert reader.follows(held) is mutant
    box.messages.clear()
    made.close()


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("crosses", [False, True])
def test_no_slot_returns_behind_one_that_another_lane_reads(fake, monkeypatch, crosses, mutant):
    """What two streams read is returned on a third one, which waits for both."""
    if mutant:
        monkeypatch.setattr(cuda, "copy_stream", cache(cuda.copy_stream))
    made = DeviceEnds(fake, None, crosses=crosses)
    monkeypatch.setattr(made.fake, "holds", lambda tensor: True)
    readers = [made.fake.Stream() for _ in range(4)]
    keys = [made.send(torch.ones(1000)), made.key()._replace(pipeline=1)]
    made.links[0].send(keys[1], torch.ones(1000))
    box, reads = made.mailboxes[1], []
    assert box.wait_until(lambda: all(key in box for key in keys), limit(20))
    for key, (first, second) in zip(keys, (readers[:2], readers[2:])):
        with first:
            arrived = box.take(key)
        streams.used_on(second, [arrived])
        reads.append([reader.operate() for reader in (first, second)])
        del arrived
    made.links[0].send(made.key()._replace(pipeline=1), torch.ones(1000))
    copies = made.copies(SECOND)
    assert all(map(copies.follows, reads[1]))
    assert any(map(copies.follows, reads[0])) is mutant
    made.close()


# ---- the life of memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("crosses", [False, True])
def test_pipelines_one_after_another_use_the_same_memory(fake, crosses):
    both = slots_of_two(Host(fake), crosses)
    for _ in range(5):
        made = DeviceEnds(fake, None, both, crosses)
        for sizes in ([1000, 300_000], [300_000, 1000]):  # the second ones outgrow what the first ones used
            kept = [made.pass_on(torch.ones(size)) for size in sizes for _ in range(3)]
            del kept
        made.close()
        for end in both if crosses else both[:1]:
            assert len(end._driver.allocated) == 1 + 6
            assert len(end._spare) == len(end._own) == 32 + 6
            assert len({id(slot) for slot in end._spare}) == len(end._spare)
        for end in both:
            assert len(end._blocks) <= 1 + 6


@pytest.mark.parametrize("crosses", [False, True])
def test_closing_waits_until_the_device_has_read_what_was_sent(fake, monkeypatch, crosses):
    made = DeviceEnds(fake, None, crosses=crosses)
    arrived = made.pass_on(torch.ones(10))
    made.links[1].leave()
    closing = threading.Thread(target=made.links[0].close, args=(20,))
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive(), "a tensor still reads the slot"
    happened = False
    for _, event in used(made):
        monkeypatch.setattr(event, "query", lambda: happened)
    del arrived
    time.sleep(0.05)
    assert closing.is_alive(), "the slot has come back, and the device has not read it"
    slots = made.slots[0]
    assert len(slots._spare) < len(slots._own)
    happened = True
    closing.join(limit(10))
    assert not closing.is_alive()
    assert len(slots._spare) == len(slots._own)
    made.links[1].close(10)


def used(made):
    """The slots that the sender has lent, with the event after they are read."""
    return made.links[0]._lent() or [
        (slot, made.slots[0].open_granted(next(iter(made.links[1]._granted.values())).record).free)
        for slot in made.links[0]._outgoing_slots.values()
    ]


@pytest.mark.parametrize("late", ["full", "free"])
@pytest.mark.parametrize("crosses", [False, True])
def test_closing_waits_until_the_device_has_copied_and_read(fake, monkeypatch, crosses, late):
    """An event that has not happened keeps the slot, whichever of the two it is, and at whichever end."""
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None, crosses=crosses)
    made.pass_on(torch.ones(10))
    ((slot, free),) = made.links[0]._lent()
    monkeypatch.setattr(slot.full if late == "full" else free, "query", lambda: False)
    made.close()
    assert len(made.slots[0]._spare) == len(made.slots[0]._own) - 1
    assert len(made.slots[1]._spare) == len(made.slots[1]._own) * crosses


@pytest.mark.parametrize("late", ["full", "free"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_granted_slot_that_may_still_be_used_serves_no_one_else(fake, monkeypatch, late, times):
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None, crosses=True)
    for _ in range(times):
        made.pass_on(torch.ones(10))
    (slot,) = made.links[1]._granted.values()
    monkeypatch.setattr(getattr(slot, late), "query", lambda: False)
    made.close()
    assert len(made.slots[1]._spare) == len(made.slots[1]._own) - 1


def test_a_granted_slot_is_kept_if_the_other_end_does_not_leave(fake, monkeypatch):
    """It may write to it at any time."""
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None, crosses=True)
    made.pass_on(torch.ones(10))
    made.links[1].close(10)
    assert len(made.slots[1]._spare) == len(made.slots[1]._own) - 1
    made.links[0].close(10)


def test_a_granted_slot_is_kept_while_a_message_that_no_one_takes_is_copied(fake, monkeypatch):
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None, crosses=True)
    made.pass_on(torch.ones(10))
    made.send(torch.ones(10))
    (slot,) = made.links[0]._outgoing_slots.values()
    opened = made.slots[1].open(slot.record)
    monkeypatch.setattr(opened.full, "query", lambda: False)
    made.close()
    assert len(made.slots[1]._spare) == len(made.slots[1]._own) - 1


@pytest.mark.parametrize("crosses", [False, True])
def test_a_slot_that_never_comes_back_serves_no_other(fake, monkeypatch, crosses):
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None, crosses=crosses)
    arrived = made.pass_on(torch.ones(10))
    made.close()
    for end in made.slots if crosses else made.slots[:1]:
        assert len(end._spare) == len(end._own) - 1
    assert float(arrived.sum()) == 10


@pytest.mark.parametrize("crosses", [False, True])
def test_what_is_offered_is_read_after_it_is_written(fake, crosses):
    here, there = slots_of_two(Host(fake), crosses)
    writer, reader = fake.Stream(), fake.Stream()
    with writer:
        written = writer.operate()
        offer = here.offer()
    with reader:
        assert there.check(offer) is crosses
    assert reader.follows(written)
    assert len(there._driver.copied) == 1


def test_a_device_that_reaches_no_other_one_is_refused(fake):
    here, there = slots_of_two(Host(fake, accesses=False), True)
    with pytest.raises(ValueError, match="no peer access"):
        there.check(here.offer())


def test_memory_that_holds_something_else_is_refused(fake):
    here, there = slots_of_two(Host(fake), True)
    offer = here.offer()
    here._offered.memory.fill_(0)
    with pytest.raises(ValueError, match="does not hold what it wrote"):
        there.check(offer)


# ---- two devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def apart(fake):
    made = DeviceEnds(fake, None, crosses=True)
    yield made
    made.close()


def test_all_but_the_first_messages_are_pushed_into_memory_of_the_receiver(apart):
    """Three at a time: three are fetched, and the others pushed, without another copy of one tensor."""
    pushed, fetched = (end._driver.copied for end in apart.slots)
    for n in range(30):
        kept = [apart.pass_on(torch.full((1000,), float(n))) for _ in range(3)]
        assert [float(x.sum()) for x in kept] == [1000.0 * n] * 3
        del kept
    assert (len(pushed), len(fetched)) == (87, 3)
    assert {slot.memory for slot in apart.links[0]._outgoing_slots.values()} == {None}


def test_what_is_not_one_tensor_is_gathered_before_it_is_pushed(apart, copied):
    for n in range(3):
        arrived = apart.pass_on([torch.full((10,), float(n)), torch.full((3, 4), float(n)).T])
        assert [float(x.mean()) for x in arrived] == [n, n]
        del arrived
    assert len(copied) == 3, "gathered in the first slot, and beside the granted one"
    pushed = apart.slots[0]._driver.copied
    assert len(pushed) == 2
    assert [operation.stream for operation in pushed] == [copied[1].stream, copied[2].stream]


def test_a_push_comes_after_the_last_read_and_before_the_next(apart):
    sender, receiver = apart.lanes
    apart.pass_on(torch.ones(1000))
    for _ in range(3):
        source = sender.operate()
        arrived = apart.pass_on(torch.ones(1000))
        assert receiver.follows(source)
        assert receiver.follows(apart.slots[0]._driver.copied[-1])
        read = receiver.operate()
        del arrived
        apart.receive(apart.send(torch.ones(1000)))
        assert apart.copies().follows(read)
        assert not sender.follows(read)


def test_a_fetch_comes_after_the_copy_and_before_the_slot_is_written_again(apart):
    sender, receiver = apart.lanes
    source = sender.operate()
    apart.pass_on(torch.ones(1000))
    fetch = apart.slots[1]._driver.copied[-1]
    first = apart.links[0]._outgoing_slots
    (slot,) = first.values()
    assert receiver.follows(source)
    assert receiver.follows(fetch)
    apart.pass_on(torch.ones(1000))
    assert apart.slots[0]._spare[-1] is slot, "the first slot serves others"
    other = apart.fake.Stream()
    other.wait_event(slot.free)
    assert other.follows(fetch)


def test_a_fetch_waits_for_the_last_reader_of_the_slot_that_is_granted(apart):
    """It served another link, which has returned it before the device was done."""
    other, (slot,) = apart.fake.Stream(), [apart.slots[1].make(1)]
    read = other.operate()
    slot.free.record(other)
    apart.slots[1].give(slot)
    apart.slots[1]._spare = [slot]
    apart.pass_on(torch.ones(10))
    fetch = apart.slots[1]._driver.copied[-1]
    apart.links[0].send(apart.key(), torch.ones(10))
    assert slot.full.clock[fetch.stream] >= fetch.number
    assert slot.full.clock[read.stream] >= read.number


def test_a_fetch_that_no_one_reads_comes_before_the_next_push(apart):
    """Its message is dropped, as when a Pipeline ends early."""
    key = apart.send(torch.ones(10))
    box = apart.mailboxes[1]
    assert box.wait_until(lambda: key in box, limit(20))
    box.messages.clear()
    fetch = apart.slots[1]._driver.copied[-1]
    apart.send(torch.ones(10))
    assert apart.copies().follows(fetch)


def test_a_slot_without_a_grant_is_not_written_again(apart):
    """A longer text replaces the slot of the ring at the same address."""
    apart.pass_on(torch.ones(10))
    (((_, address), slot),) = apart.links[0]._outgoing_slots.items()
    ctypes.memset(address, 0, cuda._HEAD_BYTES)
    assert float(apart.pass_on(torch.full((10,), 2.0)).sum()) == 20
    (following,) = apart.links[0]._outgoing_slots.values()
    assert following is not slot
    assert all(spare is not slot for spare in apart.slots[0]._spare)


def holds(got: Any, expected: float) -> bool:
    return all(bool((x == expected).all()) for x in (got if isinstance(got, list) else [got]))


@pytest.mark.parametrize("seed", range(20))
def test_messages_of_all_sizes_keep_their_values_however_long_they_are_kept(fake, seed):
    """In both directions, between two devices and on one, taken late and freed in any order."""
    dice = random.Random(seed)
    made = DeviceEnds(fake, None, crosses=seed % 2 == 0)
    kept: list[tuple[Any, float]] = []
    sent: list[tuple[Any, float]] = []
    for n in range(200):
        size, kind = int(2 ** dice.uniform(0, 16)), dice.choice("FFBV")
        value = torch.full((size,), float(n))
        sent.append((made.send(value if dice.random() < 0.7 else [value, value], kind), float(n)))
        value.fill_(-1) if kind == "V" else None
        while sent and dice.random() < 0.6:
            key, expected = sent.pop(0)
            kept.append((made.receive(key), expected))
        assert all(holds(*of) for of in kept)
        while kept and dice.random() < 0.6:
            kept.pop(dice.randrange(len(kept)))
    kept.clear()
    for key, _ in sent:
        made.receive(key)
    made.close()
    for end in made.slots if made.crosses else made.slots[:1]:
        assert len(end._spare) == len(end._own)


# ---- the driver --------------------------------------------------------------------------------------------------


class Bindings:
    """Stands for cuda.bindings.driver: every thread must have made the context its current one, and memory is there on
    request.
    """

    class CUipcMemHandle:
        def __init__(self) -> None:
            self.memory = ctypes.create_string_buffer(slots.HANDLE_BYTES)

        def getPtr(self) -> int:
            return ctypes.addressof(self.memory)

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes, self.thread, self.calls = free_bytes, threading.local(), list[Any]()

    def cuInit(self, flags: int) -> Any:
        return (0,)

    def cuDeviceGet(self, index: int) -> Any:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, number: int) -> Any:
        return 0, 7

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self.thread.context = context
        return (0,)

    def cuCtxPopCurrent(self) -> Any:
        self.thread.context = None
        return 0, 7

    def cuMemAlloc(self, size: int) -> Any:
        return (
            self._called("cuMemAlloc", 4096)
            if size <= self.free_bytes
            else self._called("cuMemAlloc", None, 2)
        )

    def cuIpcGetMemHandle(self, pointer: int) -> Any:
        return self._called("cuIpcGetMemHandle", self.CUipcMemHandle())

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        assert flags == 1
        return self._called("cuIpcOpenMemHandle", int.from_bytes(handle.memory.raw, "little"))

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        return self._called(("cuMemcpyAsync", target, source, size, stream))[:1]

    def _called(self, name: Any, result: Any = None, status: int = 0) -> Any:
        self.calls.append(name)
        return (201 if getattr(self.thread, "context", None) != 7 else status), result


@pytest.fixture
def bindings(fake, monkeypatch):
    bindings = Bindings(4 << 20)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    monkeypatch.setattr(slots, "device_id", lambda device: f"uuid {device.index}")
    fake.init = lambda: None
    fake.device_count = lambda: 2
    fake.empty_cache = lambda: setattr(bindings, "free_bytes", 8 << 20)
    return bindings


def test_any_thread_may_call_the_driver(bindings):
    driver, found = Driver(torch.device("cuda", 0)), []

    def call() -> None:
        handle = (8).to_bytes(slots.HANDLE_BYTES, "little")
        found.extend([driver.allocate(1), driver.open(handle)])
        driver.copy(1, 2, 3, SimpleNamespace(cuda_stream=4))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(limit(10))
    assert found == [(4096, bytes(slots.HANDLE_BYTES)), 8]
    assert bindings.calls == [
        "cuMemAlloc",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle",
        ("cuMemcpyAsync", 1, 2, 3, 4),
    ]


def test_memory_that_torch_keeps_is_taken_before_it_is_missed(bindings):
    driver = Driver(torch.device("cuda", 0))
    driver.allocate(8 << 20)
    assert bindings.calls == ["cuMemAlloc", "cuMemAlloc", "cuIpcGetMemHandle"]
    with pytest.raises(RuntimeError, match="cuMemAlloc: 2"):
        driver.allocate(16 << 20)


def test_devices_without_peer_access_are_named(bindings, fake):
    driver = Driver(torch.device("cuda", 0))
    fake.can_device_access_peer = lambda here, there: (here.index, there.index) != (0, 1)
    driver.check_access("uuid 2")  # one that this process does not see
    with pytest.raises(ValueError, match="no peer access from cuda:0 to cuda:1"):
        driver.check_access("uuid 1")
    fake.can_device_access_peer = lambda here, there: True
    driver.check_access("uuid 1")


def test_without_the_binding_the_reason_is_a_package(bindings, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
        Driver(torch.device("cuda", 0))
