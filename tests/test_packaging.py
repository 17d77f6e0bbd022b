"""What is said about building."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tools() -> str:
    """The build requirements of pyproject.toml, quoted for a shell."""
    (text,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return " ".join(re.sub(r'"(.*>.*)"', r"'\1'", word).strip('"') for word in text.split(", "))


@pytest.mark.parametrize("name", ["README.md", "Makefile"])
def test_whoever_names_the_build_tools_names_those_of_pyproject(name):
    assert f"{tools()}\n" in (ROOT / name).read_text().replace('"', "'")
