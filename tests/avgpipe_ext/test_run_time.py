"""Kernels compiled and launched by CuPy: compiling, caching, the arguments' way. Needs no GPU."""

from __future__ import annotations

import functools
import re
import sys
import types
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from avgpipe_ext import _library, _native, run_time

needs_cupy = pytest.mark.skipif(
    not run_time.has_cupy(), reason="CuPy is not installed; pip install '.[cuda-check]' brings it"
)
DEFINITION = "adam_mixed, kAdam, float, true"


# ---- CuPy's own compiler ------------------------------------------------------------------------------------------


def compile_by_cupy(monkeypatch, definition, kind="sm", capability="90"):
    """Compile without a device: CuPy looks for one only to choose between machine code ("sm") and PTX ("compute")."""
    from cupy.cuda import compiler

    chosen = (f"-arch={kind}_{capability}", "cubin" if kind == "sm" else "ptx")
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: chosen)
    return run_time.compile_kernel(definition, capability)


@pytest.mark.grid(6)
@needs_cupy
@pytest.mark.parametrize("definition", _native.KERNEL_DEFINITIONS)
def test_every_kernel_compiles_for_hopper(monkeypatch, definition):
    code = compile_by_cupy(monkeypatch, definition)
    assert code[:4] == b"\x7fELF"
    assert run_time.kernel_name(definition).encode() in code


@needs_cupy
@pytest.mark.parametrize("capability", ["75", "80", "86", "89", "100", "103", "120"])
def test_a_kernel_compiles_for_every_architecture(monkeypatch, capability):
    assert compile_by_cupy(monkeypatch, DEFINITION, capability=capability)[:4] == b"\x7fELF"


@needs_cupy
@pytest.mark.parametrize(
    "definition", [d for d in _native.KERNEL_DEFINITIONS if "_float" in d or "copy" in d]
)
def test_float_kernels_compile_for_ampere_without_contraction_or_flushing(monkeypatch, definition):
    ptx = compile_by_cupy(monkeypatch, definition, "compute", "80").decode()
    assert f".entry {run_time.kernel_name(definition)}(" in ptx
    assert ".ftz.f32" not in ptx
    assert not re.search(r"\bfma\.rn\.f32", ptx)
    assert re.search(r"\bld\.global\.v[24]", ptx)
    assert "st.global.v4" in ptx


@needs_cupy
def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words(monkeypatch):
    monkeypatch.setattr(run_time, "source_of", lambda definition: "__global__ void f() { undeclared = 1; }")
    message = r"CuPy cannot compile avgpipe_adam_mixed for compute capability 90(.|\n)*undeclared"
    with pytest.raises(RuntimeError, match=message):
        compile_by_cupy(monkeypatch, DEFINITION)


def test_definitions_name_every_kernel_once():
    names = [run_time.kernel_name(definition) for definition in _native.KERNEL_DEFINITIONS]
    assert len(set(names)) == len(names) == 49
    assert {"avgpipe_pull_float", "avgpipe_predict_adam_double", "avgpipe_copy_mixed_double"} <= set(names)
    assert DEFINITION in _native.KERNEL_DEFINITIONS


def test_the_source_needs_no_file():
    source = run_time.source_of(DEFINITION)
    assert source.endswith(f"AVGPIPE_DEFINE_KERNEL({DEFINITION})\n")
    assert '#include "' not in source


# ---- a stand-in for CuPy ------------------------------------------------------------------------------------------


