"""Operators as accesses to memory, on the stream that is current where they are called.

The schemas tell what an operator reads and writes. Backwards are seen too: autograd calls the same operators. What
makes the host wait for the device is noted with the line that did it: reading a number, moving a tensor to the host's
memory.

On a machine without a device, tensors of the device are those that were allocated on "cpu:0", and what operators make
of them; they say that they are there. The host's are on "cpu", as everywhere.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.happens_before.clocks import Account, join
from tests.happens_before.memory import Memory, has_storage, place, storage_of

DEVICE = torch.device("cpu", 0)

_TOLD = ("/python/avgpipe/", "/torch/optim/")  # who hears which device a tensor is on
_ENGINE = "/torch/autograd/graph.py"  # whose call the engine runs in, and what it calls by itself
_WRAPPERS = ("/torch/_compile.py", "/torch/_dynamo/")
# Which of their values an operator's result depends on, the host must know first.
HOST_WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "repeat_interleave", "allclose"),
}
# Copies to the host's memory that no operator shows here, where both memories are one.
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class DeviceAccount(Account):
    """Streams, and the memory that operators touch on them. ``waited``: lines where the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.staging = Memory(self.memory.found)  # the host's, to which a stream copies
        self.operators = 0
        self.waited: Counter[str] = Counter()

    def enqueues(self, device: torch.device) -> bool:
        return device == DEVICE or device.type != "cpu"

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor in self.memory

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.memory.record_stream(tensor, stream)

    def host_waits(self, why: str, reads: list[torch.Tensor]) -> None:
        """The current stream reads something for the host, which waits for all that this stream has."""
        self.enqueue(why, reads, [])
        self.current_stream().synchronize()
        self.waited[f"{place(3)}: {why}"] += 1

    def enqueue(
        self,
        what: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        on_host: Sequence[torch.Tensor] = (),
    ) -> None:
        """Note an operation on the current stream. It writes the device's memory, and the host's ``on_host``."""
        stream = self.current_stream()
        operation = stream.operate()
        what = f"{what} on {stream} ({place(3)})"
        for tensor in reads:
            if tensor in self.memory:
                self.memory.access(tensor, stream, operation, what, writes=False)
        for tensor in writes:
            self.memory.allocate(tensor, stream)
            self.memory.access(tensor, stream, operation, what, writes=True)
        for tensor in on_host:
            self.staging.allocate(tensor, stream)
            self.staging.access(tensor, stream, operation, what, writes=True)

    def look(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the host reads its own memory, where a stream may still be writing."""
        for tensor in tensors:
            if tensor in self.staging:
                self.staging.look(tensor, self.host, f"{what} ({place(3)})")


class Operators(TorchDispatchMode):
    """Notes operators."""

    def __init__(self, account: DeviceAccount) -> None:
        super().__init__()
        self._account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is nobody's reading
            return self._note(func, args, kwargs or {})

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        account = self._account
        memory = account.memory
        reads, writes = tensors_of(func, args, kwargs)
        result = func(*args, **kwargs)
        asked = kwargs.get("device")
        if asked is not None and _caller().endswith(_ENGINE):
            asked = DEVICE  # autograd makes its own where the forward's were, which "cpu" does not tell
        name = func._schema.name.rpartition("::")[2]
        of_device = any(t in memory for t in (*reads, *writes)) if asked is None else asked == DEVICE
        if asked is not None and not of_device and name == "_to_copy" and any(t in memory for t in reads):
            account.host_waits(f"{func}, to the host", reads)
        if not of_device:
            account.look(str(func), reads)
            return result
        if name in HOST_WAITS:
            account.host_waits(str(func), reads)
        if name == "copy_" and args[0] not in memory:
            return self._to_host(args, kwargs, result)
        if name.endswith("_like") or name.startswith("new_"):
            reads = []  # of which only shape and dtype count
        given = {storage_of(tensor) for tensor in (*reads, *writes)}
        made = [t for t in pytree.tree_leaves(result) if has_storage(t) and storage_of(t) not in given]
        if not made and not writes:
            return result  # a view, which touches nothing
        if "empty" in name:
            for tensor in made:
                account.memory.allocate(tensor, account.current_stream())
            return result
        account.operators += 1
        account.enqueue(str(func), reads, [*writes, *made])
        return result

    def _to_host(self, args: Any, kwargs: Any, result: Any) -> Any:
        account = self._account
        if (len(args) > 2 and args[2]) or kwargs.get("non_blocking"):
            account.operators += 1
            account.enqueue("copy to the host", [args[1]], [], [args[0]])
        else:
            account.host_waits("copy_, to the host", [args[1]])
        return result


def _caller() -> str:
    """The file that calls an operator; torch may have wrapped the mode's own method."""
    frame = sys._getframe(3)
    while frame.f_back is not None and any(name in frame.f_code.co_filename for name in _WRAPPERS):
        frame = frame.f_back
    return frame.f_code.co_filename


@functools.cache
def _writes(func: Any) -> tuple[list[bool], dict[str, bool]]:
    """Whether an operator writes its arguments, by their places and by their names."""
    found = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    return found, {a.name: written for a, written in zip(func._schema.arguments, found)}


def tensors_of(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    by_place, by_name = _writes(func)
    for value, written in (*zip(args, by_place), *((value, by_name[name]) for name, value in kwargs.items())):
        if isinstance(value, list | tuple):
            (writes if written else reads).extend(filter(has_storage, value))
        elif has_storage(value):
            (writes if written else reads).append(value)
    return reads, writes


class HostReads(TorchFunctionMode):
    """Notes where Python reads a tensor's values without an operator."""

    def __init__(self, account: DeviceAccount) -> None:
        super().__init__()
        self._account = account

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _DEVICE_OF:
            # Tests compare with tensors of the host; torch.utils.checkpoint what it saves elsewhere with what it finds.
            asks = sys._getframe(1).f_code.co_filename
            tells = any(folder in asks for folder in _TOLD) and args[0] in self._account.memory
            return DEVICE if tells else func(*args)
        if func in _READS:
            self._account.look(func.__name__, args[:1])
        to_host = func is torch.Tensor.cpu or (
            func is torch.Tensor.to and _names_host(args[1:], kwargs or {})
        )
        if (to_host or func in _READS) and args[0] in self._account.memory:
            self._account.host_waits(func.__name__, [args[0]])
            if to_host:  # a tensor of its own, as from a device
                with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                    return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _names_host(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of ``Tensor.to`` ask for the host's memory."""
    asked = kwargs.get("device", args[0] if args else None)
    asked = torch.device(asked) if isinstance(asked, str) else asked
    return isinstance(asked, torch.device) and asked.type == "cpu" and asked != DEVICE


def know(account: DeviceAccount, tensor: torch.Tensor) -> None:
    """Take a tensor for one of the device, made on the current stream."""
    account.memory.allocate(tensor, account.current_stream())


__all__ = ["DEVICE", "DeviceAccount", "HostReads", "Operators", "join", "know"]
