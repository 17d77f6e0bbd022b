"""What a build says that cannot go on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Not of the source: hidden folders, and what .gitignore names.
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.so")
# As an isolated build: it sees the tools, but not torch.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from setuptools import build_meta; "


def run(*command, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In an environment that does not lead to the checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**kept, "AVGPIPE_CUDA": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the source."""
    folder = tmp_path_factory.mktemp("checkout") / "avgpipe"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


@pytest.mark.parametrize("step", ["prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"])
def test_without_torch_the_build_stops_before_its_dependencies_are_told(step, checkout, tmp_path):
    """pip asks for the metadata, and then downloads what they name, before it builds."""
    done = run(sys.executable, "-c", f"{WITHOUT_TORCH}build_meta.{step}({str(tmp_path)!r})", cwd=checkout)
    assert done.returncode == 1
    assert "An isolated build does not see the environment's torch" in done.stderr
    assert f"pip install {tools()}\n" in done.stderr
    assert "pip install --no-build-isolation .\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def tools() -> str:
    """The build requirements of pyproject.toml, quoted for a shell."""
    (text,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return " ".join(re.sub(r'"(.*>.*)"', r"'\1'", word).strip('"') for word in text.split(", "))


@pytest.mark.parametrize("name", ["README.md", "Makefile"])
def test_whoever_names_the_build_tools_names_those_of_pyproject(name):
    assert f"{tools()}\n" in (ROOT / name).read_text().replace('"', "'")
