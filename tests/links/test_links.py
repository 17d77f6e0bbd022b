"""What every link promises, over each of them, with both ends in this process."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from avgpipe import device as streams
from avgpipe.errors import PeerLost
from avgpipe.links import codec, group
from avgpipe.links.choose import Links
from avgpipe.links.codec import Format
from avgpipe.links.group import GroupLink, Room
from avgpipe.links.link import Channel, Key, LocalLink, Mailbox, Message
from avgpipe.links.transport import Endpoint
from tests.happens_before.clocks import Account, Event
from tests.links.ends import CPU, LINKS, Ends, ends, groups
from tests.patience import limit


@pytest.fixture(params=LINKS)
def pair(request: pytest.FixtureRequest) -> Any:
    with ends(request.param) as made:
        yield made


def message(n: int, size: int) -> Any:
    return {"x": torch.full((size,), float(n)), "n": n % 3, "odd": n % 2 == 1, "y": torch.tensor(n)}


def assert_message(got: Any, n: int, size: int) -> None:
    assert got["x"].shape == (size,)
    assert (got["x"] == n).all()
    assert (got["n"], got["odd"], int(got["y"])) == (n % 3, n % 2 == 1, n)


def test_messages_arrive_once_and_as_they_were(pair: Ends) -> None:
    for n in range(300):
        assert_message(pair.pass_on(message(n, n % 7)), n, n % 7)
    assert not any(box.messages for box in pair.mailboxes)


def test_the_sender_may_change_what_it_sent(pair: Ends) -> None:
    x = torch.zeros(50_000)
    keys = []
    for n in range(8):
        x.fill_(n)
        keys.append(pair.send(x))
    x.fill_(-1)
    for n, key in enumerate(keys):
        assert (pair.receive(key) == n).all()


def test_sizes_may_change_up_and_down(pair: Ends) -> None:
    dice = random.Random(1)
    sizes = [0, 1, 1 << 20, 10, 5000, 1 << 21, 3, *(int(2 ** dice.uniform(0, 19)) for _ in range(60))]
    for n, size in enumerate(sizes):
        assert_message(pair.pass_on(message(n, size)), n, size)


def test_sizes_may_change_by_less_than_their_padding(pair: Ends) -> None:
    """Of activations that travel from where they lie, after all posted receives are for one of them."""
    for n, size in enumerate([25_001, 25_005, *[25_001] * 10, 25_005, 25_001]):
        got = pair.pass_on(torch.full((size,), float(n)))
        assert got.shape == (size,)
        assert (got == n).all()


def test_sizes_may_change_while_many_are_under_way(pair: Ends) -> None:
    """More than any receive that was posted, in both directions, before the other end has looked at one."""
    dice = random.Random(2)
    sizes = [int(2 ** dice.uniform(0, 17)) for _ in range(60)]
    forth = [pair.send(message(n, size)) for n, size in enumerate(sizes)]
    back = [pair.send(message(n, size), "B") for n, size in enumerate(reversed(sizes))]
    for n, size in enumerate(sizes):
        assert_message(pair.receive(forth[n]), n, size)
        assert_message(pair.receive(back[n]), n, sizes[-1 - n])


def test_a_message_without_tensors(pair: Ends) -> None:
    for n in range(5):
        assert pair.pass_on([n, None, "text"]) == [n, None, "text"]
        assert pair.pass_on([None, None]) == [None, None]


def test_kept_tensors_keep_their_values(pair: Ends) -> None:
    """An alias of what arrived, as a Carry keeps one, costs memory and never becomes another batch's values."""
    kept: dict[int, torch.Tensor] = {}
    dice = random.Random(3)
    for n in range(400):
        x = pair.pass_on({"h": torch.full((600,), float(n)), "x": torch.zeros(n % 11)})["h"]
        kept[n] = x[dice.randrange(500) :].view(-1) if n % 3 else x.detach()
        if len(kept) > 20:
            del kept[dice.choice(list(kept))]
        for m, tensor in kept.items():
            assert (tensor == m).all(), (n, m)


def test_what_autograd_saved_keeps_its_values(pair: Ends) -> None:
    weight = torch.ones(100, requires_grad=True)
    outputs = []
    for n in range(6):
        x = pair.pass_on(torch.full((100,), float(n)).requires_grad_())
        outputs.append((weight * x).sum())
        del x
    for _ in range(20):
        pair.pass_on(torch.full((100,), -1.0))
    for n, output in enumerate(outputs):
        weight.grad = None
        output.backward()
        assert (weight.grad == n).all()


