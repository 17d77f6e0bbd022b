"""Links between two simulated devices: what arrives is what was sent, in every order of a few.

CUDA IPC with slots and events of these devices, both ends in one process; and gloo, through pinned memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from avgpipe.errors import PeerLost
from avgpipe.links import codec, cuda, slots
from avgpipe.links.cuda import CudaIpcLink
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Channel, Key, Mailbox, Message
from avgpipe.links.shared import Inbox
from avgpipe.links.slots import DeviceMemory, DeviceSlots, Slot
from avgpipe.links.transport import Endpoint
from tests.links.ends import groups
from tests.patience import limit
from tests.simulated_device import POLICIES, simulate

HIDDEN = ("late", "random", "starved")  # policies under which mistakes are seen
SEEDS = 20
CHANNELS = [Channel(Message.ACTIVATION, n, 0, 1) for n in range(2)]  # of two pipelines
BACK = [Channel(Message.GRADIENT, n, 1, 0) for n in range(2)]
DEVICES = [torch.device("cpu"), torch.device("cpu")]  # replaced where the devices are known


class Host:
    """What two processes of a host can open: memory and events, by number."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        self.events: list[Any] = []

    def part(self, address: int, size: int) -> torch.Tensor:
        """The bytes at an address, as a tensor."""
        for block in self.memory:
            offset = address - block.data_ptr()
            if 0 <= offset < block.numel():
                return block[offset : offset + size]
        raise AssertionError(f"no block has {address}")


