"""NCCL as far as order goes: kernels that spin until their peers run, on a stream of the communicator.

Every rank is a host of ``Hosts``, on the device of its number.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.simulated_device import NAME, load


class Work:
    """Of a kernel: ``wait`` orders the current stream after it, and keeps the host no time."""

    def __init__(self, end: Any, device: torch.device) -> None:
        self._end, self.device = end, device

    def wait(self, *_: Any) -> bool:
        torch.accelerator.current_stream(self.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())


class Communicator:
    """One member's end of a communicator.

    Args:
        name: The same at all ends, and no other communicator's.
        member: Of this end.
        size: How many members there are.
        device: This member's.
        is_urgent: Whether its stream is one of high priority.
    """

    def __init__(
        self, name: str, member: int, size: int, device: torch.device, is_urgent: bool = False
    ) -> None:
        self._native = load()
        self.name, self._member, self._size, self.device = name, member, size, device
        self.stream = torch.Stream(device, priority=-1 if is_urgent else 0)
        self._is_urgent, self._count = is_urgent, 0

    def like(self, name: str) -> Communicator:
        """Another one of the same members."""
        return Communicator(f"{self.name}, {name}", self._member, self._size, self.device, self._is_urgent)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._meet(tensors[0], "message", 0, False)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._meet(tensors[0], "message", 1, False)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._meet(tensor, "sum", self._member, True)

    def _meet(self, tensor: torch.Tensor, what: str, member: int, sums: bool) -> Work:
        """Issue a kernel after the current stream's work, as NCCL does it for torch."""
        name = f"{what} {self._count} of {self.name}"
        self._count += 1
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            self._native.meet(name, member, self._size, tensor, sums)
            return Work(self.stream.record_event(), self.device)

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def device_of(rank: int) -> torch.device:
    return torch.device(NAME, rank)
