"""Kernels compiled by NVRTC and launched through the driver: compiling, caching, the arguments' way. Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import types
import weakref

import pytest
import torch

from avgpipe_ext import _library, _native, nvrtc


def _has_nvrtc():
    try:
        return bool(nvrtc.nvrtc().version())
    except OSError:
        return False


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="NVRTC is not installed")
DEFINITION = "adam_mixed, kAdam, float, true"


@pytest.mark.grid(6)
@needs_nvrtc
@pytest.mark.parametrize("definition", _native.KERNEL_DEFINITIONS)
def test_every_kernel_compiles_for_hopper(definition):
    code = nvrtc.compile_kernel(definition, "sm_90")
    assert code[:4] == b"\x7fELF"
    assert nvrtc.kernel_name(definition).encode() in code


@needs_nvrtc
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


@needs_nvrtc
def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words(monkeypatch):
    monkeypatch.setattr(nvrtc, "source_of", lambda definition: "__global__ void f() { undeclared = 1; }")
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile avgpipe_adam_mixed for sm_90.*undeclared"):
        nvrtc.compile_kernel(DEFINITION, "sm_90")


@needs_nvrtc
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


class FakeDriver:
    """Stands in for libcuda: keeps account of contexts, and records launches with what their parameter points to."""

    def __init__(self):
        self.contexts, self.modules, self.launches, self.status = [], [], [], 0

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, place, ordinal):
        place._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, place, device):
        place._obj.value = 0xC0 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, place):
        place._obj.value = self.contexts.pop()
        return 0

    def cuModuleLoadData(self, place, code):
        self.modules.append((code, self.contexts[-1]))
        place._obj.value = len(self.modules)
        return 0

    def cuModuleGetFunction(self, place, module, name):
        place._obj.value = 100 + module.value
        self.name = name
        return 0

    def cuLaunchKernel(self, function, gx, gy, gz, tx, ty, tz, shared, stream, parameters, extra):
        assert (gy, gz, ty, tz, shared, extra.value) == (1, 1, 1, 1, 0, None)
        value = ctypes.string_at(parameters[0], 16384)
        self.launches.append((function.value, self.contexts[-1], stream.value, gx, tx, value))
        return self.status

    def cuGetErrorString(self, status, place):
        place._obj.value = b"too many of something"
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(nvrtc, "_load", lambda files: fake)
    monkeypatch.setattr(nvrtc, "driver", functools.cache(nvrtc.Driver))

    class File(str):
        def read_bytes(self):
            return self.encode()

    monkeypatch.setattr(nvrtc, "compiled_file", lambda definition, architecture: File(architecture))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0xABC0 + device)
    )
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


def test_a_launch_passes_the_block_by_value_on_torchs_current_stream(driver):
    block = bytes(range(256)) * 64
    nvrtc.DriverLauncher()(DEFINITION, memoryview(block), 5, 3)
    assert driver.launches == [(101, 0xC3, 0xABC3, 5, 256, block)]
    assert driver.name == b"avgpipe_adam_mixed"
    assert driver.contexts == []  # the thread has the context that it had


def test_a_kernel_is_loaded_once_per_device(driver):
    launcher = nvrtc.DriverLauncher()
    for device in (0, 1, 0, 1):
        launcher(DEFINITION, memoryview(bytes(16384)), 1, device)
    assert driver.modules == [(b"sm_90", 0xC0), (b"sm_90", 0xC1)]
    assert [launch[:2] for launch in driver.launches] == [(101, 0xC0), (102, 0xC1)] * 2


def test_the_grid_is_limited_by_the_device(driver):
    nvrtc.DriverLauncher()(DEFINITION, memoryview(bytes(16384)), 10**9, 0)
    assert driver.launches[0][3] == 132 * 32


def test_a_refused_launch_is_reported_in_the_drivers_words(driver):
    driver.status = 701
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel: too many of something \(701\)"):
        nvrtc.DriverLauncher()(DEFINITION, memoryview(bytes(16384)), 1, 0)
    assert driver.contexts == []


def test_a_kernel_that_could_not_be_compiled_is_tried_again(driver, monkeypatch):
    def fail(definition, architecture):
        raise RuntimeError("no such device")

    launcher = nvrtc.DriverLauncher()
    with monkeypatch.context() as failing:
        failing.setattr(nvrtc, "compiled_file", fail)
        with pytest.raises(RuntimeError, match="no such device"):
            launcher(DEFINITION, memoryview(bytes(16384)), 1, 0)
    launcher(DEFINITION, memoryview(bytes(16384)), 1, 0)
    assert len(driver.launches) == 1


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


def _missing():
    raise OSError("libnvrtc.so.13: no such file")


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
            r"plain \(built without CUDA.*: no such file; pip install nvidia-cuda-nvrtc.*",
        ),
        (False, True, "13.0", True, "nvrtc"),
    ],
)
def test_cuda_path_says_what_serves_cuda_tensors(monkeypatch, compiled, gpu, version, there, expected):
    monkeypatch.setattr(nvrtc, "build_info", lambda: {"cuda": compiled})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(nvrtc, "nvrtc", object if there else _missing)
    assert re.fullmatch(expected, nvrtc.cuda_path())


@pytest.mark.parametrize(
    ("compiled", "version", "there", "installs", "served"),
    [
        (True, "13.0", True, False, True),
        (False, None, True, False, False),
        (False, "13.0", False, False, False),
        (False, "13.0", True, True, True),
    ],
)
def test_only_a_build_without_cuda_installs_a_launcher(
    monkeypatch, compiled, version, there, installs, served
):
    installed = []
    monkeypatch.setattr(nvrtc, "install", lambda: installed.append(True))
    monkeypatch.setattr(nvrtc, "build_info", lambda: {"cuda": compiled})
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(nvrtc, "nvrtc", object if there else _missing)
    assert nvrtc.install_if_needed() is served
    assert installed == [True] * installs


def test_nvrtc_of_torchs_own_cuda_is_looked_for_first(monkeypatch, tmp_path):
    for folder, name in (("cuda_nvrtc", "libnvrtc.so.12"), ("cu13", "libnvrtc.so.13")):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / name).touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    for version, first in (("12.8", "cuda_nvrtc/lib/libnvrtc.so.12"), ("13.0", "cu13/lib/libnvrtc.so.13")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert nvrtc._nvrtc_files()[0] == str(tmp_path / first)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nvrtc._nvrtc_files()[:2] == ["libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13"]
