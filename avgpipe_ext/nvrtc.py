"""CUDA kernels without nvcc: the source that the library carries, compiled by NVRTC and launched through CuPy.

Operators check their arguments in the library as always. It then hands over each launch, a kernel and its parameter
block, to the function installed here, which launches it on torch's current stream of the tensors' device and waits
for nothing. A kernel is compiled at its first use, so use it once before capturing it in a CUDA graph.

CuPy's own compiler cache is not used: CuPy compiles with -ftz=true, which would flush subnormal numbers to zero.
The kernels are kept in ~/.cache/avgpipe ($XDG_CACHE_HOME/avgpipe where that is set).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

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

_Launcher = ctypes.CFUNCTYPE(
    ctypes.c_int32,  # 0, or not with a message
    ctypes.c_char_p,  # the kernel's definition
    ctypes.c_void_p,  # its parameter block
    ctypes.c_int64,  # bytes of the block
    ctypes.c_int64,  # chunks to do
    ctypes.c_int32,  # index of the device
    ctypes.c_void_p,  # where a message goes
    ctypes.c_int64,  # bytes there
)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(PATH))
    library.avgpipe_kernel_source.restype = ctypes.c_char_p
    library.avgpipe_kernel_definitions.restype = ctypes.c_char_p
    library.avgpipe_kernel_threads.restype = ctypes.c_int32
    library.avgpipe_grid_size.restype = ctypes.c_int64
    library.avgpipe_grid_size.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.avgpipe_set_launcher.restype = None
    library.avgpipe_set_launcher.argtypes = [ctypes.c_void_p]
    return library


def _cupy() -> Any:
    """CuPy, imported at the first call: it takes a while, and most runs have no use for it."""
    return importlib.import_module("cupy")


def definitions() -> list[str]:
    """All kernels: each a name, and after a comma what the source needs to know to define it."""
    text: bytes = _library().avgpipe_kernel_definitions()
    return text.decode().splitlines()


def kernel_name(definition: str) -> str:
    """The name of the function that a definition makes."""
    return "avgpipe_" + definition.split(",", 1)[0]


def source_of(definition: str) -> str:
    """Source of one kernel, complete: no header is included."""
    text: bytes = _library().avgpipe_kernel_source()
    return f"{text.decode()}\nAVGPIPE_DEFINE_KERNEL({definition})\n"


def compile_kernel(definition: str, architecture: str) -> bytes:
    """A kernel's machine code.

    Args:
        definition: one of `definitions()`.
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


def cache_dir() -> Path:
    """Where compiled kernels are kept: the environment's cache folder, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "avgpipe"


def compiled_file(definition: str, architecture: str) -> Path:
    """The file of a kernel's machine code, compiled unless it is there.

    The name tells source, options, architecture and compiler. Processes that compile at once each write the whole file
    and rename it.
    """
    key = repr((source_of(definition), OPTIONS, architecture, _cupy().cuda.nvrtc.getVersion()))
    path = cache_dir() / f"{kernel_name(definition)}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if path.exists():
        return path
    code = compile_kernel(definition, architecture)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
    return path


@dataclass(frozen=True)
class _Stream:
    """A cudaStream_t as CUDA libraries hand it to each other."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address  # version of the protocol


class CupyKernels:
    """Launches kernels through CuPy; compiles and loads each one at its first use on a device."""

    def __init__(self) -> None:
        self._library = _library()
        self._threads: int = self._library.avgpipe_kernel_threads()
        self._functions: dict[tuple[str, int], Any] = {}
        self._processors: dict[int, int] = {}
        self._lock = threading.Lock()

    def launch(self, definition: str, block: int, block_bytes: int, chunks: int, device: int) -> None:
        """Enqueue a kernel on torch's current stream of device number `device`.

        Args:
            definition: of the kernel.
            block, block_bytes: address and size of its only parameter; copied before this returns.
            chunks: pieces of work, from which the grid's size follows.
        """
        cupy = _cupy()
        with cupy.cuda.Device(device):
            function, processors = self._function(definition, device)
            # A numpy array of one element is passed by value.
            memory = (ctypes.c_ubyte * block_bytes).from_address(block)
            parameter = np.frombuffer(memoryview(memory), dtype=np.dtype((np.void, block_bytes)))
            stream = cupy.cuda.Stream.from_external(_Stream(torch.cuda.current_stream(device).cuda_stream))
            with stream:
                function(
                    (self._library.avgpipe_grid_size(chunks, processors),), (self._threads,), (parameter,)
                )

    def _function(self, definition: str, device: int) -> tuple[Any, int]:
        key = (definition, device)
        if key not in self._functions:
            with self._lock:
                self._load(definition, device)
        return self._functions[key], self._processors[device]

    def _load(self, definition: str, device: int) -> None:
        cupy = _cupy()
        properties = cupy.cuda.Device(device)
        path = compiled_file(definition, f"sm_{properties.compute_capability}")
        module = cupy.RawModule(path=str(path))
        self._processors[device] = int(properties.attributes["MultiProcessorCount"])
        self._functions[definition, device] = module.get_function(kernel_name(definition))


def _callback(kernels: Any) -> Any:
    """What the library calls. No exception leaves it: the library raises the message instead."""

    def run(
        definition: bytes,
        block: int,
        block_bytes: int,
        chunks: int,
        device: int,
        message: int,
        message_bytes: int,
    ) -> int:
        try:
            kernels.launch(definition.decode(), block, block_bytes, chunks, device)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".encode()[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, text, len(text))
            return 1
        return 0

    return _Launcher(run)


_installed: Any = None  # the library keeps no reference to it


def install(kernels: Any = None) -> None:
    """Let `kernels.launch` (by default of a new `CupyKernels`) serve all CUDA tensors from now on."""
    global _installed
    _installed = _callback(CupyKernels() if kernels is None else kernels)
    _library().avgpipe_set_launcher(ctypes.cast(_installed, ctypes.c_void_p))


def uninstall() -> None:
    """Undo `install`: compiled-in kernels serve CUDA tensors again, if there are any."""
    global _installed
    _library().avgpipe_set_launcher(None)
    _installed = None


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
