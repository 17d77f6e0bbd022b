"""The design pages name files, names in them, and waits: all of them are in the code as written there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from avgpipe import Pipeline
from avgpipe.ranks.limits import Limits
from tests.runner import ROOT
from tools.maps import layers

PACKAGE = ROOT / "python" / "avgpipe"
ROOTS = ROOT, PACKAGE, ROOT / "python", ROOT / "python" / "avgpipe_lab", ROOT / "csrc", ROOT / "docs"
DESIGN = ROOT / "docs" / "design"
ARCHITECTURE, FAILURE = DESIGN / "architecture.md", DESIGN / "failure.md"
PAGES = ARCHITECTURE, FAILURE, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "testing-streams.md"
SUFFIXES = "py|cpp|h|cu|toml|md|json"
A_PATH = re.compile(rf"(?<![\w/.:<>-])\.?\w[\w.-]*(?:/[\w.*-]+)*(?:/|\.(?:{SUFFIXES}))(?![\w/])")
WAITS_OF = "ranks", "fault", "links"  # packages whose waits are all in the table


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table below a heading, without its head."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_path(token: str) -> bool:
    return bool(re.fullmatch(rf"[\w./*-]+(?:/|\.(?:{SUFFIXES}))", token))


def found(name: str) -> list[Path]:
    """Return the files or folders of a name: below one of the roots; of a file without folders, anywhere."""
    near = [path for root in ROOTS for path in root.glob(name.rstrip("/"))]
    return near if near or "/" in name else [*(ROOT / "tests").rglob(name), *PACKAGE.rglob(name)]


@cache
def defined_in(path: Path) -> set[str]:
    """Return the names of the functions, classes, variables and attributes that a Python file defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
            names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return names


# ---- paths and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(A_PATH.findall(re.sub(r"\]\([^)]*\)", "]", text)))
    named |= {token for token in quoted(text) if re.fullmatch(r"[\w.-]+(/[\w.*-]+)+", token)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not found(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


def test_a_name_that_a_change_opens_is_in_its_file() -> None:
    table = rows(ARCHITECTURE, "What a change opens")
    assert len(table) >= 13
    for what, opens, _ in table:
        file = None
        for token in quoted(opens):
            if is_path(token):
                file = next(iter(found(token)), None)
                assert file is not None, f"{what}: {token}"
            elif file is not None and token.isidentifier() and file.suffix == ".py":
                assert token in defined_in(file), f"{what}: {token} in {file}"
            elif file is not None and file.is_file():
                assert token in file.read_text(), f"{what}: {token} in {file}"
        assert file is not None or "there" in opens, what


def test_the_circles_are_the_layers_of_the_imports() -> None:
    circles = ARCHITECTURE.read_text().partition("\n## The circles\n")[2].partition("\nImports go down")[0]
    shown = []
    for line in circles.splitlines():
        if re.match(r"    (commands|tools|core|faults|pure) ", line):
            names = line.split(maxsplit=1)[1].partition("    ")[0]
            shown += re.findall(r"\w+", names)
    assert shown == layers()[::-1]


def test_the_packages_of_the_nightly_parts_exist() -> None:
    table = rows(ROOT / "CONTRIBUTING.md", "The parts of the tests")
    for part, _, packages in table:
        for name in quoted(packages):
            assert any([*root.glob(name), *root.glob(f"{name}.py")] for root in ROOTS), f"{part}: {name}"


def test_no_other_page_has_a_table_of_what_a_change_opens() -> None:
    assert "what-a-change-opens" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "| to add |" not in (ROOT / "CONTRIBUTING.md").read_text()


# ---- waits -----------------------------------------------------------------------------------------------------------


def waits() -> dict[tuple[str, str], str]:
    """Return the seconds in the table of waits, by file and constant."""
    table = rows(FAILURE, "The waits")
    return {(quoted(file)[0], quoted(name)[0]): seconds for file, name, seconds, _ in table}


def value_of(file: str, name: str) -> list[float]:
    """Return the numbers of a constant of a module."""
    module = importlib.import_module(f"avgpipe.{file.removesuffix('.py').replace('/', '.')}")
    value: Any = attrgetter(name)(module)
    return list(value.values()) if isinstance(value, Mapping) else [value]


def constants(package: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each module-level constant of a package that is in seconds."""
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)]
                yield from ((path.relative_to(PACKAGE).as_posix(), n) for n in names if n.endswith("_S"))


def test_the_table_of_waits_has_the_values_of_the_code() -> None:
    for (file, name), seconds in waits().items():
        assert [float(number) for number in seconds.split(", ")] == value_of(file, name), f"{file}: {name}"
    default = inspect.signature(Pipeline).parameters["timeout_s"].default
    assert f"`timeout_s` of a Pipeline is {default} s by default" in FAILURE.read_text()


def test_the_table_of_waits_has_all_limits_of_the_fault_plane() -> None:
    named = {name.removeprefix("LIMITS.") for _, name in waits() if name.startswith("LIMITS.")}
    assert named == {field.name for field in fields(Limits)}


@pytest.mark.parametrize("package", WAITS_OF)
def test_the_table_of_waits_has_every_constant_of_a_package(package: str) -> None:
    named = set(constants(package))
    assert named - waits().keys() == set()


def test_a_number_before_the_name_of_a_wait_is_its_value() -> None:
    known = {(n.rpartition(".")[2], value) for file, n in waits() for value in value_of(file, n)}
    shown = re.findall(r"([\d.]+) s `?(_?[A-Z][A-Z_]*_S|[a-z_]+_s)\b", FAILURE.read_text())
    assert len(shown) > 20
    assert [(number, name) for number, name in shown if (name, float(number)) not in known] == []


def test_the_methods_in_the_pages_of_the_design_exist() -> None:
    methods: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods.setdefault(node.name, set()).update(defined_in(path))
    shown = re.findall(
        r"\b([A-Z][a-z][A-Za-z]*)\.(_?[a-z]\w*)\b", ARCHITECTURE.read_text() + FAILURE.read_text()
    )
    assert len(shown) > 40
    files = set(SUFFIXES.split("|"))
    wrong = [(c, m) for c, m in shown if m not in methods.get(c, {}) and m not in files]
    assert wrong == []
