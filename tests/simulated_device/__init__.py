"""A simulated accelerator: four devices, "sim:0" to "sim:3", on which all is done late and in a replayable order.

Operators are the CPU's, on memory that the host cannot read; what is issued to a stream waits there until a policy lets
it run. A wait, a ``record_stream`` or a host synchronisation that is missing gives NaN or wrong numbers under some
seed, and numbers bitwise equal to the CPU's under every seed if nothing is missing. For tests only.

torch counts the devices when autograd first runs, so ``load`` comes first in a process. Loading makes the device the
process's accelerator for good.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from avgpipe import device

NAME = "sim"
DEVICES = 4
POLICIES = ("eager", "late", "random", "starved")

_HERE = Path(__file__).parent
_BUILD = _HERE.parent.parent / "build" / "simulated_device"
_FLAGS = ["-O1", "-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


def unavailable() -> str | None:
    """Why the device cannot be built here; None if it can."""
    return None if shutil.which("c++") or shutil.which("g++") else "no C++ compiler"


def build() -> Any:
    """Compile what has changed, in one process at a time, and import it."""
    from torch.utils import cpp_extension

    folder = Path(sys.executable).parent  # where pip has put ninja
    found = shutil.which("ninja", path=str(folder))
    if found is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock-of-processes", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Torch's own, of a build that was killed, which it would wait for.
        (_BUILD / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "simulated_device",
            [str(path) for path in sorted((_HERE / "csrc").glob("*.cpp"))],
            extra_cflags=_FLAGS,
            build_directory=str(_BUILD),
        )


@cache
def load() -> Any:
    """Make the simulated devices this process's accelerator; returns the compiled module."""
    torch.utils.rename_privateuse1_backend(NAME)
    native = build()
    torch._register_device_module(NAME, _device_module(native))
    # Module.to keeps tied parameters tied where a device's tensors can take the place of the CPU's, as those of CUDA or
    # XPU; of backends that it does not know, torch assumes that they cannot, unless it is told to swap them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    import avgpipe_ext  # noqa: F401 (its operators are there now)

    native.know_avgpipe(True)
    gc.freeze()  # what is imported by now; each simulation would look through it
    return native


def _device_module(native: Any) -> ModuleType:
    """What ``torch.get_device_module("sim")`` returns."""
    module: Any = ModuleType(f"torch.{NAME}")
    generators = tuple(native.default_generator(n) for n in range(DEVICES))

    def index_of(device: Any) -> int:
        index = torch.device(device).index if isinstance(device, str) else getattr(device, "index", device)
        return torch.accelerator.current_device_index() if index is None else int(index)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: generators[index_of(None)].manual_seed(seed)
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: "simulated device"
    return module


class Counters(NamedTuple):
    """What has happened since a simulation began. ``digest``: of the order in which tasks ran."""

    tasks: int
    host_waits: int
    digest: int


class Simulation:
    """The devices as they are inside ``simulate``."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def counters(self) -> Counters:
        return Counters(*self._native.counters())

    @property
    def log(self) -> list[str]:
        """What ran, in order: device, stream and name of each task."""
        found: list[str] = self._native.log()
        return found

    @property
    def stuck(self) -> str:
        """The kernels that spin, in words, and for whom."""
        return str(self._native.stuck())

    @contextmanager
    def without_host_waits(self) -> Iterator[None]:
        """Have every wait of the host for a device raise, inside the block."""
        self._native.forbid_host_waits(True)
        try:
            yield
        finally:
            self._native.forbid_host_waits(False)

    @contextmanager
    def without_avgpipe(self) -> Iterator[None]:
        """Be a device that avgpipe's operators have no kernels for, inside the block."""
        self._native.know_avgpipe(False)
        try:
            yield
        finally:
            self._native.know_avgpipe(True)


class Hardware(NamedTuple):
    """What a GPU has less of than a program may hope.

    Attributes:
        queues: Of a device. Of as many streams, made one after another, each has one of its own, and the seed says
            which. What waits at the head of a queue holds up all behind it. 0: each stream has its own.
        has_pool: Whether a device has 32 streams of each priority, which are used again in turn.
        loads_late: Whether the first launch of a kernel on a device waits for the device, which loads it.
    """

    queues: int = 0
    has_pool: bool = False
    loads_late: bool = False


GENEROUS = Hardware()


@contextmanager
def simulate(
    policy: str = "random", seed: int = 0, keeps_log: bool = False, hardware: Hardware = GENEROUS
) -> Iterator[Simulation]:
    """Begin a new life of the devices, whose order is a function of policy, seed and what is issued.

    Streams, free memory and generators are as new; what an earlier simulation left undone is dropped. Garbage is
    collected before and not inside, as frees are part of what is issued.

    Args:
        policy: ``eager``: all runs at once. ``late``: all runs when the host waits for it, and nothing else then.
            ``random``: of streams that are ready, any, some tasks after each call. ``starved``: all runs at once, but
            on one stream of each device, chosen by the seed, only what somebody waits for.
        seed: Of the order.
        keeps_log: Whether ``Simulation.log`` is kept.
        hardware: What the devices lack.
    """
    native = load()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    native.reset(policy, seed, keeps_log, *hardware)
    device.backend.idle.clear()  # streams of an earlier life
    try:
        yield Simulation(native)
    finally:
        native.reset("eager", 0, False)
        if collects:
            gc.enable()
