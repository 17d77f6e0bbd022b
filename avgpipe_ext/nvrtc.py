"""CUDA kernels without nvcc: their source is in the library, compiled by NVRTC and launched through the driver.

Builds of torch with CUDA include NVRTC. Operators check their arguments in the library as always. The library
then passes each launch, a kernel and its parameter block, to the function installed here, which launches it
on torch's current stream of the tensors' device without waiting. A kernel is compiled at its first use, so
use it once before capturing it in a CUDA graph.

Compiled kernels are cached in ~/.cache/avgpipe ($XDG_CACHE_HOME/avgpipe if that is set).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from avgpipe_ext import _native
from avgpipe_ext._library import PATH, build_info

# Without fused multiply-add and with subnormal numbers, as nvcc compiles them (see CMakeLists.txt): results
# equal those of the other builds, bit for bit.
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
HINT = "pip install nvidia-cuda-nvrtc, or rebuild with AVGPIPE_CUDA=1 where nvcc is"
_VERSIONS = ("13", "12")  # of CUDA


class Nvrtc:
    """The run-time compiler. OSError if it is not installed."""

    def __init__(self) -> None:
        self._library = _load(_nvrtc_files())
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(self, source: str, name: str, options: tuple[str, ...], ptx: bool) -> bytes:
        """Compile to machine code, or to ``ptx``; RuntimeError with the compiler's message."""
        program, lib = ctypes.c_void_p(), self._library
        place, no_headers = ctypes.byref(program), ctypes.c_void_p()
        texts = source.encode(), name.encode()
        self._check(lib.nvrtcCreateProgram(place, *texts, 0, no_headers, no_headers))
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = lib.nvrtcCompileProgram(program, len(options), given)
            if status != 0:
                log = self._text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog)
                raise RuntimeError(f"{self._reason(status)}: {log.decode().strip(chr(0)).strip()}")
            if ptx:
                return self._text(program, lib.nvrtcGetPTXSize, lib.nvrtcGetPTX)
            return self._text(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN)
        finally:
            lib.nvrtcDestroyProgram(place)

    def _text(self, program: ctypes.c_void_p, size_of: Any, get: Any) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(get(program, text))
        return text.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"NVRTC: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        reason: bytes = self._library.nvrtcGetErrorString(status)
        return reason.decode()


class Driver:
    """The CUDA driver: it loads machine code and launches it. OSError if there is no driver."""

    def __init__(self) -> None:
        self._library = _load(["libcuda.so.1"])

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make torch's context of a device the thread's inside: a thread may have none yet."""
        self.call("cuCtxPushCurrent_v2", self._primary(device))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @cache  # noqa: B019  there is one driver, which lives as long as the process
    def _primary(self, device: int) -> ctypes.c_void_p:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # until the process ends
        return context

    def load(self, code: bytes, name: str) -> ctypes.c_void_p:
        """Load a function into the current context, for the lifetime of the context."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(
        self, function: ctypes.c_void_p, grid: int, threads: int, stream: int, parameter: memoryview
    ) -> None:
        """Enqueue a kernel whose one parameter is passed by value."""
        value = (ctypes.c_char * len(parameter)).from_buffer_copy(parameter)  # read before this returns
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        size = (grid, 1, 1, threads, 1, 1)
        nothing = ctypes.c_void_p()
        self.call("cuLaunchKernel", function, *size, 0, ctypes.c_void_p(stream), parameters, nothing)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; RuntimeError with its reason if it fails."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


def _load(files: list[str]) -> Any:
    """Load the first existing one of these libraries."""
    problems = []
    for file in files:
        try:
            return ctypes.CDLL(file)
        except OSError as error:
            problems.append(str(error))
    raise OSError("; ".join(problems))


