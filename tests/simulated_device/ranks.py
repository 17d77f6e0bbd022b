"""Ranks of one pipeline in one process: rank k on device k, joined by what NCCL does as far as order goes.

All of the library runs, with its links over NCCL and its sums of replicas' gradients; what joins processes is replaced.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from avgpipe.links import agree, nccl
from avgpipe.links.link import Key, Link
from avgpipe.links.nccl import NcclTransport
from avgpipe.links.transport import Endpoint, Transport
from avgpipe.ranks import met
from avgpipe.ranks.world import Notice, World
from avgpipe.runtime import group_sum, session
from avgpipe.runtime.worker import Worker
from tests.simulated_device.hosts import Deadlock, Hosts
from tests.simulated_device.nccl import Communicator, Work, device_of

_TIMEOUT_S = 60.0


class Machine:
    """What all ranks share."""

    def __init__(self, hosts: Hosts, size: int) -> None:
        self.hosts, self.size = hosts, size
        self.gathered: dict[int, dict[int, Any]] = defaultdict(dict)  # by number and rank
        self.notes: dict[str, str] = {}
        self.ends: dict[tuple[int, int], Endpoint] = {}  # by rank and peer


class SimulatedWorld(World):
    """A rank's view of the others."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__(_TIMEOUT_S)
        self.machine, self.rank, self.size = machine, rank, machine.size
        self._gathers = self._groups = 0

    def _exchange(self, value: Any) -> list[Any]:
        number, self._gathers = self._gathers, self._gathers + 1
        here = self.machine.gathered[number]
        here[self.rank] = value
        self.machine.hosts.happen()
        self.machine.hosts.wait_until(self.rank, lambda: len(here) == self.size)
        return [here[rank] for rank in range(self.size)]

    def gather(self, value: Any) -> list[Any]:
        return [found for rank in self._exchange(value) for found in World.gather(self, rank)]

    def barrier(self) -> None:
        self._exchange(None)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self._exchange(tensor.detach().cpu())[source]
        return found.to(tensor.device)

    def first(self, name: str, text: str) -> str:
        return self.machine.notes.setdefault(name, text)

    def beside(self) -> World:
        return self

    def new_group(self, ranks: Sequence[int], backend: str, options: Any = None) -> Any:
        number, self._groups = self._groups, self._groups + 1
        if self.rank not in ranks:
            return SimpleNamespace(name="of others")
        place = list(ranks).index(self.rank)
        return Communicator(
            f"group {number}", place, len(ranks), device_of(self.rank), options.is_high_priority_stream
        )

    def store(self) -> Any:
        return None


class SimulatedBell:
    """Rung by other hosts; who waits lets them run."""

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self._hosts, self._rank, self._count = hosts, rank, 0

    def count(self) -> int:
        found = self._count  # what is rung from now on is not known yet
        self._hosts.may_switch(self._rank)
        return found

    def ring(self) -> None:
        self._count += 1

    def wait(self, seen: int, limit_s: float, spin_s: float) -> None:
        if self._count == seen and not self._hosts.give_way(self._rank):
            raise Deadlock(self._hosts.deadlock)


class HostTransport(Transport):
    """Carries what NCCL does not, through the host's memory."""

    def __init__(self, world: Any, *others: Any) -> None:
        super().__init__(world, *others)
        self.bell = SimulatedBell(world.machine.hosts, world.rank)  # type: ignore[assignment]

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> HostLink:
        world: Any = self.world
        return HostLink(world.machine, world.rank, rank, end)


class HostLink(Link):
    name = "host"

    def __init__(self, machine: Machine, rank: int, peer: int, end: Endpoint) -> None:
        self._machine, self._there = machine, (peer, rank)
        machine.ends[rank, peer] = end

    def send(self, key: Key, value: Any) -> None:
        def copied(leaf: torch.Tensor) -> torch.Tensor:
            # In memory of its own, which a device gives a copy in any case.
            return leaf.detach().cpu().clone().requires_grad_(leaf.requires_grad)

        self._machine.ends[self._there].mailbox.deliver(
            key, pytree.tree_map_only(torch.Tensor, copied, value)
        )
        self._machine.hosts.happen()


class Options:
    """Of a communicator, as torch has them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream


class Pair(Communicator):
    """One of two ends, as torch makes it."""

    Options = Options

    def __init__(self, name: str, end: int, size: int, options: Any) -> None:
        device = device_of(torch.accelerator.current_device_index())
        super().__init__(name, end, size, device, options.is_high_priority_stream)


class SimulatedNccl:
    """Stands for ``torch.distributed`` where gradients are summed, and where communicators are made."""

    ProcessGroupNCCL = Pair

    @staticmethod
    def get_backend(group: Any) -> str:
        return "nccl"

    @staticmethod
    def destroy_process_group(group: Any) -> None:
        pass

    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: Communicator, async_op: bool = False) -> Work:
        work = group.all_reduce(tensor)
        if not async_op:
            work.wait()
        return work

    @staticmethod
    def PrefixStore(name: str, store: Any) -> str:
        return name


@contextmanager
def on_ranks(machine: Machine) -> Iterator[Callable[[int], SimulatedWorld]]:
    """Inside, pipelines of a thread are those of the rank that it has told."""
    here = threading.local()

    def become(rank: int) -> SimulatedWorld:
        torch.accelerator.set_device_index(rank)
        here.world = SimulatedWorld(machine, rank)
        return here.world  # type: ignore[no-any-return]

    def transports(kind: str, world: Any, into: Any, device: torch.device) -> dict[str, Transport]:
        host = HostTransport(world, into, device, {})
        return {"host": host, "nccl": NcclTransport(world, into, device, {"host": host})}

    with ExitStack() as stack:
        for where, name, value in (
            (session, "meet", lambda *_: here.world),
            (met, "Preemption", lambda world: Notice()),
            (agree, "_transports", transports),
            (nccl, "nccl_device", str),
            (nccl, "dist", SimulatedNccl),
            (nccl, "_END_S", 0.2),
            (group_sum, "dist", SimulatedNccl),
            (group_sum, "_PATIENCE_S", 0.2),
            (Worker, "_watch", lambda worker, world: None),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield become


def run(size: int, host: Callable[[int, SimulatedWorld], Any], seed: int = 0) -> list[Any]:
    """What ``host`` returns on every rank. ``Deadlock`` where all wait for ever."""
    hosts = Hosts(size, seed)
    machine = Machine(hosts, size)
    with on_ranks(machine) as become:

        def live(rank: int) -> Any:
            return host(rank, become(rank))

        return hosts.run([lambda rank=rank: live(rank) for rank in range(size)])
