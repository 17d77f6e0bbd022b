"""A process group for ranks that share one GPU, which NCCL 2.28 refuses: send and receive alone, over CUDA IPC.

What ``torch.distributed.pipelining`` needs is a receive whose ``wait()`` makes the current stream wait, not the host.
Each ordered pair of ranks has slots of device memory, the sender's, and two counters for each slot, also there, which
streams write and wait for: how often it was filled, and how often it was read.

    sender    wait(read = turn) ── copy into the slot ── filled := turn + 1
    receiver                                             wait(filled = turn + 1) ── copy out ── read := turn + 1

No message goes through the host, so a receive may be enqueued before its send. On the CPU the group below carries the
tensors, gloo's.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

SLOTS = 8
SLOT_BYTES = 8 << 20  # twice the activation of a micro-batch
_NAME = "one_card"
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _Stream:
    """A stream that waits for values in device memory, and writes them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def wait_for(self, word: torch.Tensor, value: int) -> None:
        self._call("cuStreamWaitValue32_v2", word, value, _AT_LEAST)

    def write(self, word: torch.Tensor, value: int) -> None:
        self._call("cuStreamWriteValue32_v2", word, value, 0)

    def _call(self, name: str, word: torch.Tensor, value: int, flags: int) -> None:
        status = getattr(_driver(), name)(
            ctypes.c_void_p(self.stream.cuda_stream),
            ctypes.c_uint64(word.data_ptr()),
            ctypes.c_uint32(value),
            ctypes.c_uint(flags),
        )
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")


class _Direction:
    """Messages from one rank to another. ``sends``: whether they are this rank's."""

    def __init__(self, memory: torch.Tensor, counters: torch.Tensor, sends: bool) -> None:
        self._memory, self._counters, self._sends = memory, counters, sends
        self._moved = 0
        self._queue = _Stream(memory.device)

    def move(self, tensor: torch.Tensor) -> Work:
        turn, number = divmod(self._moved, SLOTS)
        self._moved += 1
        tensor_bytes = tensor.contiguous().view(-1).view(torch.uint8)
        if tensor_bytes.numel() > self._memory.shape[1]:
            raise ValueError(f"a message of {tensor_bytes.numel()} bytes; a slot has {self._memory.shape[1]}")
        slot = self._memory[number, : tensor_bytes.numel()]
        filled, read = self._counters[0, number], self._counters[1, number]
        queue = self._queue
        queue.stream.wait_stream(torch.cuda.current_stream())  # the tensor is there, or its memory is free
        with torch.cuda.stream(queue.stream):
            if self._sends:
                queue.wait_for(read, turn)
                slot.copy_(tensor_bytes)
                queue.write(filled, turn + 1)
            else:
                queue.wait_for(filled, turn + 1)
                tensor_bytes.copy_(slot)
                queue.write(read, turn + 1)
        tensor_bytes.record_stream(queue.stream)  # a copy, if the tensor is not dense
        return _OnEvent(queue.stream.record_event(), tensor)


class _OnEvent(Work):
    """``wait()`` makes the current stream wait."""

    def __init__(self, event: Any, tensor: torch.Tensor) -> None:
        super().__init__()
        self._event, self._tensor = event, tensor

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class OneCardGroup(dist.ProcessGroup):
    """Ranks of a ring, each with a pair of directions to both neighbours; ``below``: a group of gloo's."""

    def __init__(self, rank: int, size: int, below: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._me, self._below = rank, below
        self._directions: dict[tuple[int, int], _Direction] = {}
        if device.type == "cuda":
            self._connect(size, device)

    def _connect(self, size: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        me, made = self._me, {}
        for other in {(me - 1) % size, (me + 1) % size} - {me}:
            memory = torch.zeros(SLOTS, SLOT_BYTES, dtype=torch.uint8, device=device)
            made[other] = memory, torch.zeros(2, SLOTS, dtype=torch.int32, device=device)
        torch.cuda.synchronize()  # zeros are there before anybody waits for more
        offers: list[Any] = [None] * size
        mine = {other: [reduce_tensor(t) for t in tensors] for other, tensors in made.items()}
        dist.all_gather_object(offers, mine, group=self._below)
        for other, (memory, counters) in made.items():
            self._directions[me, other] = _Direction(memory, counters, sends=True)
            memory, counters = (rebuild(*arguments) for rebuild, arguments in offers[other][me])
            self._directions[other, me] = _Direction(memory, counters, sends=False)

    def getBackendName(self) -> str:
        return _NAME

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        if self._directions:
            return self._directions[self._me, dst].move(tensors[0])
        return self._below.send([tensors[0].detach().contiguous()], dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        if self._directions:
            return self._directions[src, self._me].move(tensors[0])
        return self._below.recv(tensors, src, tag)


@cache
def one_card_group(device: torch.device) -> dist.ProcessGroup:
    """Return the group of all ranks, whose default group is gloo's. All ranks call this."""
    below = dist.new_group(backend="gloo")
    dist.Backend.register_backend(
        _NAME,
        lambda store, rank, size, timeout: OneCardGroup(rank, size, below, device),
        devices=["cpu", "cuda"],
    )
    return dist.new_group(backend=_NAME)