def test_a_tensor_outlives_its_link() -> None:
    for kind in LINKS:
        with ends(kind) as pair:
            kept = [pair.pass_on(torch.full((3000,), float(n))) for n in range(3)]
        del pair
        gc.collect()
        assert [int(x.sum()) for x in kept] == [0, 3000, 6000]


def test_writing_to_what_arrived_changes_nothing_else(pair: Ends) -> None:
    source = torch.ones(100)
    got = pair.pass_on(source)
    got.add_(5)
    assert (source == 1).all()
    assert (pair.pass_on(source) == 1).all()
    assert (got == 6).all()


def test_channels_do_not_wait_for_each_other(pair: Ends) -> None:
    many = [pair.send(torch.full((100_000,), float(n))) for n in range(20)]
    other = pair.send(torch.ones(1), "E")
    assert pair.receive(other) == 1
    for n, key in enumerate(many):
        assert (pair.receive(key) == n).all()


def test_a_receiver_that_waits_wakes(pair: Ends) -> None:
    got: list[Any] = []
    keys = [pair.key() for _ in range(100)]
    thread = threading.Thread(target=lambda: got.extend(float(pair.receive(key)) for key in keys))
    thread.start()
    for n, key in enumerate(keys):
        pair.links[0].send(key, torch.tensor(float(n)))
    thread.join(limit(30))
    assert got == list(range(100))


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrower_wire_narrows_training_alone(kind: str, wire_dtype: torch.dtype) -> None:
    with ends(kind, wire_dtype) as pair:
        x = torch.randn(1000, 3, dtype=torch.float64).T
        for _ in range(4):
            for name in "FB":
                got = pair.pass_on(x.clone().requires_grad_(), name)
                assert got.requires_grad
                assert torch.equal(got.detach(), x.to(wire_dtype).double())
            assert torch.equal(pair.pass_on(x, "E"), x)


