"""The orderings of ``avgpipe.device``, each of which can be left out to see that some order of the device tells.

Where all runs as soon as streams allow it, none of them is missed: what is left out is an order, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from avgpipe import device
from avgpipe.device import ReadyOnEvent
from avgpipe.runtime.streams import CopyStream, LaneStream


def _step(batches_wait: bool, updates_wait: bool, updates_record: bool) -> Any:
    """``LaneStream.step`` without its clock, and without an order of the chain of updates."""

    @contextmanager
    def step(
        self: LaneStream, place: device.Place | None, begins: bool, updates: bool, receive: Callable[[], None]
    ) -> Iterator[None]:
        with self._stream:
            if (updates and updates_wait) or (begins and self._moves_others and batches_wait):
                self._stream.wait_event(self._averaged)
            receive()
            yield
            if updates and updates_record:
                self._stream.record_event(self._averaged)

    return mock.patch.object(LaneStream, "step", step)


def _received_at_once(self: ReadyOnEvent) -> Any:
    device.used_on(device.current_stream(self._device), pytree.tree_leaves(self.value))
    return self.value


def _received_and_not_kept(self: ReadyOnEvent) -> Any:
    device.current_stream(self._device).wait_event(self._ready)
    return self.value


def _begin_before_the_caller(self: LaneStream, batch: ReadyOnEvent | None) -> None:
    if batch is not None:
        with self._stream:
            batch.received()


def _begin_before_the_copies(self: LaneStream, batch: ReadyOnEvent | None) -> None:
    self._stream.wait_stream(device.current_stream(self._device))


def _overwritten(self: CopyStream, leaf: Any) -> Any:
    """Reuse the pinned memory of a batch while it may still be read."""
    if not isinstance(leaf, torch.Tensor) or device.on_accelerator(leaf):
        return leaf
    pinned = leaf.pin_memory()
    found = pinned.to(self._device, non_blocking=True)
    pinned.zero_()
    return found


MUTANTS: dict[str, Callable[[], Any]] = {
    "updates wait for no other lane's": lambda: _step(True, False, True),
    "no update is recorded": lambda: _step(True, True, False),
    "batches wait for no other lane's update": lambda: _step(False, True, True),
    "messages are received without a wait": lambda: mock.patch.object(
        ReadyOnEvent, "received", _received_at_once
    ),
    "messages are not kept (record_stream)": lambda: mock.patch.object(
        ReadyOnEvent, "received", _received_and_not_kept
    ),
    "lanes begin before the caller's stream": lambda: mock.patch.object(
        LaneStream, "begin", _begin_before_the_caller
    ),
    "lanes begin before the batch is copied": lambda: mock.patch.object(
        LaneStream, "begin", _begin_before_the_copies
    ),
    "the caller's stream does not wait for lanes": lambda: mock.patch.object(
        LaneStream, "end", return_value=None
    ),
    "pinned batches are overwritten": lambda: mock.patch.object(CopyStream, "_copy", _overwritten),
}
