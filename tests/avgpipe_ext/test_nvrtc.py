"""Kernels compiled by NVRTC and launched through CuPy: compiling, caching and the arguments' way. Needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import types
import weakref

import pytest
import torch

import avgpipe_ext
from avgpipe_ext import _library, _native, nvrtc

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
DEFINITION = "adam_mixed, kAdam, float, true"


@needs_cupy
@pytest.mark.parametrize("definition", _native.KERNEL_DEFINITIONS)
def test_every_kernel_compiles_for_hopper(definition):
    code = nvrtc.compile_kernel(definition, "sm_90")
    assert code[:4] == b"\x7fELF"
    assert nvrtc.kernel_name(definition).encode() in code


@needs_cupy
@pytest.mark.parametrize(
    "definition", [d for d in _native.KERNEL_DEFINITIONS if "_float" in d or "copy" in d]
)
def test_float_kernels_compile_for_ampere_without_contraction_or_flushing(definition):
    ptx = nvrtc.compile_kernel(definition, "compute_80").decode()
    assert f".entry {nvrtc.kernel_name(definition)}(" in ptx
    assert ".ftz.f32" not in ptx
    assert not re.search(r"\bfma\.rn\.f32", ptx)
    assert re.search(r"\bld\.global\.v[24]", ptx)
    assert "st.global.v4" in ptx


def test_definitions_name_every_kernel_once():
    names = [nvrtc.kernel_name(definition) for definition in _native.KERNEL_DEFINITIONS]
    assert len(set(names)) == len(names) == 49
    assert {"avgpipe_pull_float", "avgpipe_predict_adam_double", "avgpipe_copy_mixed_double"} <= set(names)
    assert DEFINITION in _native.KERNEL_DEFINITIONS


def test_the_source_needs_no_file():
    source = nvrtc.source_of(DEFINITION)
    assert source.endswith(f"AVGPIPE_DEFINE_KERNEL({DEFINITION})\n")
    assert '#include "' not in source


@needs_cupy
def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words(monkeypatch):
    monkeypatch.setattr(nvrtc, "source_of", lambda definition: "__global__ void f() { undeclared = 1; }")
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile avgpipe_adam_mixed for sm_90.*undeclared"):
        nvrtc.compile_kernel(DEFINITION, "sm_90")


@needs_cupy
def test_compiled_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_kernel(definition, architecture):
        compiled.append(architecture)
        return architecture.encode()

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    first = nvrtc.compiled_file(DEFINITION, "sm_80")
    assert nvrtc.compiled_file(DEFINITION, "sm_80") == first
    assert first.parent == tmp_path / "avgpipe"
    assert first.read_bytes() == b"sm_80"
    assert nvrtc.compiled_file(DEFINITION, "sm_90") != first
    monkeypatch.setattr(nvrtc, "source_of", lambda definition: "another version")
    assert nvrtc.compiled_file(DEFINITION, "sm_80") != first
    assert compiled == ["sm_80", "sm_90", "sm_80"]
    assert sorted(p.suffix for p in first.parent.iterdir()) == [".cubin"] * 3


class FakeCupy(types.ModuleType):
    """Records launches: kernel, device, stream, grid, block, and the parameter's bytes."""

    def __init__(self):
        super().__init__("cupy")
        self.launches, self.modules, self.device, self.stream = [], [], None, None
        self.cuda = types.SimpleNamespace(
            Device=self._device, Stream=types.SimpleNamespace(from_external=self._stream)
        )

    def _device(self, index):
        @contextlib.contextmanager
        def context():
            before, self.device = self.device, index
            yield
            self.device = before

        device = context()
        device.compute_capability = "90"
        device.attributes = {"MultiProcessorCount": 132}
        return device

    @contextlib.contextmanager
    def _stream(self, stream):
        version, self.stream = stream.__cuda_stream__()
        assert version == 0
        yield
        self.stream = None

    def RawModule(self, path):
        self.modules.append((path, self.device))

        def get_function(name):
            def launch(grid, block, parameters):
                (parameter,) = parameters
                assert parameter.size == 1  # what CuPy passes by value
                self.launches.append((name, self.device, self.stream, grid, block, parameter.tobytes()))

            return launch

        return types.SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    monkeypatch.setattr(
        nvrtc, "compiled_file", lambda definition, architecture: f"{definition} {architecture}"
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0xABC0 + device)
    )
    return fake