class FakeCupy:
    """Keeps account of current devices and streams, and records launches with the bytes of their argument."""

    def __init__(self):
        self.devices, self.streams, self.modules, self.launches, self.error = [], [], [], [], None
        self.cuda = types.SimpleNamespace(
            Device=lambda number: self._current(self.devices, number),
            Stream=types.SimpleNamespace(from_external=self._stream),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        )

    @contextmanager
    def _current(self, stack, value):
        stack.append(value)
        try:
            yield
        finally:
            stack.pop()

    def _stream(self, foreign):
        version, pointer = foreign.__cuda_stream__()
        assert version == 0
        return self._current(self.streams, pointer)

    def RawModule(self, path):
        self.modules.append((path, self.devices[-1]))
        return types.SimpleNamespace(get_function=lambda name: functools.partial(self.launch, path, name))

    def launch(self, path, name, grid, block, arguments):
        if self.error is not None:
            raise self.error
        (value,) = arguments
        assert isinstance(value, np.ndarray)  # CuPy passes those of one element by value
        assert value.size == 1
        self.launches.append((path, name, self.devices[-1], self.streams[-1], grid, block, value.tobytes()))


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    monkeypatch.setattr(run_time, "compiled_file", lambda definition, capability: f"sm_{capability}")

    def stream_of(device):
        return types.SimpleNamespace(__cuda_stream__=lambda: (0, 0xABC0 + device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


BLOCK = bytes(range(256)) * 64


def test_a_launch_passes_the_block_by_value_on_torchs_current_stream(cupy):
    run_time.CupyLauncher()(DEFINITION, memoryview(BLOCK), 5, 3)
    assert cupy.launches == [("sm_90", "avgpipe_adam_mixed", 3, 0xABC3, (5,), (256,), BLOCK)]
    assert (cupy.devices, cupy.streams) == ([], [])  # the thread has the device and the stream that it had


def test_a_kernel_is_loaded_once_per_device(cupy):
    launcher = run_time.CupyLauncher()
    for device in (0, 1, 0, 1):
        launcher(DEFINITION, memoryview(BLOCK), 1, device)
    assert cupy.modules == [("sm_90", 0), ("sm_90", 1)]
    assert [launch[2] for launch in cupy.launches] == [0, 1] * 2


def test_the_grid_is_limited_by_the_device(cupy):
    run_time.CupyLauncher()(DEFINITION, memoryview(BLOCK), 10**9, 0)
    assert cupy.launches[0][4] == (132 * 32,)


def test_a_refused_launch_is_reported_in_cupys_words(cupy):
    cupy.error = RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many of something")
    with pytest.raises(RuntimeError, match="too many of something"):
        run_time.CupyLauncher()(DEFINITION, memoryview(BLOCK), 1, 0)
    assert (cupy.devices, cupy.streams) == ([], [])


def test_a_kernel_that_could_not_be_compiled_is_tried_again(cupy, monkeypatch):
    def fail(definition, capability):
        raise RuntimeError("no such device")

    launcher = run_time.CupyLauncher()
    with monkeypatch.context() as failing:
        failing.setattr(run_time, "compiled_file", fail)
        with pytest.raises(RuntimeError, match="no such device"):
            launcher(DEFINITION, memoryview(BLOCK), 1, 0)
    launcher(DEFINITION, memoryview(BLOCK), 1, 0)
    assert len(cupy.launches) == 1


def test_a_graph_captures_a_kernel_that_was_used_before_and_refuses_another(cupy, monkeypatch):
    launcher = run_time.CupyLauncher()
    launcher(DEFINITION, memoryview(BLOCK), 1, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launcher(DEFINITION, memoryview(BLOCK), 1, 0)
    assert len(cupy.launches) == 2
    with pytest.raises(
        RuntimeError, match=r"avgpipe_pull_float is compiled at its first use.*before the capture"
    ):
        launcher("pull_float, kPull, float, false", memoryview(BLOCK), 1, 0)
    assert len(cupy.modules) == 1


def test_compiled_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setitem(sys.modules, "cupy.cuda", sys.modules["cupy"].cuda)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_kernel(definition, capability):
        compiled.append(capability)
        return capability.encode()

    monkeypatch.setattr(run_time, "compile_kernel", compile_kernel)
    first = run_time.compiled_file(DEFINITION, "80")
    assert run_time.compiled_file(DEFINITION, "80") == first
    assert first.parent == tmp_path / "avgpipe"
    assert first.read_bytes() == b"80"
    assert run_time.compiled_file(DEFINITION, "90") != first
    monkeypatch.setattr(run_time, "source_of", lambda definition: "another version")
    assert run_time.compiled_file(DEFINITION, "80") != first
    assert compiled == ["80", "90", "80"]
    assert sorted(p.suffix for p in first.parent.iterdir()) == [".cubin"] * 3


# ---- who launches -------------------------------------------------------------------------------------------------


def test_a_launcher_is_kept_until_it_is_uninstalled():
    launcher = torch.nn.Identity()
    kept = weakref.ref(launcher)
    run_time.install(functools.partial(print, launcher))
    del launcher
    assert kept() is not None
    run_time.uninstall()
    assert kept() is None
    run_time.install_if_needed()


def test_another_library_is_refused():
    assert _library.build_info()["version"]
    for path in ("/nowhere/libavgpipe.so", torch._C.__file__):
        with pytest.raises(ImportError, match="is not loaded, or not of this version of avgpipe"):
            _native.build_info(path)


@pytest.mark.parametrize(
    ("compiled", "gpu", "version", "there", "expected"),
    [
        (True, False, None, False, "compiled"),
        (False, False, "13.0", True, r"none \(torch sees no CUDA device\)"),
        (False, True, None, True, r"plain \(torch is built for another kind of device\)"),
        (
            False,
            True,
            "13.0",
            False,
            r"plain \(built without CUDA.*: pip install 'avgpipe\[cupy\]', or rebuild.*",
        ),
        (False, True, "12.8", False, r"plain \(built without CUDA.*: pip install cupy-cuda12x, or rebuild.*"),
        (False, True, "13.0", True, "cupy"),
    ],
)
def test_cuda_path_says_what_serves_cuda_tensors(monkeypatch, compiled, gpu, version, there, expected):
    monkeypatch.setattr(run_time, "build_info", lambda: {"cuda": compiled})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(run_time, "has_cupy", lambda: there)
    assert re.fullmatch(expected, run_time.cuda_path())


@pytest.mark.parametrize(
    ("compiled", "version", "there", "installs", "served"),
    [
        (True, "13.0", True, True, True),  # for devices that no image serves
        (True, "13.0", False, False, True),
        (True, None, True, False, True),
        (False, None, True, False, False),
        (False, "13.0", False, False, False),
        (False, "13.0", True, True, True),
    ],
)
def test_cupy_is_installed_as_the_launcher_where_it_and_cuda_are(
    monkeypatch, compiled, version, there, installs, served
):
    installed = []
    monkeypatch.setattr(run_time, "install", lambda: installed.append(True))
    monkeypatch.setattr(run_time, "build_info", lambda: {"cuda": compiled})
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(run_time, "has_cupy", lambda: there)
    assert run_time.install_if_needed() is served
    assert installed == [True] * installs
