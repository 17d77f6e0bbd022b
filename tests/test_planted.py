"""Faults that are planted are in the code that runs, and nowhere else."""

from __future__ import annotations

import ast

import pytest

from tests import planted

SOURCE = """
def f(a, b, items, lock):
    if a < b and items:
        lock.wait()
        call(a, b)
        return items[0] - b
    raise ValueError(f"{a + b}")
"""


def found() -> list[planted.Fault]:
    return [
        planted.Fault("f.py", node.lineno, node.end_lineno, node.col_offset, kind, ast.unparse(node), "")
        for node in planted._nodes(ast.parse(SOURCE))
        for kind, _ in planted._wrong(node)
    ]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("wrong sign", "return items[0] + b"),
        ("dropped term", "return items[0]"),
        ("dropped term", "if a < b:"),
        ("off by one", "if a <= b and items:"),
        ("off by one", "return items[1] - b"),
        ("missing wait", "pass"),
        ("swapped arguments", "call(b, a)"),
    ],
)
def test_each_kind_is_planted(kind: str, line: str) -> None:
    changed = [planted.planted(SOURCE, fault) for fault in found() if fault.kind == kind]
    assert any(line in [text.strip() for text in one.splitlines()] for one in changed)


def test_several_are_planted_at_once() -> None:
    sign, wait = (
        next(fault for fault in found() if fault.kind == kind) for kind in ("wrong sign", "missing wait")
    )
    text = planted.planted(SOURCE, sign, wait)
    assert "return items[0] + b" in text
    assert "lock.wait()" not in text
    assert "if a < b and items" in text


def test_what_an_error_says_is_left_alone() -> None:
    assert all("a + b" in planted.planted(SOURCE, fault) for fault in found())
    assert len(found()) == 7


def test_every_fault_of_the_package_changes_its_file() -> None:
    faults = planted.faults()
    assert {fault.kind for fault in faults} == {
        *("wrong sign", "dropped term", "off by one", "missing wait", "swapped arguments")
    }
    for fault in faults[::400]:
        source = (planted.PACKAGE / fault.file).read_text()
        assert planted.planted(source, fault) != ast.unparse(ast.parse(source)), fault