def _nvrtc_files() -> list[str]:
    """Return possible paths of NVRTC, that of torch's CUDA first: the loader's paths, and NVIDIA's packages."""
    own = (torch.version.cuda or "").split(".")[0]
    versions = [own, *(v for v in _VERSIONS if v != own)] if own else list(_VERSIONS)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = []
    for version in versions:
        name = f"libnvrtc.so.{version}"
        files += [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
        files += [name, f"/usr/local/cuda/lib64/{name}"]
    return files


@cache
def nvrtc() -> Nvrtc:
    return Nvrtc()


@cache
def driver() -> Driver:
    return Driver()


def kernel_name(definition: str) -> str:
    """Return the name of the function that one of `_native.KERNEL_DEFINITIONS` makes."""
    return "avgpipe_" + definition.split(",", 1)[0]


def source_of(definition: str) -> str:
    """Return the source of one kernel, complete: it includes no header."""
    return f"{_native.KERNEL_SOURCE}\nAVGPIPE_DEFINE_KERNEL({definition})\n"


def compile_kernel(definition: str, architecture: str) -> bytes:
    """Compile a kernel to machine code.

    Args:
        definition: one of `_native.KERNEL_DEFINITIONS`.
        architecture: NVRTC's option, "sm_90" for machine code, "compute_90" for PTX.

    Returns: cubin, or PTX for a compute_ architecture. RuntimeError with the compiler's message if it fails.
    """
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    name = kernel_name(definition)
    try:
        return nvrtc().compile(
            source_of(definition), f"{name}.cu", options, architecture.startswith("compute_")
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"NVRTC cannot compile {name} for {architecture}; it must support the device, and be CUDA 12.1 or later: "
            f"{error}"
        ) from None


def compiled_file(definition: str, architecture: str) -> Path:
    """Return the file of a kernel's machine code, compiled if it does not exist.

    The name contains a hash of source, options, architecture and compiler. Processes that compile at once
    each write the whole file and rename it.
    """
    key = repr((source_of(definition), OPTIONS, architecture, nvrtc().version()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgpipe"
    path = folder / f"{kernel_name(definition)}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        code = compile_kernel(definition, architecture)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    return path


class DriverLauncher:
    """Launches kernels through the driver; compiles and loads each one at its first use on a device."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, int], tuple[ctypes.c_void_p, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, definition: str, block: memoryview, chunks: int, device: int) -> None:
        """Enqueue a kernel on torch's current stream of a device: see `_native.set_launcher`."""
        stream = torch.cuda.current_stream(device).cuda_stream
        with driver().context(device), self._lock:
            if (definition, device) not in self._loaded:
                properties = torch.cuda.get_device_properties(device)
                code = compiled_file(definition, f"sm_{properties.major}{properties.minor}").read_bytes()
                function = driver().load(code, kernel_name(definition))
                self._loaded[definition, device] = function, properties.multi_processor_count
            function, processors = self._loaded[definition, device]
            grid = _native.grid_size(chunks, processors)
            driver().launch(function, grid, _native.KERNEL_THREADS, stream, block)


def install(launcher: Callable[[str, memoryview, int, int], object] | None = None) -> None:
    """Make `launcher` (by default a new `DriverLauncher`) launch the kernels of all CUDA tensors from now on."""
    _native.set_launcher(str(PATH), launcher or DriverLauncher())


def uninstall() -> None:
    """Undo `install`: built-in kernels run for CUDA tensors again, if there are any."""
    _native.set_launcher(str(PATH), None)


def install_if_needed() -> bool:
    """Install if kernels are not built in, and torch has CUDA. Return False if CUDA tensors remain without kernels."""
    if build_info()["cuda"]:
        return True
    if torch.version.cuda is None:
        return False
    try:
        nvrtc()
    except OSError:
        return False
    install()
    return True


def cuda_path() -> str:
    """Return what computes CUDA tensors: "compiled", "nvrtc", "plain (...)" with reason and remedy, or "none (...)"."""
    if build_info()["cuda"]:
        return "compiled"
    if not torch.cuda.is_available():
        return "none (torch sees no CUDA device)"
    if torch.version.cuda is None:
        return "plain (torch is built for another kind of device)"
    try:
        nvrtc()
    except OSError as error:
        return f"plain (built without CUDA, and NVRTC cannot be loaded: {error}; {HINT})"
    return "nvrtc"
