"""The link through slots of device memory, with slots in host memory and streams that keep account."""

from __future__ import annotations

import ctypes
import itertools
import os

import pytest
import torch

from avgpipe import device as streams
from avgpipe.links import cuda
from avgpipe.links.cuda import CudaIpcLink, Slot
from avgpipe.links.link import Endpoint, LocalLink, Mailbox
from avgpipe.links.message import Channel, Format, Message
from avgpipe.links.shared import Inbox
from avgpipe_ext import ring
from tests.happens_before.clocks import Account, Event, Stream
from tests.links.ends import BACK, CHANNELS, CPU, Ends

pytestmark = pytest.mark.skipif(not ring.supported(), reason="needs Linux")


UPDATES = Channel(Message.REFERENCE_UPDATE, 0, 0, 1)


class HostSlots:
    """Slots that all ends in this process can open."""

    def __init__(self, fake: Account) -> None:
        self._fake = fake
        self.made: list[Slot] = []
        self.given: list[Slot] = []
        self._numbers = itertools.count(1)

    def make(self, size: int) -> Slot:
        record = next(self._numbers).to_bytes(4 * cuda.HANDLE_BYTES, "little")
        self.made.append(
            Slot(torch.zeros(size, dtype=torch.uint8), self._fake.Event(), self._fake.Event(), record)
        )
        return self.made[-1]

    def give(self, slot: Slot) -> None:
        self.given.append(slot)

    def open(self, record: bytes) -> Slot:
        return next(slot for slot in self.made if slot.record == record)

    def lend(self, slot: Slot, lease: object, reader: Stream) -> torch.Tensor:
        class Loan(ctypes.Array):
            _type_, _length_ = ctypes.c_ubyte, slot.memory.numel()

            def __del__(self) -> None:
                slot.free.record(self.reader)
                self.lease = None

        loan = Loan.from_address(slot.memory.data_ptr())
        loan.lease, loan.reader = lease, reader
        return torch.frombuffer(loan, dtype=torch.uint8)


class DeviceEnds(Ends):
    """Stage 0 and 1; each receives on a stream of its own."""

    def __init__(self, fake: Account, wire_dtype: torch.dtype | None) -> None:
        into = [BACK, [*CHANNELS, UPDATES]]
        inboxes = [Inbox.create(channels) for channels in into]
        opened = [Inbox.open(inbox.offer(), channels) for inbox, channels in zip(inboxes, into)]
        boxes = [Mailbox(inbox.bell) for inbox in inboxes]
        self.slots = HostSlots(fake)
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


def test_a_slot_is_not_written_while_a_tensor_reads_it(made):
    kept = [made.pass_on(torch.full((1000,), float(n))) for n in range(12)]
    views = [x[500:] for x in kept]
    del kept
    made.pass_on(torch.full((1000,), 99.0))
    assert [float(v[0]) for v in views] == [float(n) for n in range(12)]
    assert len(made.slots.made) == 13


def test_slots_are_used_again(made):
    for n in range(50):
        assert float(made.pass_on(torch.full((1000,), float(n))).sum()) == 1000.0 * n
    assert len(made.slots.made) <= 2


def test_slots_grow_and_the_outgrown_are_given_back(made):
    for n in (10, 100_000, 10, 200_000):
        assert float(made.pass_on(torch.ones(n)).sum()) == n
    assert len(made.slots.given) == len(made.slots.made) - len(
        set(map(id, made.links[0]._outgoing_slots.values()))
    )


def test_events_order_writing_and_reading(made):
    sender, receiver = made.lanes
    source = sender.operate()
    arrived = made.pass_on(torch.ones(1000))
    assert receiver.follows(source)
    read = receiver.operate()
    del arrived
    (slot,) = made.slots.made
    made.receive(made.send(torch.ones(1000)))
    copies = made.links[0]._copies
    assert copies.follows(read)  # else the copy could overwrite what is still being read
    assert not sender.follows(read)  # the sending lane waits for nobody
    assert slot.full.clock[sender.number] >= source[1]


def test_what_is_sent_is_kept_until_it_is_copied(made, monkeypatch):
    done = False
    monkeypatch.setattr(Event, "query", lambda self: done)
    for _ in range(3):
        made.pass_on(torch.ones(10))
    assert len(made.links[0]._copying) == 3
    done = True
    made.pass_on(torch.ones(10))
    assert not made.links[0]._copying


def test_activations_may_travel_narrower(fake):
    made = DeviceEnds(fake, torch.bfloat16)
    value = torch.randn(64)
    arrived = made.pass_on(value)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, value.bfloat16().float())
    evaluated = made.pass_on(value, "E")
    assert torch.equal(evaluated, value)
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
    made.receive(made.send(torch.ones(1000)))
    assert made.links[0]._copies.follows(read)
    assert not made.lanes[1].follows(read)