def test_payloads_end_in_the_thread_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy copy must not end in one thread while the tensor that it is of ends in another: torch allows that not."""
    ended: list[int] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.reshape(-1).view(torch.uint8).clone()
        weakref.finalize(copy, lambda: ended.append(threading.get_ident()))
        return copy

    monkeypatch.setattr(group, "_copied_lazily", copied)
    with ends("gloo") as pair:
        for _ in range(3):
            keys = [pair.send(torch.ones(100_000)) for _ in range(5)]
            for key in keys:
                assert (pair.receive(key) == 1).all()
    del pair
    gc.collect()
    assert len(ended) >= 10  # those whose format the other end knew
    assert set(ended) == {threading.get_ident()}


def test_what_cannot_travel_leaves_the_link_in_order(pair: Ends) -> None:
    pair.pass_on(torch.ones(2))
    with pytest.raises(TypeError, match="a stage returned a set"):
        pair.send([torch.ones(2), {1}])
    assert (pair.pass_on(torch.ones(2)) == 1).all()


# ---- the link by shared memory -----------------------------------------------------------------------------------


def slots(pair: Ends) -> int:
    return sum(sender.slots()[0] for sender, _ in pair.links[0]._outgoing.values())


def test_slots_in_use_are_as_many_as_messages_kept() -> None:
    with ends("shm") as pair:
        for in_flight in (1, 4, 9):
            kept: list[Any] = []
            for n in range(200):
                kept.append(pair.pass_on(torch.full((100,), float(n))))
                del kept[: max(0, len(kept) - in_flight)]
            assert slots(pair) == in_flight + 1, "those kept, and the one that is being written"
            kept.clear()


def test_slots_grow_with_messages_and_do_not_multiply() -> None:
    with ends("shm") as pair:
        for power in range(6, 21):
            assert pair.pass_on(torch.ones(1 << power)).shape == (1 << power,)
        assert slots(pair) == 1
        sender, _ = next(iter(pair.links[0]._outgoing.values()))
        assert sender.slots()[1] < 2 * 4 * (1 << 20)


# ---- the link by torch.distributed -------------------------------------------------------------------------------


@given(st.lists(st.integers(1 << 16, 1 << 23), max_size=50))
def test_both_ends_find_the_same_room(payloads: list[int]) -> None:
    """The receiver posts each receive before it knows the payload; the sender, ahead by any number, agrees."""
    sender, receiver = Room(), Room()
    posted: list[int] = []
    says = [sender.next(size)[0] for size in payloads]
    for n, size in enumerate(payloads):
        room, more = receiver.next(size)
        assert room == says[n] == (posted.pop(0) if posted else 0)
        posted += more
        largest = max(payloads[max(0, n - 7) : n + 1])
        assert all(bytes == largest for bytes in more)
        assert 1 <= len(posted) <= 2


def test_payloads_of_a_size_that_was_seen_fit_their_receives() -> None:
    for size, ahead in ((100_000, 2), (10_000_000, 1)):
        room = Room()
        assert room.next(size) == (0, [size] * ahead)
        assert [room.next(size) for _ in range(5)] == [(size, [size])] * 5


def test_receives_shrink_when_large_payloads_are_long_gone() -> None:
    room = Room()
    assert [room.next(size)[0] for size in [10**6, *[10**5] * 10]] == [0, *[10**6] * 9, 10**5]


@pytest.mark.parametrize("kind", list("FB"))
def test_what_is_sent_is_copied_only_if_it_is_written_to(kind: str) -> None:
    """Before it has left: a message that waits in line costs no memory."""
    with ends("gloo") as pair:
        for n in range(20):
            x = torch.full((1 << 18,), float(n), requires_grad=True) * 1
            key = pair.send(x, kind)
            if n % 2:
                x.data.fill_(-1)
            got = pair.receive(key)
            assert (got == n).all()
            assert got.requires_grad


def test_what_memory_lazy_copies_cannot_have_is_copied_at_once() -> None:
    """As what came through shared memory and is passed on, or a part of what is larger."""
    with ends("gloo") as pair:
        for x in (torch.frombuffer(bytearray(1 << 20), dtype=torch.float32), torch.zeros(1 << 20)[: 1 << 18]):
            key = pair.send(x)
            x.fill_(-1)
            assert (pair.receive(key) == 0).all()


def test_small_tensors_do_not_keep_the_envelopes_that_they_came_in() -> None:
    with ends("gloo") as pair:
        kept = [pair.pass_on(torch.full((100,), float(n))) for n in range(30)]
        assert [float(x[0]) for x in kept] == list(range(30))
        assert all(x.untyped_storage().nbytes() < 1024 for x in kept)


def test_a_link_has_a_thread_for_each_direction_and_none_for_what_never_comes() -> None:
    before = threading.active_count()
    with ends("gloo") as pair:
        assert threading.active_count() - before == 4, "two ends, two directions"
        pair.pass_on(torch.ones(1))
    assert threading.active_count() == before
    group_0, group_1 = groups(2)
    out = [Channel(Message.ACTIVATION, 0, 0, 1)]
    one_way = [
        GroupLink(group_0, 1, PeerLost, Endpoint(Mailbox(), CPU, outgoing=out)),
        GroupLink(group_1, 0, PeerLost, Endpoint(Mailbox(), CPU, out)),
        GroupLink(group_1, 0, PeerLost, Endpoint(Mailbox(), CPU)),
    ]
    assert threading.active_count() - before == 2
    for link in one_way:
        link.leave()
    for link in one_way:
        link.close(10)


# ---- within a process --------------------------------------------------------------------------------------------


def test_a_local_link_hands_over_without_a_copy() -> None:
    box = Mailbox()
    link = LocalLink(box, CPU)
    x = (torch.ones(3, requires_grad=True) * 2).exp()
    for key, value in ((Key("F", 0, 0, 1, 0, 0), x), (Key("F", 0, 0, 1, 0, 1), {"a": x, "b": (1, None)})):
        link.send(key, value)
        got = box.take(key)
        got = got if isinstance(got, torch.Tensor) else got["a"]
        assert got.data_ptr() == x.data_ptr()
        assert got.is_leaf
        assert got.requires_grad
    with pytest.raises(TypeError, match="a stage returned a set"):
        link.send(Key("F", 0, 0, 1, 0, 2), [{1}])


# ---- closing -----------------------------------------------------------------------------------------------------


def test_closing_waits_until_the_peer_has_taken_what_was_sent_last() -> None:
    """Else its memory would end before a slower peer has looked into it."""
    with ends("shm") as pair:
        key = pair.send(torch.arange(5.0))
        closing = threading.Thread(target=pair.links[key.source].close, args=(10,))
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        assert torch.equal(pair.receive(key), torch.arange(5.0))
        closing.join(limit(20))
        assert not closing.is_alive()
        pair.links.pop(key.source)


def test_closing_does_not_wait_for_what_the_peer_never_takes() -> None:
    """Sent before the peer has closed, and after: it lives on, as one that makes its next Pipeline does."""
    with ends("shm") as pair:
        pair.send(torch.arange(5.0))
        pair.links[1].close(10)
        pair.send(torch.arange(5.0))
        most, begin = limit(5), time.monotonic()
        pair.links[0].close(2 * most)
        assert time.monotonic() - begin < most
        pair.links.clear()


# ---- the end of a link -------------------------------------------------------------------------------------------


def gate(link: Any) -> threading.Event:
    """Hold up the thread that receives, as a slow line would."""
    decoder = link._incoming[0].decoder
    opened, decode = threading.Event(), decoder.decode

    def late(*args: Any) -> Any:
        opened.wait(20)
        return decode(*args)

    decoder.decode = late
    return opened


def test_what_was_sent_last_arrives_although_the_sender_leaves() -> None:
    """More than the receives that are posted hold; and the end of another link of the same group changes nothing."""
    groups_of_3, boxes = groups(3), [Mailbox() for _ in range(3)]
    from_0, from_1 = [Channel("F", 0, 0, 1)], [Channel("F", 0, 1, 2)]

    def link(here: int, there: int, incoming: list[Channel], outgoing: list[Channel]) -> GroupLink:
        return GroupLink(groups_of_3[here], there, PeerLost, Endpoint(boxes[here], CPU, incoming, outgoing))

    at_0, to_0 = link(0, 1, [], from_0), link(1, 0, from_0, [])
    to_2, at_2 = link(1, 2, [], from_1), link(2, 1, from_1, [])
    at_0.leave()
    opened = gate(at_2)
    keys = [Key("F", 0, 1, 2, n, 0) for n in range(12)]
    for n, key in enumerate(keys):
        to_2.send(key, torch.full((5000,), float(n)))
    links = Links.__new__(Links)
    links._by_rank, links.mailbox = {0: to_0, 2: to_2}, boxes[1]
    leaving = threading.Thread(target=links.close, args=(30,))
    leaving.start()
    leaving.join(1.0)  # it waits now, or has broken what it should have waited for
    opened.set()
    box = boxes[2]
    assert box.wait_until(lambda: keys[-1] in box, limit(20), lambda: [k for k in keys if k not in box])
    leaving.join(limit(30))
    assert [int(box.take(key)[0]) for key in keys] == list(range(12))
    for end in (at_0, at_2):
        end.close(10)


@pytest.mark.parametrize("kind", LINKS)
def test_what_comes_to_a_device_waits_for_nothing_that_the_callers_stream_holds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as another pipeline's batch, whose lane that stream waits for when its loss is read."""
    fake, copied = Account(), []
    read = Format.read

    def noted(*arguments: Any) -> Any:
        copied.append(fake.current_stream().operate())
        return read(*arguments)

    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(Format, "read", noted)
    lane, held = fake.Stream(), fake.current_stream().operate()
    with ends(kind) as made:
        key = made.send(torch.ones(3))
        box = made.mailboxes[1]
        assert box.wait_until(lambda: key in box, limit(20))
        with lane:
            assert torch.equal(box.take(key), torch.ones(3))
        assert lane.follows(copied[0])
        assert not lane.follows(held)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("kind", LINKS)
