"""Every test is in one part, and all who name the parts name the same."""

from __future__ import annotations

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
