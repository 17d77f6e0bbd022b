"""The link through slots of device memory, with slots in host memory and streams that keep account."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

import pytest
import torch

from avgpipe import device as streams
from avgpipe.links import cuda
from avgpipe.links.codec import Format
from avgpipe.links.cuda import CudaIpcLink, DeviceMemory, DeviceSlots, Driver
from avgpipe.links.link import Channel, Endpoint, LocalLink, Mailbox, Message
from avgpipe.links.shared import Inbox
from avgpipe_ext import driver as driver_module
from avgpipe_ext import ring
from tests.happens_before.clocks import Account, Event
from tests.links.ends import BACK, CHANNELS, CPU, Ends
from tests.patience import limit

pytestmark = pytest.mark.skipif(not ring.supported(), reason="needs Linux")


UPDATES = Channel(Message.REFERENCE_UPDATE, 0, 0, 1)


class HostDriver:
    """Host memory that all ends in this process can open; events that keep account."""

    device = CPU

    def __init__(self, fake: Account) -> None:
        self._fake = fake
        self.allocated: list[torch.Tensor] = []
        self._events: list[Event] = []

    def allocate(self, size: int) -> tuple[int, bytes]:
        self.allocated.append(torch.zeros(size, dtype=torch.uint8))
        return self.allocated[-1].data_ptr(), len(self.allocated).to_bytes(cuda.HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return self.allocated[int.from_bytes(handle, "little") - 1].data_ptr()

    def event(self) -> Any:
        event = self._fake.Event()
        number = len(self._events)
        event.ipc_handle = lambda: number.to_bytes(cuda.HANDLE_BYTES, "little")
        self._events.append(event)
        return event

    def open_event(self, handle: bytes) -> Event:
        return self._events[int.from_bytes(handle, "little")]

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        class Owned(ctypes.Array):
            _type_, _length_ = ctypes.c_ubyte, memory.size

        owned = Owned.from_address(memory.pointer)
        owned.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(owned, dtype=torch.uint8)

    @property
    def slots(self) -> int:
        return len(self._events) // 2


class DeviceEnds(Ends):
    """Stage 0 and 1; each receives on a stream of its own."""

    def __init__(
        self, fake: Account, wire_dtype: torch.dtype | None, slots: DeviceSlots | None = None
    ) -> None:
        into = [BACK, [*CHANNELS, UPDATES]]
        inboxes = [Inbox.create(channels) for channels in into]
        opened = [Inbox.open(inbox.offer(), channels) for inbox, channels in zip(inboxes, into)]
        boxes = [Mailbox(inbox.bell) for inbox in inboxes]
        self.slots = slots or DeviceSlots(HostDriver(fake))
        links = [
            CudaIpcLink(
                *(inboxes[k], opened[1 - k], os.getpid()),
                Endpoint(boxes[k], CPU, into[k], into[1 - k], wire_dtype),
                self.slots,
            )
            for k in range(2)
        ]
        super().__init__(links, boxes)
        self.fake, self.lanes = fake, [fake.Stream(), fake.Stream()]

    def send(self, value, kind="F"):
        with self.lanes[kind == "B"]:
            return super().send(value, kind)

    def receive(self, key, timeout_s=20):
        with self.lanes[key.target]:
            return super().receive(key, timeout_s)


@pytest.fixture
def fake(monkeypatch):
    fake = Account()
    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(cuda, "cuda", fake)
    return fake


@pytest.fixture
def made(fake):
    made = DeviceEnds(fake, None)
    yield made
    for link in made.links:
        link.close(10)


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
    assert len(made.slots._driver.allocated) == 1  # carved up


def test_slots_are_used_again(made):
    for n in range(50):
        assert float(made.pass_on(torch.full((1000,), float(n))).sum()) == 1000.0 * n
    assert slots_in_use(made) <= 2


def test_slots_grow_and_the_outgrown_serve_others(made):
    for n in (10, 100_000, 10, 2_000_000):
        assert float(made.pass_on(torch.ones(n)).sum()) == n
    driver = made.slots._driver
    assert [memory.numel() for memory in driver.allocated] == [2 << 20, 2 << 20, 8 << 20]
    assert len(made.slots._spare) == driver.slots - slots_in_use(made)


def test_events_order_writing_and_reading(made):
    sender, receiver = made.lanes
    source = sender.operate()
    arrived = made.pass_on(torch.ones(1000))
    assert receiver.follows(source)
    read = receiver.operate()
    del arrived
    (slot,) = made.links[0]._outgoing_slots.values()
    made.receive(made.send(torch.ones(1000)))
    copies = made.links[0]._copies
    assert copies.follows(read)  # else the copy could overwrite what is still being read
    assert not sender.follows(read)  # the sending lane waits for nobody
    assert slot.full.clock[sender.number] >= source[1]


def test_the_allocator_knows_that_what_is_sent_is_copied_later(made, monkeypatch):
    told = []
    monkeypatch.setattr(made.fake, "holds", lambda tensor: True)
    monkeypatch.setattr(made.fake, "record_stream", lambda tensor, stream: told.append((tensor, stream)))
    value = torch.ones(10)
    made.pass_on(value)
    assert [(tensor.data_ptr(), stream) for tensor, stream in told] == [
        (value.data_ptr(), made.links[0]._copies)
    ]


def test_activations_may_travel_narrower(fake):
    made = DeviceEnds(fake, torch.bfloat16)
    value = torch.randn(64)
    arrived = made.pass_on(value)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, value.bfloat16().float())
    evaluated = made.pass_on(value, "E")
    assert torch.equal(evaluated, value)
    del arrived, evaluated  # they read their slots, which closing waits for
    for link in made.links:
        link.close(10)


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
    assert made.links[0]._copies.follows(read)


# ---- the life of memory --------------------------------------------------------------------------------------


def test_pipelines_one_after_another_use_the_same_memory(fake):
    slots = DeviceSlots(HostDriver(fake))
    for _ in range(5):
        made = DeviceEnds(fake, None, slots)
        kept = [made.pass_on(torch.ones(size)) for size in (1000, 300_000) for _ in range(3)]
        del kept
        for link in made.links:
            link.close(10)
        assert len(slots._driver.allocated) == 1 + 3
        assert len(slots._spare) == slots._driver.slots == 32 + 3
        assert len(slots._opened) <= slots._driver.slots
        assert len(slots._blocks) == 1 + 3


def test_closing_waits_until_the_device_has_read_what_was_sent(fake, monkeypatch):
    made = DeviceEnds(fake, None)
    arrived = made.pass_on(torch.ones(10))
    closing = threading.Thread(target=made.links[0].close, args=(20,))
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive(), "a tensor still reads the slot"
    happened = False
    monkeypatch.setattr(Event, "query", lambda event: happened)
    del arrived
    time.sleep(0.05)
    assert closing.is_alive(), "the slot has come back, and the device has not read it"
    assert len(made.slots._spare) < made.slots._driver.slots
    happened = True
    closing.join(limit(10))
    assert not closing.is_alive()
    assert len(made.slots._spare) == made.slots._driver.slots
    made.links[1].close(10)


def test_closing_waits_until_the_device_has_copied_and_read(fake, monkeypatch):
    """An event that has not happened keeps the slot, whichever of the two it is."""
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    for late in ("full", "free"):
        made = DeviceEnds(fake, None)
        made.pass_on(torch.ones(10))
        (slot,) = made.links[0]._outgoing_slots.values()
        monkeypatch.setattr(getattr(slot, late), "query", lambda: False)
        for link in made.links:
            link.close(10)
        assert len(made.slots._spare) == made.slots._driver.slots - 1


def test_a_slot_that_never_comes_back_serves_nobody_else(fake, monkeypatch):
    monkeypatch.setattr(cuda, "_RETURN_S", 0.05)
    made = DeviceEnds(fake, None)
    arrived = made.pass_on(torch.ones(10))
    made.links[0].close(10)
    assert len(made.slots._spare) == made.slots._driver.slots - 1
    assert float(arrived.sum()) == 10
    made.links[1].close(10)


def test_what_is_offered_is_read_after_it_is_written(fake, monkeypatch):
    monkeypatch.setattr(cuda, "device_id", lambda device: "the same")
    slots = DeviceSlots(HostDriver(fake))
    writer, reader = fake.Stream(), fake.Stream()
    with writer:
        written = writer.operate()
        offer = slots.offer()
    with reader:
        slots.check(offer)
    assert reader.follows(written)


class Library:
    """Stands for libcuda: every thread must have made the context its current one, and memory is there on request."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes, self.thread, self.calls = free_bytes, threading.local(), []

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, index: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        context._obj.value = 7
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.thread.context = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.thread.context = None
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of memory"
        return 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if getattr(self.thread, "context", None) != 7:
                return 201  # CUDA_ERROR_INVALID_CONTEXT
            return 2 if name == "cuMemAlloc_v2" and arguments[1].value > self.free_bytes else 0

        return call


@pytest.fixture
def library(fake, monkeypatch):
    library = Library(4 << 20)
    monkeypatch.setattr(driver_module, "_load", lambda: library)
    monkeypatch.setattr(cuda, "driver", driver_module.Driver)
    fake.init = lambda: None
    fake.empty_cache = lambda: setattr(library, "free_bytes", 8 << 20)
    return library


def test_any_thread_may_call_the_driver(library):
    driver, found = Driver(torch.device("cuda", 0)), []
    thread = threading.Thread(target=lambda: found.append((driver.allocate(1), driver.open(bytes(64)))))
    thread.start()
    thread.join(limit(10))
    assert len(found) == 1
    assert library.calls == ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"]


def test_memory_that_torch_keeps_is_taken_before_it_is_missed(library):
    driver = Driver(torch.device("cuda", 0))
    driver.allocate(8 << 20)
    assert library.calls == ["cuMemAlloc_v2", "cuMemAlloc_v2", "cuIpcGetMemHandle"]
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2: out of memory"):
        driver.allocate(16 << 20)
