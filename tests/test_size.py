"""The size and shape that the code keeps: what a script loads, and how long files, functions and signatures are."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cli.command import environment
from tests.runner import ROOT

PACKAGES = "avgpipe", "avgpipe_lab"
SMALL = 60  # lines of code of a module that needs a reason to stand alone

# Trains a small model on two stages with two pipelines, evaluates and reads its weights.
SCRIPT = """
import sys, torch, avgpipe
from torch import nn

data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=2)
with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as pipeline:
    list(pipeline.train(data))
    pipeline.evaluate(data)
    pipeline.state_dict()
print(*(m.__file__ for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "avgpipe"), sep="\\n")
"""


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            yield node.body[0]


@cache
def lines_of_code(path: Path) -> int:
    """Lines without blank ones, comments and docstrings."""
    source, found = path.read_text(), set()
    quiet = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(ast.parse(source)):
        found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / "python" / package).rglob("*.py"))]


def functions(package: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in files(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


@pytest.mark.promise
def test_a_short_script_loads_a_core_that_is_read_in_an_afternoon() -> None:
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    loaded = [Path(line) for line in process.stdout.split()]
    assert len(loaded) <= 75
    assert sum(map(lines_of_code, loaded)) <= 9000


def test_files_functions_and_signatures_stay_short() -> None:
    long_files = [p for p in files(*PACKAGES) if p.read_text().count("\n") > 600]
    assert not long_files
    for package in PACKAGES:
        for name, node in functions(package):
            assert (node.end_lineno or 0) - node.lineno < 60, name
            arguments = node.args
            assert len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) <= 14, name


def test_few_names_of_classes_stand_twice() -> None:
    for package in PACKAGES:
        trees = (ast.parse(path.read_text()) for path in files(package))
        names = Counter(
            n.name.lstrip("_") for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
        )
        assert sum(count > 1 for count in names.values()) <= 6, [n for n, c in names.items() if c > 1]


def test_few_modules_are_small() -> None:
    small = [p for p in files(*PACKAGES) if p.name != "__init__.py" and lines_of_code(p) < SMALL]
    assert len(small) <= 15, [str(p.relative_to(ROOT)) for p in small]
