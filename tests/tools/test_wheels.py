from __future__ import annotations

import pytest

from tools import wheels


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu", wheels.Variant("cpu", cuda=False)), ("cuda", wheels.Variant("cu130", cuda=True))],
)
def test_a_variant_is_named_as_torch_names_its_own(name, expected):
    assert wheels.variant(name, "13.0") == expected


@pytest.mark.parametrize(
    ("name", "said"), [("rocm", "'rocm'; use cpu, cuda or cpu,cuda"), ("cuda", "no nvcc was found")]
)
def test_a_variant_that_cannot_be_built_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        wheels.variant(name, None)


def test_the_version_of_cuda_is_what_nvcc_says(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert wheels.nvcc_version() == "13.0"


def test_without_nvcc_there_is_no_version_of_cuda(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wheels.nvcc_version() is None


def test_the_tools_of_a_build_are_those_of_pyproject():
    assert {"setuptools>=77", "ninja", "pybind11>=3"} <= set(wheels.build_requirements())
