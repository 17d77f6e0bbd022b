"""Sums gradients over the ranks of a torch.distributed group, while the backward that makes them still runs.

What waits for the sums, and where:

    CPU            a thread, in wait(); the message follows
    CUDA, by NCCL  nothing on the host: the message is sent at once, and its receiver makes its stream wait
    CUDA, by gloo  both: gloo sums copies in host memory, so wait() blocks the host until they are summed and
    the copy
                   back is issued, and then makes the current stream wait for that copy
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.device import ReadyOnEvent, has_streams, select
from avgpipe.errors import PeerLost
from avgpipe.links.link import Key, Mailbox
from avgpipe.links.nccl import end_communicators
from avgpipe.ranks.met import Met, transport_reason

_PATIENCE_S = 5.0  # timeout for the end of the thread, or of a communicator's works
_BUCKET_BYTES = 8 * 2**20  # large enough for the network, small enough to begin early


def sum_group(world: Met, ranks: Sequence[int], device: torch.device, backend: str) -> dist.ProcessGroup:
    """Make a group of ``ranks`` for sums of tensors on ``device``. Every rank of the world calls this, in one order."""
    select(device)  # for the thread that connects, whichever it is
    group = world.new_group(ranks, backend)
    if backend == "nccl" and world.rank in ranks:
        # The first collective connects, and blocks the host until all members call it. Inside a backward that
        # could deadlock: a member would wait for another one's backward, which follows a forward that needs
        # its gradient.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


class GroupSum:
    """Sums the gradients of a stage's replicas, bucket by bucket.

    Args:
        parameters: the same on all ranks of ``group``.
        group: used for nothing else; its tensors are on ``device``.
        key: the key of the message that reports a batch's sums, except for the batch number.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        mailbox: Mailbox,
        key: Key,
        device: torch.device,
    ) -> None:
        self._parameters, self._group, self._mailbox, self._key = parameters, group, mailbox, key
        self._device, self._has_streams = device, has_streams(device)
        self._buckets = _buckets(parameters)
        self._bucket_of = {n: b for b, bucket in enumerate(self._buckets) for n in bucket.members}
        self._armed = False
        self._waiting: list[set[int]] = []  # by bucket, the parameters without a gradient so far
        self._last: list[Any] = []  # works of the batch before
        self._works: list[Any] = []  # of the buckets that are in flight, in their order
        self._batches: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not self._has_streams or dist.get_backend(group) != "nccl":  # wait() blocks the host
            self._thread = threading.Thread(target=self._wait, name="avgpipe-sum", daemon=True)
            self._thread.start()
        for n, p in enumerate(parameters):
            hook = partial(self._made, n)
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch

    def arm(self) -> None:
        """Sum in the next backward: it is the last before :meth:`complete`, so its gradients are final."""
        self._waiting = [set(bucket.members) for bucket in self._buckets]
        self._armed = True

    def _made(self, n: int, _: torch.Tensor) -> None:
        if not self._armed:
            return
        self._waiting[self._bucket_of[n]].discard(n)
        # In the same order everywhere, or ranks would add up different buckets.
        while len(self._works) < len(self._buckets) and not self._waiting[len(self._works)]:
            self._start(self._buckets[len(self._works)])

    def complete(self, batch: int) -> None:
        """Sum the remaining buckets; a message, to be taken before :meth:`total`, reports all sums ready."""
        self._armed = False
        for bucket in self._buckets[len(self._works) :]:
            self._start(bucket)
        works, self._works = self._works, []
        self._last = works
        if self._thread is not None:
            self._batches.put((batch, works))
        else:
            self._mailbox.put(self._key._replace(batch=batch), _BucketSums(works, batch, self._device))

    def _start(self, bucket: _Bucket) -> None:
        # This memory held the sums of the batch before. On CUDA the copies are already ordered after them:
        # the lane's stream waited for their works and then read them, and hooks of a backward run on that
        # stream, or after it.
        for n, view in bucket.members.items():
            grad = self._parameters[n].grad
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
        self._works.append(dist.all_reduce(bucket.flat, group=self._group, async_op=True))

    def total(self, n: int) -> torch.Tensor:
        """Return the sum of the gradients of parameter n; the next batch's overwrites it."""
        total: torch.Tensor = self._buckets[self._bucket_of[n]].members[n]
        return total

    def _wait(self) -> None:
        select(self._device)
        while (item := self._batches.get()) is not None:
            batch, works = item
            try:
                _wait_for(works, batch)
            except PeerLost as loss:
                self._mailbox.fail(loss)
                return
            # This thread's stream is not the one that reads the sums.
            sums = _BucketSums(works, batch, self._device) if self._has_streams else None
            self._mailbox.deliver(self._key._replace(batch=batch), sums)

    def close(self) -> None:
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join(_PATIENCE_S)
        else:
            end = partial(dist.destroy_process_group, self._group)
            end_communicators([(self._group, end, [*self._last, *self._works])], _PATIENCE_S)


class _BucketSums(ReadyOnEvent):
    """The message that a batch's sums are ready; its receiver makes its stream wait for them."""

    __slots__ = ("_batch",)

    def __init__(self, works: list[Any], batch: int, device: torch.device) -> None:
        super().__init__(None, works, device)
        self._batch = batch

    def received(self) -> None:
        # No record_stream: the buckets live as long as their reader.
        _wait_for(self._ready, self._batch)


def _wait_for(works: Sequence[Any], batch: int) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        reason = transport_reason(error)
        raise PeerLost(f"the sum of gradients of batch {batch} failed: {reason}") from error


class _Bucket:
    """Places for the gradients of some parameters, by their numbers, in one flat tensor."""

    def __init__(self, numbers: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameters[n].numel() for n in numbers]
        like = parameters[numbers[0]]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        parts = torch.split(self.flat, sizes)
        self.members = {n: part.view(parameters[n].shape) for n, part in zip(numbers, parts)}


def _buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Fill buckets from the last parameter to the first, roughly the order of gradients in a backward."""
    groups: list[list[int]] = []
    size = _BUCKET_BYTES
    for n in reversed(range(len(parameters))):
        p = parameters[n]
        if size >= _BUCKET_BYTES or p.dtype != parameters[groups[-1][0]].dtype:
            groups.append([])
            size = 0
        groups[-1].append(n)
        size += p.numel() * p.element_size()
    return [_Bucket(numbers, parameters) for numbers in groups]