def test_a_sender_through_the_host_does_not_wait_for_the_device(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread does, before it sends; what is sent later comes later, although it is in the host's memory."""
    fake, happened = Account(), threading.Event()
    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(fake, "holds", lambda tensor: True)
    awaited: list[Event] = []

    def synchronize(event: Event) -> None:
        awaited.append(event)
        assert happened.wait(20)

    monkeypatch.setattr(Event, "synchronize", synchronize)
    lane = fake.Stream()
    with ends(kind) as made:
        with lane:
            stream, number = lane.operate()
            key = made.send(torch.ones(size))
        monkeypatch.setattr(fake, "holds", lambda tensor: False)
        following = made.send(torch.zeros(2))
        box = made.mailboxes[1]
        assert not box.wait_until(lambda: key in box or following in box, 0.05)
        happened.set()
        assert torch.equal(made.receive(key), torch.ones(size))
        assert torch.equal(made.receive(following), torch.zeros(2))
    assert awaited[0].clock[stream] == number  # what the lane had issued, and the copy with it


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("message", ["F", "B", "E"])
@pytest.mark.parametrize("kind", LINKS)
def test_no_lane_waits_until_an_activation_is_copied_to_the_host(
    kind: str, message: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing writes to it or to a gradient; to what else is sent the lane's next step may write."""
    fake, looked_at, told, copied = Account(), threading.Event(), list[Any](), list[Any]()
    write = Format.write

    def noted(*arguments: Any) -> None:
        copied.append(fake.current_stream().operate())
        write(*arguments)

    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(fake, "holds", lambda tensor: True)
    monkeypatch.setattr(
        fake, "record_stream", lambda tensor, stream: told.append((tensor.data_ptr(), stream))
    )
    monkeypatch.setattr(Format, "write", noted)
    awaited: list[Event] = []

    def synchronize(event: Event) -> None:
        awaited.append(event)
        assert looked_at.wait(20)

    monkeypatch.setattr(Event, "synchronize", synchronize)
    lane, value = fake.Stream(), torch.ones(size)
    with ends(kind) as made:
        with lane:
            source = lane.operate()
            key = made.send(value, message)
        goes_on = message != "E"
        assert lane.follows(copied[0]) is not goes_on
        assert [pointer for pointer, _ in told] == [value.data_ptr()] * goes_on
        assert all(stream.follows(copied[0]) for _, stream in told)
        looked_at.set()
        assert torch.equal(made.receive(key), value)
    clock = awaited[0].clock
    assert all(clock[stream] >= number for stream, number in (source, copied[0]))


@pytest.mark.parametrize("kind", LINKS)
def test_no_message_waits_on_its_way_to_the_host_for_another_lane(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel's copies are on a stream of their own."""
    fake = Account()
    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(fake, "holds", lambda tensor: True)
    awaited: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: awaited.append(event))
    late, lane = fake.Stream(), fake.Stream()
    second = Channel(Message.ACTIVATION, 1, 0, 1)
    with ends(kind, more=[second]) as made:
        with late:
            held = late.operate()
            made.receive(made.send(torch.ones(10)))
        with lane:
            key = made.key()._replace(pipeline=1)
            made.links[0].send(key, torch.ones(10))
            made.receive(key)
    assert awaited[0].clock[held.stream] == held.number
    assert held.stream not in awaited[1].clock


def test_payloads_for_a_device_arrive_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one finds no receive posted, the second one is too large for that, and the third one fits."""
    fake, read = Account(), list[int]()
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(streams, "backend", fake)

    def pinned_bytes(size: int) -> torch.Tensor:
        pinned.append(torch.empty(size, dtype=torch.uint8))
        return pinned[-1]

    reads = Format.read

    def noted(self: Format, memory: Any, *arguments: Any) -> Any:
        read.append(memory.data_ptr())
        return reads(self, memory, *arguments)

    monkeypatch.setattr(fake, "pinned_bytes", pinned_bytes)
    monkeypatch.setattr(Format, "read", noted)
    with ends("gloo") as made:
        for size in (100_000, 200_000, 200_000):
            assert made.pass_on(torch.ones(size)).numel() == size
    assert len(set(read)) == 3
    assert set(read) <= {memory.data_ptr() for memory in pinned}


@pytest.mark.parametrize("pinned", [True, False])
def test_the_copy_to_a_device_is_awaited_unless_its_source_is_pinned(pinned: bool) -> None:
    """Torch keeps pinned memory until it has been read, and no other."""
    asked: list[Any] = []
    value: Any = SimpleNamespace(
        is_pinned=lambda: pinned, to=lambda *where, **how: asked.append((where, how))
    )
    codec._on(CPU, value)
    assert asked == [((CPU,), {"non_blocking": pinned})]


def test_closing_sends_what_the_device_has_not_copied_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, happened = Account(), threading.Event()
    monkeypatch.setattr(streams, "backend", fake)
    monkeypatch.setattr(fake, "holds", lambda tensor: True)
    monkeypatch.setattr(Event, "synchronize", lambda event: happened.wait(20))
    with ends("shm") as made:
        key = made.send(torch.ones(10))
        closing = threading.Thread(target=made.links[0].close, args=(20,))
        closing.start()
        happened.set()
        assert torch.equal(made.receive(key), torch.ones(10))
        closing.join(limit(20))
        made.links.pop(0)
