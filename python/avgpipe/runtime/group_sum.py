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
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.device import ReadyOnEvent, current_stream, has_streams, select
from avgpipe.errors import PeerLost
from avgpipe.links.link import Key, Mailbox
from avgpipe.links.nccl import end_communicators, options
from avgpipe.ranks.met import Met, transport_reason
from avgpipe.ranks.queues import warn_of_few_queues

if TYPE_CHECKING:
    from avgpipe.runtime.streams import LaneStream

_PATIENCE_S = 5.0  # timeout for the end of the thread, or of a communicator's works
_ALIGNMENT = 16  # bytes, for which kernels have their widest accesses
_BUCKET_BYTES = 8 * 2**20  # large enough for the network, small enough to begin early


def sum_group(world: Met, ranks: Sequence[int], device: torch.device, backend: str) -> dist.ProcessGroup:
    """Make a group of ``ranks`` for sums of tensors on ``device``. Every rank of the world calls this, in one order."""
    select(device)  # for the thread that connects, whichever it is
    group = world.new_group(ranks, backend, options(world.timeout_s) if backend == "nccl" else None)
    if backend == "nccl" and world.rank in ranks:
        warn_of_few_queues(1)
        # The first collective connects, and blocks the host until all members call it. Inside a backward that
        # could deadlock: a member would wait for another one's backward, which follows a forward that needs
        # its gradient.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


