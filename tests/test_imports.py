"""The pure-data rooms load no torch, and what is imported by name, or by programs that seldom run, exists."""

import ast
import functools
import importlib
import re
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


ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"from (avgpipe(?:\.\w+)*) import (?:\(([^)]*)\)|([\w, ]+))")


def imported(path):
    """Modules, and the names that a program imports from them, in scripts within it, too."""
    for module, *lists in IMPORT.findall(path.read_text()):
        names = re.sub("#.*", "", "".join(lists)).split(",")
        yield module, [name.split()[0] for name in names if name.strip()]


@functools.cache
def defined(module):
    """The names at the top of a module's file, which need not be installable here; None if it finds them itself."""
    package = ROOT / "python" / module.replace(".", "/")
    path = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    if not path.exists():
        return set()
    tree, names = ast.parse(path.read_text()), {path.stem for path in package.glob("*")}
    for node in (inner for outer in tree.body for inner in ast.walk(outer)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "__getattr__" in names else names


def test_what_programs_import_from_the_package_exists():
    """Many of them run at night alone, or when a benchmark is repeated."""
    missing = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for folder in ("tests", "benchmarks", "tools", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for module, names in imported(path)
        for name in names
        if (there := defined(module)) is not None and name not in there
    ]
    assert not missing
