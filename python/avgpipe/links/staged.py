"""Copies of messages from an accelerator to the host's memory, for links that send from there."""

from __future__ import annotations

from typing import Any

import torch

from avgpipe.device import copy_stream, current_stream, used_on
from avgpipe.links.codec import Format
from avgpipe.links.link import OF_MICRO_BATCHES, Message


class ToHost:
    """The copies of one channel's messages, which the host does not wait for.

    Activations and gradients are copied on a stream of the channel: nothing writes to them, so the lane goes
    on without waiting for the line to the host. Other messages are copied on the lane's stream, whose next
    step may write to their tensors.

    Args:
        kind: Of the messages.
        device: Where their tensors are.
    """

    def __init__(self, kind: Message, device: torch.device) -> None:
        self._device = device
        self._beside = copy_stream(device) if kind in OF_MICRO_BATCHES else None

    def write(self, format: Format, text: bytes, tensors: list[torch.Tensor], address: int) -> Any:
        """Write a message to pinned memory; return the event at which it is there."""
        copies = current_stream(self._device)
        if self._beside is not None:
            self._beside.wait_stream(copies)
            copies = self._beside
        with copies:
            format.write_all(text, tensors, address, pinned=True)
        if self._beside is not None:
            used_on(copies, tensors)  # the lane continues and may free them
        return copies.record_event()
