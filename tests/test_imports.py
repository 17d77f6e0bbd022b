"""The pure-data rooms work, and import quickly, where torch is absent or slow to load."""

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import avgpipe

WANTED = ["schedule", "planning", "timeline", "testing"]
ROOMS = [room for room in WANTED if getattr(find_spec(f"avgpipe.{room}"), "origin", None)]

PROBE = """
import importlib, sys
for path in {modules!r}:
    module = importlib.import_module(path)
    for name in getattr(module, "__all__", []):
        getattr(module, name)
for name in {names!r}:
    getattr(importlib.import_module("avgpipe"), name)
heavy = ("torch", "matplotlib")
print(*sorted(m for m in sys.modules if m.split(".")[0] in heavy or m.startswith("avgpipe.runtime")))
"""


def loaded(modules, names=()):
    """The heavy modules that an interpreter has loaded after using these modules and names of the package."""
    code = PROBE.format(modules=modules, names=names)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.promise
@pytest.mark.parametrize("room", ROOMS)
def test_a_pure_data_room_loads_neither_torch_nor_the_runtime(room):
    assert loaded([f"avgpipe.{room}"]) == []


@pytest.mark.promise
def test_the_pure_names_of_the_package_load_neither_torch_nor_the_runtime():
    names = ["Action", "Schedule", "build_schedule", "schedule_names", "Costs", "simulate", "Timeline"]
    assert loaded([], [*names, "ScheduleError"]) == []


@pytest.mark.promise
def test_the_probe_sees_what_it_looks_for():
    assert "avgpipe.runtime" in loaded(["avgpipe.runtime"])
    assert "matplotlib" in loaded(["matplotlib"])


def test_what_is_loaded_by_name_exists():
    """Optional code is found by ``named("module:name")``, which no type checker sees."""
    package = Path(avgpipe.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("named", "by_name") and node.args:
                found.add(node.args[0].value if isinstance(node.args[0], ast.Constant) else None)
    for target in filter(None, found):
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name), target
    assert len(found) > 20
