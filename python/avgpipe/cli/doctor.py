"""``avgpipe doctor``: prints what is built, present and used."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import typer
from rich.table import Table

from avgpipe import __version__
from avgpipe.cli.config import DoctorConfig
from avgpipe.cli.output import FAILED, answer
from avgpipe.ranks.environment import cores, cpu_model
from avgpipe.units import format_bytes

_PATIENCE_S = 20.0
_GREETING = b"here"
# A second process opens the memory as a peer would, without torch, which takes seconds to load.
_PEER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, int(sys.argv[2]))
memory[-4:] = b"here"
"""


@dataclass
class Findings:
    """What the checks found.

    Attributes:
        facts: Values by section and name.
        missing: What is missing, and how to get it.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether training can work."""
        return "native" in self.facts

    def lacks(self, what: str, remedy: str) -> None:
        self.missing.append({"what": what, "do": remedy})


def run(config: DoctorConfig) -> None:
    found = examine()
    table = Table.grid(padding=(0, 2))
    for section, facts in found.facts.items():
        for number, (name, value) in enumerate(facts.items()):
            table.add_row("" if number else section, name.removesuffix("_bytes"), _words(name, value))
    missing = [f"missing: {item['what']}: {item['do']}" for item in found.missing]
    ready = "ready to train" if found.usable else "not ready to train: see what is missing"
    answer(
        config.json, {**found.facts, "missing": found.missing, "usable": found.usable}, table, *missing, ready
    )
    if not found.usable:
        raise typer.Exit(FAILED)


