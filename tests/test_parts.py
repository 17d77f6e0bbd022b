"""Every test is in one part, and all who name the parts name the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import parts

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("path", "marks", "part"),
    [
        ("links/test_links.py", {"parametrize"}, "unit"),
        ("links/test_links.py", {"slow"}, "slow"),
        ("links/test_links.py", {"ranks"}, "ranks"),
        ("links/test_links.py", {"ranks", "slow", "promise"}, "promises"),
        ("runtime/test_streams.py", set(), "order"),
        ("runtime/test_streams.py", {"slow"}, "slow"),
        ("runtime/test_compile.py", set(), "unit"),
        ("runtime/test_compile.py", {"slow"}, "composes"),
        ("docs/test_guides.py", {"ranks"}, "guides"),
        ("simulated_device/test_device.py", set(), "streams"),
    ],
)
def test_a_part_follows_from_file_and_marks(path: str, marks: set[str], part: str) -> None:
    assert parts.part_of(path, marks) == part


def test_files_that_are_named_are_there() -> None:
    for name in (*parts._ORDERED, *parts._COMPOSES, *parts._GUIDES, *parts._STREAMS):
        assert (ROOT / "tests" / name).exists(), name


def test_the_makefile_the_workflow_and_the_guide_for_contributors_have_the_same_parts() -> None:
    listed = re.search(r"^NIGHTLY := (.*?[^\\])$", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = listed[1].replace("\\", "").split()
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    matrix = re.search(r"part: \[(.*)\]", workflow)
    assert matrix is not None
    assert [f"nightly-{name}" for name in matrix[1].split(", ")] == names
    rows = re.findall(r"^\| `(nightly-\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(names)
    for part in parts.NIGHTLY:
        assert re.search(rf"--part {part}\b|nightly-{part}[ :]", MAKEFILE), part


# Their promises start a single process, or none of a run; all of those below have one run, of a fixture.
ALONE = (
    *("avgpipe_ext/", "lab/workloads/", "measure/", "planning/", "tasks/", "timeline/"),
    *("checkpoint/test_faults.py", "cli/test_checks.py", "cli/test_main.py", "lab/compare/test_command.py"),
    *("ranks/test_process.py", "ranks/test_rendezvous.py", "ranks/test_signals.py", "ranks/test_watchdog.py"),
    *("test_imports.py", "test_plugins.py", "test_size.py", "test_ways.py"),
)
SHARED = ("cli/test_train.py", "interop/test_torch_pipelining.py")


def promises(path: Path) -> int:
    """How many tests of a file are run for each commit; one without numbers of cells counts once."""
    marks = [
        mark
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if ast.unparse(mark).startswith("pytest.mark.promise")
    ]
    return sum(max(1, len(mark.args)) if isinstance(mark, ast.Call) else 1 for mark in marks)


def test_at_most_forty_tests_of_a_commit_start_the_processes_of_a_run() -> None:
    count = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").as_posix()
        assert "pytestmark = pytest.mark.promise" not in path.read_text() or name == "test_parts.py", name
        if not name.startswith(ALONE):
            count += min(1, promises(path)) if name in SHARED else promises(path)
    assert 30 <= count <= 40, count
