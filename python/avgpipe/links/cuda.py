"""The link between processes of one host with CUDA devices that reach each other's memory: tensors stay on devices.

Control messages go through the shared-memory ring. The sender copies into a slot of device memory, from which
the receiver's tensors are read in place:

    sender's lane     F3 ── record ── F4 ...
    channel's stream        └ wait ─ wait(free) ── copy into the slot ── record(full)      then: publish
    receiver's lane                                       └ wait(full) ── reads the slot ── record(free)

A slot belongs to a slot of the ring, so it is lent and returned with that one's lease: when the last tensor
that reads it is freed. The host waits for nothing.

On two devices, slots are in the receiver's memory: the sender's copy engine pushes over the line, without a
kernel, and the receiver reads what is its own. The receiver grants such a slot when it has taken the first
message of the ring's slot, which lies in the sender's memory, and which it fetches into the granted slot:

    first message     sender: copy into its own slot S, full      receiver: wait(full), copy from S to R; answers with R
    those after it    sender: wait(free of R), copy into R, full  receiver: wait(full), reads R, free of R

So nothing waits for a grant, and messages that outgrow R are first ones again. A device records only events
that its own process made: ``full`` is the sender's, ``free`` the receiver's, and the other side waits for it or
asks. On one device the sender makes both, and slots are in the memory that the two share. Not run on several
GPUs yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from avgpipe.device import ReadyOnEvent, current_stream, foreign_memory, used_on
from avgpipe.links.codec import Decoder, Format, padded
from avgpipe.links.link import BY_HOST, OF_MICRO_BATCHES, Channel, Key, Link
from avgpipe.links.shared import Inbox, SharedLink, SharedTransport
from avgpipe.links.slots import RECORD_BYTES, DeviceSlots, Slot, copy_stream, place_of, slots_of
from avgpipe.links.transport import Endpoint, Transport

# A message: the record of its slot, that of another slot, and its format's text. The other one is the receiver's: which
# the sender gives back, and, written by the receiver before it ends the lease, which it grants.
_HEAD_BYTES = 2 * RECORD_BYTES
_NONE = bytes(RECORD_BYTES)
_RETURN_S = 5.0  # timeout of closing for slots to be returned


class CudaIpcLink(SharedLink):
    """Connects this worker with another process of this host.

    Args:
        slots: Those of this worker's device.
        crosses: Whether the other end is on another device.
    """

    name = "cuda-ipc"

    def __init__(
        self, inbox: Inbox, outbox: Inbox, peer: int, end: Endpoint, slots: DeviceSlots, crosses: bool
    ) -> None:
        super().__init__(inbox, outbox, peer, end)
        self._slots, self._crosses = slots, crosses
        # One for each channel: no lane's copy waits behind that of another lane, whose work may be late.
        self._copies = {channel: copy_stream(end.device) for channel in end.outgoing}
        self._outgoing_slots: dict[tuple[Channel, int], Slot] = {}  # by the address of the ring's slot
        self._granted: dict[bytes, Slot] = {}  # this end's slots that the other one writes, by their places
        for n, (channel, receiver, decoder) in enumerate(self._incoming):
            if channel.kind != BY_HOST:
                self._incoming[n] = channel, receiver, _SlotDecoder(decoder, slots, end.device, self._granted)

    def send(self, key: Key, value: Any) -> None:
        if key.kind == BY_HOST:
            super().send(key, value)
            return
        channel = Channel.of(key)
        sender, encoder = self._outgoing[channel]
        number, format, text, tensors = encoder.encode(value)
        address = sender.reserve(_HEAD_BYTES + padded(len(text)))
        slot, outgrown = self._slot(channel, address, format.bytes)
        head = slot.record + outgrown
        ctypes.memmove(address, head, _HEAD_BYTES)
        ctypes.memmove(address + _HEAD_BYTES, text, len(text))
        self._copy(self._copies[channel], slot, format, tensors)
        if key.kind not in OF_MICRO_BATCHES:
            # Such as an update of the reference, whose memory the lane's next step overwrites.
            current_stream(self._end.device).wait_event(slot.full)
        # The other process waits for the last recording of ``full``: publish only now.
        sender.publish(_HEAD_BYTES + len(text), key.batch, key.micro_batch, number, len(text))

    send_flipped = Link.send_flipped  # the ring has the address of the bytes, not the bytes

    def _slot(self, channel: Channel, address: int, size: int) -> tuple[Slot, bytes]:
        """Return the device slot of the ring's slot at ``address``, which the receiver does not hold.

        And the record of the receiver's slot that this one takes the place of, if there is such a slot.
        """
        slot, outgrown = self._outgoing_slots.get((channel, address)), _NONE
        if slot is not None and self._crosses and slot.memory is not None:
            granted = self._grant(address)
            if granted is not None:
                copies = self._copies[channel]
                copies.wait_event(granted.free)  # so the receiver has fetched what was here
                slot.free.record(copies)
                self._slots.give(slot)
            slot = granted  # without a grant, the receiver may fetch from this slot still: no one gets it
        if slot is None or slot.size < size:
            if slot is not None and slot.memory is not None:
                self._slots.give(slot)
            elif slot is not None:
                outgrown = slot.record
            slot = self._slots.make(size)
        self._outgoing_slots[channel, address] = slot
        return slot, outgrown

    def _grant(self, address: int) -> Slot | None:
        """Return the slot that the receiver has granted at ``address`` of the ring."""
        record = ctypes.string_at(address + RECORD_BYTES, RECORD_BYTES)
        return None if record == _NONE else self._slots.open_granted(record)

    def _copy(self, copies: Any, slot: Slot, format: Format, tensors: list[torch.Tensor]) -> None:
        copies.wait_stream(current_stream(self._end.device))
        copies.wait_event(slot.free)
        with copies:
            if slot.memory is not None:
                format.write(tensors, slot.memory)
            elif format.end:
                # A kernel that wrote there would hold multiprocessors for as long as the line takes.
                self._slots.push(_as_bytes(format, tensors, self._end.device), slot)
            slot.full.record(copies)
        used_on(copies, tensors)  # the lane continues and may free them, or return their slot

    def close(self, patience_s: float) -> None:
        """Leave, and release the slots that both sides have finished with to other links; keep the others."""
        senders = [sender for sender, _ in self._outgoing.values()]
        super().close(patience_s)
        limit_s = min(patience_s, _RETURN_S)
        # In this order: the receiver records ``free``, and then returns its slot of the ring.
        if self._wait_for(
            lambda: not any(sender.lent() for sender in senders) and all(map(_is_idle, self._lent())), limit_s
        ):
            for slot, _ in self._lent():
                self._slots.give(slot)
        if self._granted and self._wait_for(self._is_drained, limit_s):
            for place in self._granted:
                self._slots.give(self._slots.own(place))
        self._outgoing_slots, self._granted = {}, {}

    def _lent(self) -> list[tuple[Slot, Any]]:
        """Return this end's slots that the other one reads, each with the event after it has read."""
        slots = [(at, slot) for (_, at), slot in self._outgoing_slots.items() if slot.memory is not None]
        if not self._crosses:
            return [(slot, slot.free) for _, slot in slots]
        granted = [(slot, self._grant(at)) for at, slot in slots]
        return [(slot, other.free) for slot, other in granted if other is not None]

    def _is_drained(self) -> bool:
        """Whether the other end, which has left, has written all that it writes here, and all of it is read."""
        if not self._outbox.is_left:
            return False
        for _, receiver, decoder in self._incoming:
            with suppress(FileNotFoundError, ProcessLookupError):  # its process has ended
                while isinstance(decoder, _SlotDecoder) and (record := receiver.take()) is not None:
                    decoder.decode(*record[3:])  # no one takes it, and its slot is in use until it is copied
        return not any(slot.address in foreign_memory for slot in self._granted.values()) and all(
            _is_idle((slot, slot.free)) for slot in self._granted.values()
        )


