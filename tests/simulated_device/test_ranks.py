"""Several ranks, a device each: right on any hardware, and what was wrong is seen."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from avgpipe.links.link import Channel, Key, Mailbox, Message
from avgpipe.links.nccl import NcclLink
from avgpipe.links.transport import Endpoint
from tests.simulated_device import Hardware, simulate
from tests.simulated_device.hosts import Deadlock
from tests.simulated_device.nccl import Communicator, device_of
from tests.simulated_device.put_back import BUGS, POLICIES, first_seen, of_normal_priority
from tests.simulated_device.ranks import HostTransport, SimulatedWorld, run
from tests.simulated_device.several import CASES, a_pipeline, on_one, wrong

WITHIN = 24  # seeds
HARDWARE = {
    "generous": Hardware(),
    "32 queues": Hardware(queues=32, has_pool=True, loads_late=True),
}


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_device_does_on_any_hardware(case: str, hardware: str) -> None:
    expected = on_one(CASES[case])
    for seed, policy in enumerate(POLICIES):
        assert wrong(CASES[case], policy, seed, HARDWARE[hardware], expected) == "", (policy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("case", CASES)
def test_many_seeds(case: str, hardware: str) -> None:
    expected = on_one(CASES[case])
    seeds = [(seed, policy) for seed in range(20) for policy in POLICIES]
    found = {
        at: text for at in seeds if (text := wrong(CASES[case], at[1], at[0], HARDWARE[hardware], expected))
    }
    assert found == {}


@pytest.mark.parametrize("name", BUGS)
def test_what_would_hang_is_seen_and_only_where_queues_are_few(name: str) -> None:
    bug = BUGS[name]
    assert first_seen(bug, WITHIN) != ""
    if not bug.shown_everywhere:
        assert first_seen(bug._replace(hardware=Hardware()), 3) == ""


@pytest.mark.parametrize("mutant", [False, True])
def test_no_communicator_has_a_lane_s_stream(mutant: bool) -> None:
    """Its kernels would hold up the lane's, as after some pipelines of a process, for torch has 32 streams."""
    case = CASES["replicas after other pipelines"]
    shared: list[set[int]] = []
    init = Communicator.__init__

    def host(rank: int, world: SimulatedWorld) -> None:
        made: list[int] = []

        def noted(self: Any, *arguments: Any, **options: Any) -> None:
            init(self, *arguments, **options)
            made.append(self.stream.stream_id)

        with mock.patch.object(Communicator, "__init__", noted), a_pipeline(case, rank) as p:
            lanes = {lane.stream._stream.stream_id for lane in p._session.worker.lanes.values()}  # type: ignore[union-attr]
            shared.append(lanes & set(made))
            world.barrier()
            world.machine.hosts.set_free()

    with (
        simulate("random", 1, hardware=Hardware(has_pool=True)),
        of_normal_priority() if mutant else nullcontext(),
    ):
        run(case.ranks, host)
    assert any(shared) is mutant


@pytest.mark.parametrize("mutant", [False, True])
def test_a_late_lane_holds_up_no_other_lane_s_message(mutant: bool) -> None:
    """It would, if pipelines shared a communicator, whose kernels run in order."""
    channels = [Channel(Message.ACTIVATION, i, 0, 1) for i in range(2)]
    keys = [Key(*channel, 0, 0) for channel in channels]

    def host(rank: int, world: SimulatedWorld) -> list[float]:
        device = device_of(rank)
        transport = HostTransport(world, [], device, {})
        mailbox = Mailbox(transport.bell)
        groups = [Communicator(f"edge {i}", rank, 2, device) for i in range(2)]
        of_pipeline = {i: groups[0 if mutant else i] for i in range(2)}
        into, out = ([], channels) if rank == 0 else (channels, [])
        link = NcclLink(
            lambda end: transport.link(1 - rank, end, ()),
            of_pipeline if rank == 0 else {},
            of_pipeline if rank == 1 else {},
            Endpoint(mailbox, device, into, out),
        )
        late, found = Communicator("late", rank, 2, device), []
        world.barrier()
        if rank == 0:
            lanes = [torch.Stream(device) for _ in range(2)]
            values = [torch.full((2,), float(n), device=device) for n in (3, 4)]
            for n, lane in enumerate(lanes):
                lane.wait_stream(torch.accelerator.current_stream(device))
                with lane:
                    if n == 0:
                        late.all_reduce(values[n]).wait()
                    link.send(keys[n], values[n])
        else:
            for n in (1, 0):
                assert mailbox.wait_until(lambda n=n: keys[n] in mailbox, 60)
                if n == 0:
                    late.all_reduce(torch.ones(2, device=device))
                found.append(float(mailbox.take(keys[n])[0]))
        world.barrier()
        return found

    with simulate("random", 3):
        if mutant:
            with pytest.raises(Deadlock, match=r"spins in sum 0 of late for member 1 \(not issued\)"):
                run(2, host)
        else:
            assert run(2, host) == [[], [4.0, 4.0]]
