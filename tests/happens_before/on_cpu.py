"""A run on the CPU as on a device with streams: all is computed at once, and account is kept of what may not be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from avgpipe import device as devices
from avgpipe import pipeline
from avgpipe.links import cuda
from tests.happens_before.operators import DEVICE, DeviceAccount, HostReads, Operators


@contextmanager
def on_streams(account: DeviceAccount) -> Iterator[DeviceAccount]:
    """Pipelines that would be on the CPU are on its stand-in with streams inside; operators are noted."""
    find = pipeline._device
    run = threading.Thread.run

    def found(*arguments: Any) -> torch.device:
        device = find(*arguments)
        return DEVICE if device.type == "cpu" else device

    def noted(thread: threading.Thread) -> None:
        with HostReads(account), Operators(account):
            run(thread)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "backend", account))
        stack.enter_context(mock.patch.object(cuda, "cuda", account))
        stack.enter_context(mock.patch.object(pipeline, "_device", found))
        stack.enter_context(mock.patch.object(threading.Thread, "run", noted))
        stack.enter_context(HostReads(account))
        stack.enter_context(Operators(account))
        yield account