def _is_idle(use: tuple[Slot, Any]) -> bool:
    slot, free = use
    return bool(slot.full.query() and free.query())


def _as_bytes(format: Format, tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a message as it is sent, gathered on the current stream if it is not one tensor."""
    if format.is_memory_of(tensors):
        return tensors[0].view(-1).view(torch.uint8)
    gathered = torch.empty(format.bytes, dtype=torch.uint8, device=device)
    format.write(tensors, gathered)
    return gathered[: format.end]


class _SlotDecoder(Decoder):
    """Decodes messages that name a slot of device memory.

    Args:
        headers: Decodes their formats.
        slots: Those of the ``device`` on which the messages are needed.
        granted: This end's slots that the other end writes; noted here.
    """

    def __init__(
        self, headers: Decoder, slots: DeviceSlots, device: torch.device, granted: dict[bytes, Slot]
    ) -> None:
        self._headers, self._slots, self._device, self._granted = headers, slots, device, granted
        self._returns = copy_stream(device)

    def decode(self, number: int, text_bytes: int, memory: Any, offset: int = 0) -> ReadyOnEvent:
        data = bytes(memoryview(memory)[: _HEAD_BYTES + text_bytes])
        format = self._headers.format(number, data[_HEAD_BYTES:])
        slot, outgrown = self._slots.open(data[:RECORD_BYTES]), data[RECORD_BYTES:_HEAD_BYTES]
        if outgrown != _NONE:
            self._granted.pop(place_of(outgrown))
            self._slots.give(self._slots.own(place_of(outgrown)))
        if slot.memory is None:
            slot = self._fetched(slot, format.end)
            memoryview(memory)[RECORD_BYTES:_HEAD_BYTES] = slot.record
            self._granted[place_of(slot.record)] = slot
        elif place_of(slot.record) in self._granted:
            self._granted[place_of(slot.record)] = slot  # with the event of this message
        return _InSlot(self._slots, slot, format, memory, self._device, self._returns)

    def _fetched(self, theirs: Slot, size: int) -> Slot:
        """Return a slot of this end into which the content of another device's is being copied."""
        ours = self._slots.make(theirs.size)
        self._returns.wait_event(theirs.full)
        self._returns.wait_event(ours.free)  # it may have been another link's
        self._slots.fetch(theirs, ours, size, self._returns)
        ours.full.record(self._returns)
        ours.free.record(self._returns)  # for the sender, if no one ever reads it
        return ours


class _InSlot(ReadyOnEvent):
    """A message in a slot; its tensors are made for the stream of the receiver."""

    __slots__ = ("_format", "_returns", "_slot", "_slots")

    def __init__(
        self, slots: DeviceSlots, slot: Slot, format: Format, lease: Any, at: torch.device, returns: Any
    ) -> None:
        super().__init__(lease, slot.full, at)
        self._slots, self._slot, self._format, self._returns = slots, slot, format, returns

    def received(self) -> Any:
        stream = self._slots.current_stream()
        stream.wait_event(self._ready)
        memory = self._slots.lend(self._slot, self.value, stream, self._returns)
        return self._format.read(memory, 0, memory.device)


class IpcTransport(Transport):
    """Slots in device memory, between processes of one host whose devices reach each other's."""

    def offer(self) -> Any:
        self._slots, self._crosses = slots_of(self.device), dict[int, bool]()
        return self._slots.offer()

    def open(self, rank: int, offers: Sequence[Any]) -> None:
        if rank not in self.below["shm"].processes:
            raise ValueError("no shared memory with it")
        self._crosses[rank] = self._slots.check(offers[rank])

    def link(self, rank: int, end: Endpoint, others: Sequence[Transport]) -> CudaIpcLink:
        shared = self.below["shm"]
        assert isinstance(shared, SharedTransport)
        return CudaIpcLink(*shared.ends(rank), end, self._slots, self._crosses[rank])
