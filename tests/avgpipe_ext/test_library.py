"""Loading, and what build_info says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import avgpipe
import avgpipe_ext
from avgpipe_ext import _library


def test_build_info_has_exactly_its_keys():
    info = avgpipe_ext.build_info()
    assert list(info) == ["version", "torch", "cpu_features", "cuda", "cuda_arch_list"]
    assert info["version"] == avgpipe.__version__
    assert info["torch"].startswith("2.")
    assert isinstance(info["cuda"], bool)
    assert info["cuda"] == bool(info["cuda_arch_list"])
    assert all(isinstance(name, str) and name for name in info["cpu_features"] + info["cuda_arch_list"])


def test_cpu_features_are_the_processors_own():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert set(avgpipe_ext.build_info()["cpu_features"]) <= flags


def test_the_library_needs_no_python_and_no_cuda():
    """One library serves every Python, and torch with and without CUDA."""
    listed = subprocess.run(["ldd", _library.PATH], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0] for line in listed.splitlines() if "=>" in line}
    assert not [name for name in needed if name.startswith(("libpython", "libcudart", "libtorch_cuda"))]


@pytest.mark.promise
def test_a_missing_library_is_one_line_that_says_how_to_build(tmp_path):
    copy = tmp_path / "avgpipe_ext"
    shutil.copytree(_library.PATH.parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import avgpipe_ext\nexcept ImportError as error:\n    print(error)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.count("\n") == 1
    assert f"{copy / 'libavgpipe.so'} is missing" in output
    assert "pip install --no-build-isolation" in output
