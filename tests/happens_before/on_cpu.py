"""A run on the CPU as on a device with streams: all is computed at once, and account is kept of what may not be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from avgpipe import device as devices
from avgpipe.elastic import group
from avgpipe.links import slots
from avgpipe.runtime import group_sum, spec
from tests.happens_before.operators import DEVICE, DeviceAccount, HostReads, Operators


class Nccl:
    """Stands for torch.distributed where something is summed: over gloo, in the order in which NCCL has streams."""

    def __init__(self, account: DeviceAccount) -> None:
        self._account = account
        self._streams: dict[int, Any] = {}  # by group: what a communicator does is in order

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, group: Any) -> str:
        return "nccl"

    def all_reduce(self, flat: torch.Tensor, group: Any, async_op: bool = False) -> NcclWork:
        stream = self._streams.setdefault(id(group), self._account.Stream())
        return NcclWork(self._account, stream, dist.all_reduce(flat, group=group, async_op=True), [flat])


class NcclWork:
    """A collective. ``wait`` orders the current stream of the calling thread; that it keeps the host is gloo's way."""

    def __init__(self, account: DeviceAccount, stream: Any, inner: Any, tensors: list[torch.Tensor]) -> None:
        self._account, self._stream, self._inner = account, stream, inner
        stream.wait_stream(account.current_stream())
        with stream:
            account.enqueue("a collective", tensors, tensors)

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def wait(self, *_: Any) -> None:
        self._inner.wait()
        self._account.current_stream().wait_stream(self._stream)


@contextmanager
def on_streams(account: DeviceAccount) -> Iterator[DeviceAccount]:
    """Pipelines that would be on the CPU are on its stand-in with streams inside; operators are noted."""
    find = spec._device
    run = threading.Thread.run

    def found(*arguments: Any) -> torch.device:
        device = find(*arguments)
        return DEVICE if device.type == "cpu" else device

    def noted(thread: threading.Thread) -> None:
        with HostReads(account), Operators(account):
            run(thread)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "backend", account))
        stack.enter_context(mock.patch.object(slots, "cuda", account))
        for module in (group_sum, group):
            stack.enter_context(mock.patch.object(module, "dist", Nccl(account)))
        stack.enter_context(mock.patch.object(spec, "_device", found))
        stack.enter_context(mock.patch.object(threading.Thread, "run", noted))
        stack.enter_context(HostReads(account))
        stack.enter_context(Operators(account))
        yield account
