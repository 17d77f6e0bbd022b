"""What the hardware has less of than a program may hope: queues that streams share, kernels that spin, late loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated_device import POLICIES, Hardware, simulate
from tests.simulated_device.hosts import Deadlock, Hosts
from tests.simulated_device.nccl import Communicator, device_of

SIM = "sim:0"


# ---- queues ----------------------------------------------------------------------------------------------------------


def in_circle(hardware: Hardware) -> None:
    """Two streams; the second one waits for the first one, which is issued later.

    So with one queue the device waits for itself.
    """
    first, second = torch.Stream(SIM), torch.Stream(SIM)
    x = torch.zeros(2, device=SIM)
    torch.accelerator.current_stream(SIM).synchronize()
    meeting = Communicator("a", 0, 2, torch.device(SIM))
    other = Communicator("a", 1, 2, torch.device(SIM))
    with first:
        meeting.all_reduce(x).wait()
    with second:
        other.all_reduce(torch.ones(2, device=SIM)).wait()
        second.synchronize()
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_waits_at_the_head_of_a_queue_holds_up_all_behind_it(policy: str) -> None:
    for queues in (0, 8):
        with simulate(policy, 1, hardware=Hardware(queues)):
            in_circle(Hardware(queues))
    with (
        simulate(policy, 1, hardware=Hardware(1)),
        pytest.raises(RuntimeError, match=r"deadlock: .* spins in sum 0"),
    ):
        in_circle(Hardware(1))


def test_a_wait_for_an_event_holds_up_other_streams_too() -> None:
    for queues, order in ((0, [1, 2]), (1, [2, 1])):
        with simulate("late", hardware=Hardware(queues), keeps_log=True) as sim:
            streams = [torch.Stream(SIM) for _ in range(3)]
            x, y = torch.zeros(1, device=SIM), torch.zeros(1, device=SIM)
            for stream in streams:
                stream.wait_stream(torch.accelerator.current_stream(SIM))
            with streams[0]:
                x.add_(1)
            streams[1].wait_stream(streams[0])
            with streams[1]:
                x.mul_(3)
            with streams[2]:
                y.sub_(1)
            streams[2].synchronize()
            ran = [line.split()[1] for line in sim.log if line.split()[1] in ("aten::mul", "aten::sub")]
            assert ran == (["aten::sub"] if order == [1, 2] else ["aten::mul", "aten::sub"])


def test_streams_are_some_of_a_pool() -> None:
    with simulate(hardware=Hardware(has_pool=True)):
        streams = [torch.Stream(SIM) for _ in range(40)]
        assert len({stream.stream_id for stream in streams}) == 32
        urgent = Communicator("a", 0, 2, torch.device(SIM), is_urgent=True).stream
        assert urgent.stream_id not in {stream.stream_id for stream in streams}
    with simulate():
        assert len({torch.Stream(SIM).stream_id for _ in range(40)}) == 40


# ---- kernels that spin -----------------------------------------------------------------------------------------------


def summed(orders: list[list[int]], hardware: Hardware, policy: str, seed: int) -> list[list[float]]:
    """What two ranks make of sums on two communicators, each rank in its order."""
    with simulate(policy, seed, hardware=hardware):
        hosts = Hosts(2, seed)

        def host(rank: int) -> list[float]:
            torch.accelerator.set_device_index(rank)
            device = device_of(rank)
            groups = [Communicator(name, rank, 2, device) for name in "ab"]
            lanes = [torch.Stream(device) for _ in range(2)]
            sums: list[Any] = [None, None]
            for n in orders[rank]:
                with lanes[n]:
                    sums[n] = torch.full((3,), float(rank + 1 + n), device=device)
                    groups[n].all_reduce(sums[n]).wait()
                    sums[n] = sums[n] * 10
                hosts.may_switch(rank)
            for lane in lanes:
                lane.synchronize()
            return [float(each.cpu()[0]) for each in sums]

        return hosts.run([lambda rank=rank: host(rank) for rank in range(2)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right_in_one_order_whatever_the_queues(policy: str, seed: int) -> None:
    for queues in (0, 2, 1):
        for order in ([0, 1], [1, 0]):
            found = summed([order, order], Hardware(queues, loads_late=True), policy, seed)
            assert found == [[30.0, 50.0]] * 2


def test_sums_in_different_orders_need_a_queue_for_each_stream() -> None:
    assert summed([[0, 1], [1, 0]], Hardware(), "random", 1) == [[30.0, 50.0]] * 2
    for hardware in (Hardware(queues=1), Hardware(loads_late=True)):
        seen = []
        for seed in range(10):
            try:
                summed([[0, 1], [1, 0]], hardware, "random", seed)
            except (Deadlock, RuntimeError) as error:
                seen.append(str(error))
        assert seen
        assert all("spins in sum 0 of" in text for text in seen)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_send_ends_when_its_receive_has_begun(policy: str) -> None:
    """Small and large ones alike, which is the worse case."""
    with simulate(policy, 2):
        hosts = Hosts(2, 2)
        is_posted = []

        def sender() -> bool:
            torch.accelerator.set_device_index(0)
            group = Communicator("a", 0, 2, device_of(0))
            work = group.send([torch.arange(4.0, device=device_of(0))], 1, 0)
            early = [work.is_completed() for _ in range(10)]
            is_posted.append(True)
            hosts.wait_until(0, work.is_completed)
            return any(early)

        def receiver() -> list[float]:
            torch.accelerator.set_device_index(1)
            group = Communicator("a", 1, 2, device_of(1))
            hosts.wait_until(1, lambda: bool(is_posted))
            x = torch.zeros(4, device=device_of(1))
            group.recv([x], 0, 0).wait()
            found: list[float] = x.tolist()
            return found

        early, found = hosts.run([sender, receiver])
        assert not early
        assert found == [0.0, 1.0, 2.0, 3.0]


def test_a_kernel_that_no_peer_meets_is_named() -> None:
    with simulate("random", 1):
        hosts = Hosts(2)

        def host(rank: int) -> None:
            if rank == 0:
                torch.accelerator.set_device_index(0)
                x = torch.ones(1, device=device_of(0))
                Communicator("the edge", 0, 2, device_of(0)).send([x], 1, 0).wait()
                x.add_(1).item()

        with pytest.raises(
            Deadlock, match=r"device 0 spins in message 0 of the edge for member 1 \(not issued\)"
        ):
            hosts.run([lambda rank=rank: host(rank) for rank in range(2)])


# ---- kernels that are loaded when they are launched ------------------------------------------------------------------


def test_the_first_launch_of_a_kernel_waits_for_the_device() -> None:
    with simulate("late", hardware=Hardware(loads_late=True)) as sim:
        x = torch.zeros(2, device=SIM)
        for _ in range(3):
            x.add_(1)
        before = sim.counters
        x.mul_(2)
        assert sim.counters.host_waits == before.host_waits + 1
        x.mul_(2)
        assert sim.counters.host_waits == before.host_waits + 1
        assert x.tolist() == [12.0, 12.0]