class SimulatedDriver:
    """Of a process with one of the two devices."""

    def __init__(self, host: Host, device: torch.device) -> None:
        self._host, self.device, self.identity = host, device, str(device)

    def check_access(self, identity: str) -> None:
        pass

    def allocate(self, size: int) -> tuple[int, bytes]:
        self._host.memory.append(torch.zeros(size, dtype=torch.uint8, device=self.device))
        torch.accelerator.synchronize(self.device)  # as memory of the driver, it has no stream
        return self._host.memory[-1].data_ptr(), len(self._host.memory).to_bytes(slots.HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return self._host.memory[int.from_bytes(handle, "little") - 1].data_ptr()

    def copy(self, target: int, source: int | torch.Tensor, size: int, stream: Any) -> None:
        there = self._host.part(target, size)
        here = source if isinstance(source, torch.Tensor) else self._host.part(source, size)
        # torch would let the other device's current stream wait too, which would hide an order that is missing.
        (other,) = {here.device, there.device} - {self.device}
        with torch.Stream(other), stream:
            there.copy_(here, non_blocking=True)

    def event(self) -> Any:
        number = len(self._host.events)

        class Shared(torch.Event):
            def ipc_handle(self) -> bytes:
                return number.to_bytes(slots.HANDLE_BYTES, "little")

        self._host.events.append(Shared(self.device))
        return self._host.events[-1]

    def open_event(self, handle: bytes) -> Any:
        return self._host.events[int.from_bytes(handle, "little")]

    def tensor(self, memory: DeviceMemory) -> torch.Tensor:
        storage: Any = torch._C._construct_storage_from_data_pointer(memory.pointer, self.device, memory.size)
        storage.memory = memory  # all tensors in it keep it
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


class SimulatedSlots(DeviceSlots):
    def push(self, source: torch.Tensor, slot: Slot) -> None:
        self._driver.copy(slot.address, source, source.numel(), self.current_stream())  # type: ignore[arg-type]


@contextmanager
def ipc() -> Iterator[list[Any]]:
    """Both ends of a link by CUDA IPC."""
    host, into = Host(), [BACK, CHANNELS]
    both = [SimulatedSlots(SimulatedDriver(host, device)) for device in DEVICES]  # type: ignore[arg-type]
    inboxes = [Inbox.create(channels) for channels in into]
    opened = [Inbox.open(inbox.offer(), channels) for inbox, channels in zip(inboxes, into)]
    ends = [Endpoint(Mailbox(inboxes[k].bell), DEVICES[k], into[k], into[1 - k]) for k in range(2)]
    yield [
        CudaIpcLink(inboxes[k], opened[1 - k], os.getpid(), ends[k], both[k], DEVICES[0] != DEVICES[1])
        for k in range(2)
    ]


@contextmanager
def gloo() -> Iterator[list[Any]]:
    """Both ends of a link by gloo."""
    into = [BACK, CHANNELS]
    ends = [Endpoint(Mailbox(), DEVICES[k], into[k], into[1 - k]) for k in range(2)]
    links = [GroupLink(group, 1 - k, PeerLost, end) for k, (group, end) in enumerate(zip(groups(2), ends))]
    try:
        yield links
    finally:
        for link in links:
            link.leave()
        for link in links:
            link.close(10)


def exchange(ends: Callable[[], Any], count: int = 6) -> list[str]:
    """Send in both directions, from two lanes of each device, which free what is sent; return what is wrong."""
    wrong = []
    with ends() as links:
        lanes = [[torch.Stream(device) for _ in CHANNELS] for device in DEVICES]
        kept: list[tuple[Any, torch.Tensor, float]] = []
        for n in range(count):
            keys = [Key(*channel, n, 0) for channel in (*CHANNELS, *BACK)]
            for key in keys:
                with lanes[key.source][key.pipeline]:
                    value = torch.full((20_000 << n % 2,), float(n), device=DEVICES[key.source])
                    links[key.source].send(key, value * (1 + key.pipeline))
                    del value
                    torch.full((40_000,), -1.0, device=DEVICES[key.source])  # takes memory that is free
            for key in keys:
                box, lane = links[key.target]._end.mailbox, lanes[key.target][key.pipeline]
                assert box.wait_until(lambda: key in box, limit(20))  # noqa: B023
                with lane:
                    kept.append((lane, box.take(key) + 1, n * (1.0 + key.pipeline) + 1))
            if n % 2:
                for lane, found, expected in kept:
                    with lane:
                        there = found.cpu()
                    if not bool((there == expected).all()):
                        wrong.append(f"{there.min()} to {there.max()}, not {expected}")
                kept.clear()
    return wrong


def run(
    ends: Callable[[], Any], policy: str, seed: int, mutant: Callable[[], Any] | None, crosses: bool
) -> list[str]:
    devices = [torch.device("sim:0"), torch.device("sim:1" if crosses else "sim:0")]
    own = SimpleNamespace(current_stream=torch.accelerator.current_stream, Stream=torch.Stream)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(slots, "cuda", own))
        stack.enter_context(mock.patch.dict(globals(), DEVICES=devices))
        stack.enter_context(simulate(policy, seed))
        if mutant is not None:
            stack.enter_context(mutant())
        return exchange(ends)


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("link", ["ipc", "gloo"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_arrives_is_what_was_sent_in_every_order(policy: str, link: str, crosses: bool) -> None:
    for seed in range(5):
        assert run(globals()[link], policy, seed, None, crosses) == []


def _nothing(*_: Any) -> None:
    """Not a mock, which would keep the tensors that it is given."""


def _without(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, _nothing)


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "slots are read before they are full": (
        "ipc",
        lambda: mock.patch.object(
            cuda._InSlot,
            "received",
            lambda self: self._format.read(
                self._slots.lend(self._slot, self.value, self._slots.current_stream(), self._returns),
                0,
                self._device,
            ),
        ),
    ),
    "the allocator knows nothing of copies between devices": ("ipc", _without(cuda, "used_on")),
    "the allocator knows nothing of copies to the host": ("gloo", _without(codec, "used_on")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_order_that_is_left_out_is_seen_where_the_device_is_late(mutant: str) -> None:
    link, patch = MUTANTS[mutant]
    assert run(globals()[link], "eager", 0, patch, True) == []
    assert any(run(globals()[link], policy, seed, patch, True) for policy in HIDDEN for seed in range(SEEDS))