def test_a_launch_passes_the_block_by_value_on_torchs_current_stream(cupy):
    block = bytes(range(256)) * 64
    nvrtc.CupyLauncher()(DEFINITION, memoryview(block), 5, 3)
    assert cupy.launches == [("avgpipe_adam_mixed", 3, 0xABC3, (5,), (256,), block)]


def test_a_kernel_is_loaded_once_per_device(cupy):
    launcher = nvrtc.CupyLauncher()
    for device in (0, 1, 0, 1):
        launcher(DEFINITION, memoryview(bytes(16384)), 1, device)
    assert cupy.modules == [(f"{DEFINITION} sm_90", 0), (f"{DEFINITION} sm_90", 1)]
    assert [launch[1] for launch in cupy.launches] == [0, 1, 0, 1]


def test_the_grid_is_limited_by_the_device(cupy):
    nvrtc.CupyLauncher()(DEFINITION, memoryview(bytes(16384)), 10**9, 0)
    assert cupy.launches[0][3] == (132 * 32,)


def test_a_kernel_that_could_not_be_compiled_is_tried_again(cupy, monkeypatch):
    def fail(definition, architecture):
        raise RuntimeError("no such device")

    launcher = nvrtc.CupyLauncher()
    with monkeypatch.context() as failing:
        failing.setattr(nvrtc, "compiled_file", fail)
        with pytest.raises(RuntimeError, match="no such device"):
            launcher(DEFINITION, memoryview(bytes(16384)), 1, 0)
    launcher(DEFINITION, memoryview(bytes(16384)), 1, 0)
    assert len(cupy.launches) == 1


def test_a_launcher_is_kept_until_it_is_uninstalled():
    launcher = torch.nn.Identity()
    kept = weakref.ref(launcher)
    nvrtc.install(functools.partial(print, launcher))
    del launcher
    assert kept() is not None
    nvrtc.uninstall()
    assert kept() is None
    nvrtc.install_if_needed()


def test_another_library_is_refused():
    assert _library.build_info()["version"]
    for path in ("/nowhere/libavgpipe.so", torch._C.__file__):
        with pytest.raises(ImportError, match="is not loaded, or not of this version of avgpipe"):
            _native.build_info(path)


@pytest.mark.parametrize(
    ("compiled", "gpu", "cupy_there", "expected"),
    [
        (True, False, False, "compiled"),
        (False, False, True, r"none \(torch sees no CUDA device\)"),
        (
            False,
            True,
            False,
            r"none \(built without CUDA, and there is no CuPy; pip install 'cupy-cuda13x>=14'.*",
        ),
        (False, True, True, "cupy"),
    ],
)
def test_cuda_path_says_what_serves_cuda_tensors(monkeypatch, compiled, gpu, cupy_there, expected):
    monkeypatch.setattr(nvrtc, "build_info", lambda: {"cuda": compiled})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy_there else None)
    monkeypatch.setitem(__import__("sys").modules, "cupy", types.ModuleType("cupy"))
    assert re.fullmatch(expected, nvrtc.cuda_path())


def test_cuda_path_says_why_cupy_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(nvrtc, "build_info", lambda: {"cuda": False})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert nvrtc.cuda_path().startswith("none (CuPy cannot be imported: ")


def test_only_a_build_without_cuda_installs_cupys_launcher(monkeypatch):
    installed = []
    monkeypatch.setattr(nvrtc, "install", lambda: installed.append(True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for built in (True, False):
        monkeypatch.setattr(nvrtc, "build_info", lambda built=built: {"cuda": built})
        nvrtc.install_if_needed()
    assert installed == [True]
    assert avgpipe_ext.build_info()["cuda"] in (True, False)
