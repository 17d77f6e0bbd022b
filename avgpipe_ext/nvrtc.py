"""CUDA kernels without nvcc: the source that the library carries, compiled by NVRTC and launched through CuPy.

Operators check their arguments in the library as always. It then hands over each launch, a kernel and its parameter
block, to the function installed here, which launches it on torch's current stream of the tensors' device and waits
for nothing. A kernel is compiled at its first use, so use it once before capturing it in a CUDA graph.

CuPy's own compiler cache is not used: CuPy compiles with -ftz=true, which would flush subnormal numbers to zero.
The kernels are kept in ~/.cache/avgpipe ($XDG_CACHE_HOME/avgpipe where that is set).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from avgpipe_ext import _native
from avgpipe_ext._library import PATH, build_info

# Without fused multiply-add and with subnormal numbers, as nvcc compiles them (see CMakeLists.txt): results are
# those of the other builds, bit for bit.
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
HINT = "pip install 'cupy-cuda13x>=14', or 'cupy-cuda12x>=14' for CUDA 12, or rebuild with AVGPIPE_CUDA=1 where nvcc is"


def _cupy() -> Any:
    """CuPy, imported at the first call: it takes a while, and most runs have no use for it."""
    return importlib.import_module("cupy")


def kernel_name(definition: str) -> str:
    """The name of the function that one of `_native.KERNEL_DEFINITIONS` makes."""
    return "avgpipe_" + definition.split(",", 1)[0]


def source_of(definition: str) -> str:
    """Source of one kernel, complete: no header is included."""
    return f"{_native.KERNEL_SOURCE}\nAVGPIPE_DEFINE_KERNEL({definition})\n"


def compile_kernel(definition: str, architecture: str) -> bytes:
    """A kernel's machine code.

    Args:
        definition: one of `_native.KERNEL_DEFINITIONS`.
        architecture: as in NVRTC's option, "sm_90" for machine code, "compute_90" for PTX.

    Returns: cubin, or PTX for a compute_ architecture. RuntimeError with the compiler's text if it fails.
    """
    nvrtc = _cupy().cuda.nvrtc
    program = nvrtc.createProgram(source_of(definition), f"{kernel_name(definition)}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture={architecture}"))
        is_ptx = architecture.startswith("compute_")
        code: bytes | str = nvrtc.getPTX(program) if is_ptx else nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip()
        raise RuntimeError(
            f"NVRTC cannot compile {kernel_name(definition)} for {architecture} ({error}); it must know the "
            f"device, and be of CUDA 12.1 or later: {log}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)
    return code if isinstance(code, bytes) else code.encode()


def compiled_file(definition: str, architecture: str) -> Path:
    """The file of a kernel's machine code, compiled unless it is there.

    The name tells source, options, architecture and compiler. Processes that compile at once each write the whole file
    and rename it.
    """
    key = repr((source_of(definition), OPTIONS, architecture, _cupy().cuda.nvrtc.getVersion()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgpipe"
    path = folder / f"{kernel_name(definition)}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        code = compile_kernel(definition, architecture)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return path


@dataclass(frozen=True)
class _Stream:
    """A cudaStream_t as CUDA libraries hand it to each other."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address  # version of the protocol


class CupyLauncher:
    """Launches kernels through CuPy; compiles and loads each one at its first use on a device."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, int], tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, definition: str, block: memoryview, chunks: int, device: int) -> None:
        """Enqueue a kernel on torch's current stream of a device: see `_native.set_launcher`."""
        cupy = _cupy()
        properties = cupy.cuda.Device(device)
        with properties, self._lock:
            if (definition, device) not in self._loaded:
                path = compiled_file(definition, f"sm_{properties.compute_capability}")
                function = cupy.RawModule(path=str(path)).get_function(kernel_name(definition))
                processors = int(properties.attributes["MultiProcessorCount"])
                self._loaded[definition, device] = function, processors
            function, processors = self._loaded[definition, device]
            # A numpy array of one element is passed by value.
            parameter = np.frombuffer(block, dtype=np.dtype((np.void, len(block))))
            with cupy.cuda.Stream.from_external(_Stream(torch.cuda.current_stream(device).cuda_stream)):
                grid = _native.grid_size(chunks, processors)
                function((grid,), (_native.KERNEL_THREADS,), (parameter,))


def install(launcher: Callable[[str, memoryview, int, int], object] | None = None) -> None:
    """Let `launcher` (by default a new `CupyLauncher`) serve all CUDA tensors from now on."""
    _native.set_launcher(str(PATH), launcher or CupyLauncher())


def uninstall() -> None:
    """Undo `install`: compiled-in kernels serve CUDA tensors again, if there are any."""
    _native.set_launcher(str(PATH), None)


def install_if_needed() -> None:
    """Install where kernels are not compiled in, and CuPy is there; CuPy is imported at the first launch only."""
    if not build_info()["cuda"] and importlib.util.find_spec("cupy") is not None:
        install()


def cuda_path() -> str:
    """What serves CUDA tensors: "compiled", "cupy", or "none (...)" with the reason and the way out."""
    if build_info()["cuda"]:
        return "compiled"
    if not torch.cuda.is_available():
        return "none (torch sees no CUDA device)"
    if importlib.util.find_spec("cupy") is None:
        return f"none (built without CUDA, and there is no CuPy; {HINT})"
    try:
        _cupy()
    except Exception as error:  # CuPy raises many kinds where its libraries are missing
        return f"none (CuPy cannot be imported: {error}; {HINT})"
    return "cupy"
