"""CUDA kernels compiled at run time by CuPy, for devices that the build has no machine code for.

Their source is in the library. Operators check their arguments in the library as always. The library then
passes each launch, a kernel and its parameter block, to the function installed here, which launches it on
torch's current stream of the tensors' device without waiting. A kernel is compiled at its first use, so use
it once before capturing it in a CUDA graph.

CuPy comes with the extra `avgpipe[cupy]`. Compiled kernels are cached in ~/.cache/avgpipe
($XDG_CACHE_HOME/avgpipe if that is set).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from avgpipe_ext import _native
from avgpipe_ext._library import PATH, build_info

# Without fused multiply-add and with subnormal numbers, as nvcc compiles them (see CMakeLists.txt): results
# equal those of the other builds, bit for bit.
OPTIONS = ("--std=c++20", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def kernel_name(definition: str) -> str:
    """Return the name of the function that one of `_native.KERNEL_DEFINITIONS` makes."""
    return "avgpipe_" + definition.split(",", 1)[0]


def source_of(definition: str) -> str:
    """Return the source of one kernel, complete: it includes no header."""
    return f"{_native.KERNEL_SOURCE}\nAVGPIPE_DEFINE_KERNEL({definition})\n"


def compile_kernel(definition: str, capability: str) -> bytes:
    """Compile a kernel to machine code.

    Args:
        definition: one of `_native.KERNEL_DEFINITIONS`.
        capability: the device's, "90" for 9.0.

    Returns: the machine code. RuntimeError with the compiler's message if it fails.
    """
    from cupy.cuda import compiler

    name = kernel_name(definition)
    try:
        # Not RawModule(code=...): after all other options it passes -ftz=true, which makes subnormal numbers 0.
        code: bytes
        code, _ = compiler.compile_using_nvrtc(source_of(definition), OPTIONS, capability, f"{name}.cu")
    except compiler.CompileException as error:
        raise RuntimeError(
            f"CuPy cannot compile {name} for compute capability {capability}; its NVRTC must support the device, and "
            f"be of CUDA 12.1 or later: {error}"
        ) from None
    return code


def compiled_file(definition: str, capability: str) -> Path:
    """Return the file of a kernel's machine code, compiled if it does not exist.

    The name contains a hash of source, options, capability and compiler. Processes that compile at once
    each write the whole file and rename it.
    """
    from cupy.cuda import nvrtc

    key = repr((source_of(definition), OPTIONS, capability, nvrtc.getVersion()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgpipe"
    path = folder / f"{kernel_name(definition)}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        code = compile_kernel(definition, capability)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return path


class CupyLauncher:
    """Launches kernels through CuPy; compiles and loads each one at its first use on a device."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, int], tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, definition: str, block: memoryview, chunks: int, device: int) -> None:
        """Enqueue a kernel on torch's current stream of a device: see `_native.set_launcher`."""
        from cupy.cuda import Device, Stream

        stream = Stream.from_external(torch.cuda.current_stream(device))
        value = np.frombuffer(block, np.dtype((np.void, len(block))))  # one struct: CuPy passes it by value
        with Device(device), stream:
            kernel, processors = self._loaded.get((definition, device)) or self._load(definition, device)
            kernel((_native.grid_size(chunks, processors),), (_native.KERNEL_THREADS,), (value,))

    def _load(self, definition: str, device: int) -> tuple[Any, int]:
        """Load a kernel into the current device. RuntimeError while a graph is captured, which that would break."""
        from cupy import RawModule

        name = kernel_name(definition)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name} is compiled at its first use, which is within the capture of a CUDA graph; call the operator "
                "once before the capture, with tensors of the same dtypes"
            )
        with self._lock:
            if (definition, device) not in self._loaded:
                properties = torch.cuda.get_device_properties(device)
                path = compiled_file(definition, f"{properties.major}{properties.minor}")
                kernel = RawModule(path=str(path)).get_function(name)
                self._loaded[definition, device] = kernel, properties.multi_processor_count
            return self._loaded[definition, device]


def install(
    launcher: Callable[[str, memoryview, int, int], object] | None = None, everywhere: bool = False
) -> None:
    """Make `launcher`, by default a new `CupyLauncher`, launch the kernels of CUDA tensors from now on.

    Those of devices that the build has machine code for only `everywhere`.
    """
    _native.set_launcher(str(PATH), launcher or CupyLauncher(), everywhere)


def uninstall() -> None:
    """Undo `install`: built-in kernels run for CUDA tensors again, if there are any."""
    _native.set_launcher(str(PATH), None, False)


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def how_to_get_cupy() -> str:
    """Return the command that installs CuPy for torch's CUDA."""
    version = (torch.version.cuda or "").split(".")[0]
    return "pip install cupy-cuda12x" if version == "12" else "pip install 'avgpipe[cupy]'"


def install_if_needed() -> bool:
    """Install where torch has CUDA and CuPy is installed. Return False if CUDA tensors remain without kernels."""
    by_cupy = torch.version.cuda is not None and has_cupy()
    if by_cupy:
        install()
    return by_cupy or bool(build_info()["cuda"])


def kernels_for(major: int, minor: int) -> str:
    """Return what serves a CUDA device of this compute capability: "compiled", "cupy" or "none"."""
    if _native.images_serve(",".join(build_info()["cuda_arch_list"]), major, minor):
        return "compiled"
    return "cupy" if has_cupy() else "none"


def cuda_path() -> str:
    """Return what computes CUDA tensors: "compiled", "cupy", "plain (...)" with reason and remedy, or "none (...)".

    For a device, see `kernels_for`: with "compiled" there may be one that the build has no machine code for.
    """
    if build_info()["cuda"]:
        return "compiled"
    if not torch.cuda.is_available():
        return "none (torch sees no CUDA device)"
    if torch.version.cuda is None:
        return "plain (torch is built for another kind of device)"
    if not has_cupy():
        remedy = f"{how_to_get_cupy()}, or rebuild with AVGPIPE_CUDA=1 where nvcc is"
        return f"plain (built without CUDA, and CuPy is not installed: {remedy})"
    return "cupy"
