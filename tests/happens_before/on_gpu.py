"""The account of a GPU's streams as torch itself tells of them, and of the memory that operators touch on them.

    pytest -p tests.happens_before.on_gpu tests/runtime/test_cuda.py

torch tells (``torch.cuda._gpu_trace``) which event is recorded on which stream, who waits for it, where memory comes
from and when the host synchronizes; a dispatch mode sees the operators, in backwards too. Nothing is stood in for: the
streams, events and addresses are the device's own.

It does not see what is no operator: replays of CUDA graphs, NCCL, and what autograd's engine itself tells the
allocator. So "freed and reused" of a gradient that crosses streams may be a false alarm; a race is none. Nor does it
see other processes.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.cuda import _gpu_trace
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from avgpipe.runtime.scheduler import Scheduler
from tests.happens_before.clocks import Event, Stream, join
from tests.happens_before.memory import storage_of
from tests.happens_before.operators import DeviceAccount, tensors_of
from tests.happens_before.plugin import _MOST, totals

_TOLD = (
    *("event_creation", "event_deletion", "event_record", "event_wait", "event_synchronization"),
    *("memory_allocation", "memory_deallocation"),
    *("stream_creation", "stream_synchronization", "device_synchronization"),
)


class GpuAccount(DeviceAccount):
    """Streams, events and memory by the numbers that torch gives them. Each of ``_TOLD`` is a method."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, Stream] = {0: self.default}
        self._events: dict[int, Event] = {}
        self._homes: dict[int, Stream] = {}  # by address

    def stream(self, handle: int) -> Stream:
        if handle not in self._streams:
            self._streams[handle] = Stream(self)
        return self._streams[handle]

    def current_stream(self, device: Any = None) -> Stream:
        return self.stream(current_handle())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def enqueue(
        self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], *rest: Any, **more: Any
    ) -> None:
        for tensor in (*reads, *writes):
            # Whatever was there before anybody looked is seen here for the first time.
            home = self._homes.get(tensor.untyped_storage().data_ptr())
            self.memory.allocate(tensor, home or self.current_stream())
        super().enqueue(what, reads, writes, *rest, **more)

    # ---- what torch tells -----------------------------------------------------------------------------------

    def event_creation(self, event: int) -> None:
        self._events[event] = Event(self)

    def event_deletion(self, event: int) -> None:
        self._events.pop(event, None)  # its number may come again

    def event_record(self, event: int, stream: int) -> None:
        self._events.setdefault(event, Event(self)).record(self.stream(stream))

    def event_wait(self, event: int, stream: int) -> None:
        if event in self._events:  # else all before it is long done
            self._events[event].wait(self.stream(stream))

    def event_synchronization(self, event: int) -> None:
        if event in self._events:
            self._events[event].synchronize()

    def memory_allocation(self, address: int) -> None:
        self._homes[address] = self.current_stream()

    def memory_deallocation(self, address: int) -> None:
        self._homes.pop(address, None)

    def stream_creation(self, stream: int) -> None:
        self.stream(stream)

    def stream_synchronization(self, stream: int) -> None:
        self.stream(stream).synchronize()

    def device_synchronization(self) -> None:
        for stream in list(self._streams.values()):
            join(self.host, stream.clock)


class GpuOperators(TorchDispatchMode):
    """Notes operators on tensors of the device."""

    def __init__(self, account: GpuAccount) -> None:
        super().__init__()
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, account = kwargs or {}, self._account
        if func is torch.ops.aten.record_stream.default:
            account.record_stream(args[0], account.stream(handle_of(args[1])))
            return func(*args, **kwargs)
        reads, writes = ([t for t in some if account.holds(t)] for some in tensors_of(func, args, kwargs))
        given = {storage_of(tensor) for tensor in (*reads, *writes)}
        if _looks_at_shapes(func):
            reads = []
        if reads or writes:
            # Before it runs: an operator that makes the host wait is waited for, too.
            account.operators += 1
            account.enqueue(str(func), reads, writes)
        result = func(*args, **kwargs)
        made = [
            t
            for t in pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and account.holds(t) and storage_of(t) not in given
        ]
        if made and "empty" not in func._schema.name:
            account.enqueue(str(func), [], made)
        return result


@functools.cache
def _looks_at_shapes(func: Any) -> bool:
    """Whether an operator reads no values: a view, or one that makes a tensor like another one."""
    name = func._schema.name.rpartition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or name.endswith("_like") or name.startswith("new_")


class _Tap:
    """What torch tells goes to ``account``, as long as there is one; torch has no way to stop."""

    def __init__(self) -> None:
        self.account: GpuAccount | None = None
        torch._C._activate_gpu_trace()
        for name in _TOLD:
            getattr(_gpu_trace, f"register_callback_for_{name}")(functools.partial(self.tell, name))

    def tell(self, what: str, *numbers: int) -> None:
        account = self.account
        if account is None:
            return
        try:
            getattr(account, what)(*numbers)
        except Exception as error:  # which torch would log, as if nothing had been found
            account.memory.found[f"the account failed at {what}{numbers}: {error!r}"] += 1


tap = functools.cache(_Tap)


def current_handle() -> int:
    return torch.cuda.current_stream().cuda_stream


def handle_of(stream: Any) -> int:
    """Return CUDA's number of a stream, which a torch.Stream does not tell."""
    parts = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
    return torch.cuda.Stream(**parts).cuda_stream


@contextmanager
def watching(account: GpuAccount) -> Iterator[GpuAccount]:
    """Note all that happens on the GPU inside, in threads that begin there too."""
    # torch.Event.query cannot be replaced; but only clocks ask it, and no memory waits for what they find.
    run, query, until = threading.Thread.run, torch.cuda.Event.query, Scheduler.run_until_done

    def noted(thread: threading.Thread) -> None:
        with GpuOperators(account):
            run(thread)

    def asked(event: torch.cuda.Event) -> bool:
        happened = query(event)
        if happened:
            tap().tell("event_synchronization", event.cuda_event)
        return happened

    def waited(scheduler: Scheduler, event: Any, *rest: Any, **more: Any) -> None:
        until(scheduler, event, *rest, **more)  # which asks, and of that torch does not tell
        tap().tell("event_synchronization", event.event_id)

    with ExitStack() as stack:
        # An early stop is an exception, amid which torch frees memory, and tells of it with that exception still set.
        stack.enter_context(set_checkpoint_early_stop(False))
        stack.enter_context(mock.patch.object(Scheduler, "run_until_done", waited))
        stack.enter_context(mock.patch.object(torch.cuda.Event, "query", asked))
        stack.enter_context(mock.patch.object(threading.Thread, "run", noted))
        stack.enter_context(mock.patch.object(tap(), "account", account))
        stack.enter_context(GpuOperators(account))
        yield account


@pytest.fixture(autouse=True)
def _in_order_on_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of every test that needs a GPU, where this module is loaded as a plugin."""
    marked = request.node.get_closest_marker
    if not marked("gpu") or marked("host") or not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()  # nothing is under way that nobody noted
    account = GpuAccount()
    with watching(account):
        yield
    request.node.user_properties.append(("happens-before", totals(account)))
    found = account.memory.found
    assert not found, "out of order:\n" + "\n".join(
        f"{n} times {what}" for what, n in Counter(found).most_common(_MOST)
    )