def examine() -> Findings:
    found = Findings()
    found.facts["versions"] = {
        "avgpipe": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    found.facts["machine"] = {
        "cpu": cpu_model(),
        "cores": cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    try:
        import torch

        import avgpipe_ext
    except ImportError as error:
        found.lacks("torch, or the native operators", str(error))
        return found
    found.facts["versions"]["torch"] = torch.__version__
    found.facts["native"] = dict(avgpipe_ext.build_info())
    found.facts["operators"] = {"cpu": avgpipe_ext.cpu_path(), "cuda": avgpipe_ext.cuda_path()}
    _cuda(found)
    _links(found)
    return found


def _cuda(found: Findings) -> None:
    import torch

    from avgpipe_ext.run_time import how_to_get_cupy, kernels_for

    devices = []
    for n in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(n)
        capability, kernels = f"{p.major}.{p.minor}", kernels_for(p.major, p.minor)
        facts = {"name": p.name, "capability": capability, "memory_bytes": p.total_memory}
        devices.append({**facts, "kernels": kernels})
        if kernels == "none":
            compiled = ", ".join(found.facts["native"]["cuda_arch_list"])
            found.lacks(
                f"CUDA kernels for {p.name} (compute capability {capability}): the build has those for "
                f"{compiled or 'no device'}, and CuPy, which could compile them, is not installed; "
                f"{'operators raise an error' if compiled else 'plain torch is used, which is slower'}",
                f"{how_to_get_cupy()}, or put nvcc on PATH and build again: AVGPIPE_CUDA=1 "
                f"TORCH_CUDA_ARCH_LIST={capability} pip install --no-build-isolation -e .",
            )
        _torch_kernels(found, p.name, p.major, p.minor)
    found.facts["cuda"] = {
        "torch_built_for": torch.version.cuda,
        "torch_architectures": torch.cuda.get_arch_list(),
        "devices": devices,
    }
    if devices:
        found.facts["cuda"] |= {"queues": _queues(), "shared_by_processes": _sharing()}
    if not devices and torch.version.cuda is None:
        found.lacks("CUDA: this torch is built for CPU", "for GPUs, install a torch build with CUDA")
    elif not devices:
        found.lacks(
            "CUDA: torch sees no device", "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        )


def _torch_kernels(found: Findings, name: str, major: int, minor: int) -> None:
    """Note it if torch itself has no machine code for a device."""
    import torch

    from avgpipe_ext import _native

    entries = []  # as in TORCH_CUDA_ARCH_LIST: sm_90a is 9.0a, compute_120 is 12.0+PTX
    for kind, digits, suffix in re.findall(r"(sm|compute)_(\d+)(\w?)", " ".join(torch.cuda.get_arch_list())):
        entries.append(f"{digits[:-1]}.{digits[-1]}{suffix}{'+PTX' if kind == 'compute' else ''}")
    if entries and not _native.images_serve(",".join(entries), major, minor):
        found.lacks(
            f"torch's own kernels for {name} (compute capability {major}.{minor}): torch is built for "
            f"{', '.join(entries)}",
            "install a build of torch for this device",
        )


def _queues() -> str:
    """Return how many hardware queues the streams of a process share."""
    from avgpipe.ranks.queues import VARIABLE, queue_environment

    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return f"{asked} for all streams ({VARIABLE})"
    return (
        f"{queue_environment()[VARIABLE]} for all streams in processes that avgpipe starts, 8 in others that use CUDA "
        f"before they make a Pipeline ({VARIABLE} is not set)"
    )


def _sharing() -> str:
    """Return whether kernels of several processes run at once on a device, which needs MPS."""
    from avgpipe.ranks.queues import mps_runs

    if mps_runs():
        return (
            "kernels run at once (MPS is running); no guarantee about lost processes: NVIDIA leaves undefined what "
            "becomes of the others when one is killed at work"
        )
    return "one after another: no MPS; where workers share a device, start nvidia-cuda-mps-control -d"


def _links(found: Findings) -> None:
    """Note which link carries tensors between stages, by where the two ends are."""
    import torch
    import torch.distributed as dist

    problem = try_shared_memory()
    on_host = "shared memory" if problem is None else "torch.distributed, gloo"
    devices = torch.cuda.device_count()
    nccl = "NCCL" if dist.is_nccl_available() else on_host
    can_share = problem is None and _has_binding()
    found.facts["links"] = {
        "same process": "local",
        "other process of this host": on_host,
        "other host": "torch.distributed, gloo",
        "other process, same CUDA device": ("CUDA IPC" if can_share else on_host) if devices else None,
        "a CUDA device for each process": (
            f"CUDA IPC where the two have peer access, else {nccl}" if can_share else nccl
        )
        if devices
        else None,
        "waits": f"spin briefly, then sleep, while this host has at most {cores()} workers; else they sleep at once",
    }
    if problem is not None:
        found.lacks(
            f"shared memory between processes ({problem})",
            "workers of one host use gloo, which is slower; make them visible to each other in /proc (one PID "
            "namespace, one user, no hidepid), and allow memfd_create",
        )
    if devices and not _has_binding():
        found.lacks(
            "cuda.bindings, with which processes share the memory of devices",
            "pip install cuda-bindings of torch's CUDA version; torch's own wheels bring it",
        )
    if cores() == 1:
        found.lacks("a second core", "workers of this host take turns; --stages 1 is as fast")


def _has_binding() -> bool:
    """Whether NVIDIA's binding of the CUDA driver is installed."""
    try:
        return find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


def try_shared_memory() -> str | None:
    """Return None if another process can use this process's shared memory and wake it, else the reason."""
    from avgpipe_ext import ring

    if not ring.supported():
        return "needs Linux, with /proc"
    size = 4096
    try:
        mine = ring.Memory.create(size)
        theirs = ring.Memory.open(mine.path, size)
        command = [sys.executable, "-S", "-c", _PEER, mine.path, str(size)]
        peer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"another process could not open it within {_PATIENCE_S:g} s"
    except (OSError, MemoryError) as error:
        return str(error)
    if peer.returncode != 0:
        lines = peer.stderr.strip().splitlines() or [f"exit code {peer.returncode}"]
        return f"another process cannot open it: {lines[-1]}"
    bell = ring.Bell(mine, 0)
    seen = bell.count()
    ring.Bell(theirs, 0).ring()
    if bell.wait(seen, _PATIENCE_S) == seen:
        return "a wake-up through shared memory did not arrive"
    heard = memoryview(mine)[-len(_GREETING) :] == _GREETING
    return None if heard else "what another process writes is not seen"


def _words(name: str, value: Any) -> str:
    if value is None or value == [] or value == "":
        return "-"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_words("", v) for v in value)
    if isinstance(value, dict):
        size = _words("memory_bytes", value["memory_bytes"])
        return f"{value['name']} ({value['capability']}, {size}, kernels: {value['kernels']})"
    return str(value)