class SumGroup:
    """Ranks with replicas of one stage, and the sums of all pipelines over them, in one order on every rank.

    A kernel of NCCL occupies its hardware queue until its peers run theirs, and streams share these queues. Ranks that
    begin two sums in different orders may each hold up the sum that the other one waits for. So there is one
    communicator, and sums begin in the order in which their batches have begun, which is the same everywhere: by batch,
    then by pipeline. A lane whose turn it is starts each bucket in its backward, as soon as it is filled; buckets of
    other lanes wait until those before them have started.

    Args:
        group: used for nothing else; its tensors are on ``device``.
    """

    def __init__(self, group: dist.ProcessGroup, mailbox: Mailbox, device: torch.device) -> None:
        self.group, self.device, self.has_streams = group, device, has_streams(device)
        self._mailbox = mailbox
        self._due: deque[GroupSum] = deque()  # one entry for each batch that has begun
        self._last: list[Any] = []  # works of the sums before
        self._batches: queue.SimpleQueue[tuple[Key, list[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not self.has_streams or dist.get_backend(group) != "nccl":  # wait() blocks the host
            self._thread = threading.Thread(target=self._wait, name="avgpipe-sum", daemon=True)
            self._thread.start()

    def expect(self, lane: GroupSum) -> None:
        """Note that a batch of a lane has begun."""
        self._due.append(lane)

    def start_due(self) -> None:
        """Start the buckets whose turn it is."""
        while self._due and self._due[0].start_filled():
            self._due.popleft()

    def report(self, key: Key, works: list[Any]) -> None:
        """Deliver a message with this key once the works of a batch are done, or may be waited for by a stream."""
        self._last = works
        if self._thread is not None:
            self._batches.put((key, works))
        else:
            self._mailbox.put(key, _BucketSums(works, key.batch, self.device))

    def _wait(self) -> None:
        select(self.device)
        while (item := self._batches.get()) is not None:
            key, works = item
            try:
                _wait_for(works, key.batch)
            except PeerLost as loss:
                self._mailbox.fail(loss)
                return
            # This thread's stream is not the one that reads the sums.
            sums = _BucketSums(works, key.batch, self.device) if self.has_streams else None
            self._mailbox.deliver(key, sums)

    def close(self) -> None:
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join(_PATIENCE_S)
        else:
            end = partial(dist.destroy_process_group, self.group)
            works = [*self._last, *(work for lane in self._due for work in lane.works)]
            end_communicators([(self.group, end, works)], _PATIENCE_S)


class GroupSum:
    """Sums the gradients of a pipeline's lane over the replicas of its stage, bucket by bucket.

    Args:
        parameters: the same on all ranks of ``group``.
        key: the key of the message that reports a batch's sums, except for the batch number.
        stream: the lane's; None on a CPU.

    Attributes:
        works: of the buckets that have started, in their order.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: SumGroup, key: Key, stream: LaneStream | None
    ) -> None:
        self._parameters, self._group, self._key, self._stream = parameters, group, key, stream
        self._buckets = _buckets(parameters)
        self._bucket_of = {n: b for b, bucket in enumerate(self._buckets) for n in bucket.members}
        self._armed = False
        self._waiting: list[set[int]] = []  # by bucket, the parameters without a gradient so far
        self._filled = 0  # buckets
        self._filled_at: Any = None  # the event after which they are
        self._batch: int | None = None  # that is complete
        self.works: list[Any] = []
        for n, p in enumerate(parameters):
            hook = partial(self._made, n)
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch

    def begin(self) -> None:
        """Take a turn for a batch that begins; :meth:`complete` follows."""
        self._group.expect(self)

    def arm(self) -> None:
        """Sum in the next backward: it is the last before :meth:`complete`, so its gradients are final."""
        self._waiting = [set(bucket.members) for bucket in self._buckets]
        self._armed = True

    def _made(self, n: int, _: torch.Tensor) -> None:
        if not self._armed:
            return
        self._waiting[self._bucket_of[n]].discard(n)
        # In the same order everywhere, or ranks would add up different buckets.
        if self._filled < len(self._buckets) and not self._waiting[self._filled]:
            while self._filled < len(self._buckets) and not self._waiting[self._filled]:
                self._fill()
            self._go_on()

    def complete(self, batch: int) -> None:
        """Sum the remaining buckets; a message, to be taken before :meth:`total`, reports all sums ready."""
        self._armed = False
        while self._filled < len(self._buckets):
            self._fill()
        self._batch = batch
        self._go_on()

    def _fill(self) -> None:
        # This memory held the sums of the batch before. On CUDA the copies are already ordered after them:
        # the lane's stream waited for their works and then read them, and hooks of a backward run on that
        # stream, or after it.
        self._buckets[self._filled].fill(self._parameters)
        self._filled += 1

    def _go_on(self) -> None:
        """Start what may start: also of other lanes, which have waited for this one."""
        if self._group.has_streams:
            self._filled_at = current_stream(self._group.device).record_event()
        self._group.start_due()

    def start_filled(self) -> bool:
        """Start the filled buckets, as it is this lane's turn; return whether the batch has no others."""
        fresh = self._buckets[len(self.works) : self._filled]
        # It may be another lane's backward that ends this one's wait, and this lane's may be on a stream of autograd's.
        with nullcontext() if self._stream is None else self._stream.issuing():
            if fresh and self._filled_at is not None:
                current_stream(self._group.device).wait_event(self._filled_at)
            for bucket in fresh:
                self.works.append(dist.all_reduce(bucket.flat, group=self._group.group, async_op=True))
        if self._batch is None:
            return False
        works, self.works, self._filled = self.works, [], 0
        batch, self._batch = self._batch, None
        self._group.report(self._key._replace(batch=batch), works)
        return True

    def total(self, n: int) -> torch.Tensor:
        """Return the sum of the gradients of parameter n; the next batch's overwrites it."""
        total: torch.Tensor = self._buckets[self._bucket_of[n]].members[n]
        return total


class _BucketSums(ReadyOnEvent):
    """The message that a batch's sums are ready; its receiver makes its stream wait for them."""

    __slots__ = ("_batch",)

    def __init__(self, works: list[Any], batch: int, device: torch.device) -> None:
        super().__init__(None, works, device)
        self._batch = batch

    @property
    def has_happened(self) -> bool:
        return all(work.is_completed() for work in self._ready)

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
        like = parameters[numbers[0]]
        unit = max(1, _ALIGNMENT // like.element_size())
        sizes = [-(-parameters[n].numel() // unit) * unit for n in numbers]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        self.members: dict[int, torch.Tensor] = {}
        for n, place in zip(numbers, torch.split(self.flat, sizes)):
            self.members[n] = place[: parameters[n].numel()].view(parameters[n].shape)

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy the gradients of the parameters into their places; zeros for one that has none."""
        grads = {n: grad for n in self.members if (grad := parameters[n].grad) is not None}
        for n, place in self.members.items():
            if n not in grads:
                place.zero_()
        if grads:
            torch._foreach_copy_([self.members[n] for n in grads], list(grads.values()))


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
