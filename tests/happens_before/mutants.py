"""Question: is every ordering of streams in the runtime needed, and its absence seen?

    python -m tests.happens_before.mutants            (or: make mutants)

Each place of the source that orders streams, or the host and a device, is removed in a copy of the package, and tests
run on that copy under the checker. The places are found in the source, so a new one is here by itself. A mutant that
passes all tests is either an ordering that nothing needs, or one that nothing tests: the program then fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.happens_before.plugin import OPTION
from tests.patience import limit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "avgpipe"
COMMANDS = PACKAGE / "cli"  # they wait for processes
# Calls that are left out where they stand alone, and calls whose value is an event: that is then never recorded.
STATEMENTS = {"wait_event", "wait_stream", "record_event", "record", "record_stream", "wait", "synchronize"}
STATEMENTS |= {"used_on", "wait_for_device", "received"}
OF_A_STREAM = {"begin", "end"}
EVENTS = {"record_event", "issued"}
BLOCKS = {"_stream", "copies", "averaging", "_averaging", "receiving"}  # that run on a stream of their own

# The quickest ones first: a mutant ends with the first test that fails.
TESTS = (
    ("tests/runtime/test_streams.py", "tests/runtime/test_group_sum.py", "tests/runtime/test_graphs.py"),
    ("tests/measure/test_on_streams.py", "tests/measure/test_clock.py", "tests/test_device.py"),
    ("tests/links/test_cuda_ipc.py", "tests/links/test_nccl.py", "tests/links/test_links.py"),
    ("tests/happens_before",),
    (
        "tests/runtime/test_elastic.py",
        "tests/runtime/test_spread.py",
        "tests/runtime/test_on_ranks.py",
        OPTION,
    ),
    ("tests/checkpoint/test_snapshot.py", "tests/checkpoint/test_writer.py", OPTION),
    (
        "tests/simulated_device/test_device.py",
        "tests/simulated_device/test_training.py",
        "tests/simulated_device/test_ranks.py",
    ),
    ("tests/simulated_device/test_links.py",),
)
LIMIT_S = 240


class Site(NamedTuple):
    """A place that orders something. ``what``: the source of it, in one line."""

    file: str
    line: int
    column: int
    what: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


def sites() -> list[Site]:
    """All orderings of the runtime, from its source."""
    return [
        Site(
            str(file.relative_to(PACKAGE)),
            node.lineno,
            node.col_offset,
            " ".join(ast.unparse(node).split())[:90],
        )
        for file in sorted(PACKAGE.rglob("*.py"))
        if COMMANDS not in file.parents
        for node in _orderings(ast.parse(file.read_text()))
    ]


def _orderings(tree: ast.AST) -> Iterator[Any]:
    """The nodes that a mutant changes: statements that only order, blocks on a stream, events, and looks at them."""
    alone = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and _runs_on_a_stream(node.items[0].context_expr):
            yield node.items[0].context_expr
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        owner = _called(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name == "wait" and (node.args or node.keywords):
            continue  # with a limit: the host's, for something that has no streams
        if id(node) in alone and (name in STATEMENTS or (name in OF_A_STREAM and owner == "stream")):
            yield alone[id(node)]
        elif id(node) not in alone and (name in EVENTS or name == "query"):
            yield node


def _runs_on_a_stream(block: ast.AST) -> bool:
    return any(
        _called(node) in BLOCKS for node in ast.walk(block) if isinstance(node, ast.Attribute | ast.Name)
    )


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def mutated(source: str, site: Site) -> str:
    """The source of a module without one of its orderings."""
    tree = ast.parse(source)
    (node,) = [
        found for found in _orderings(tree) if (found.lineno, found.col_offset) == (site.line, site.column)
    ]

    class Without(ast.NodeTransformer):
        def visit(self, other: ast.AST) -> Any:
            if other is not node:
                return self.generic_visit(other)
            return ast.copy_location(_instead_of(node), node)

    return ast.unparse(ast.fix_missing_locations(Without().visit(tree)))


def _instead_of(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.Expr):
        return ast.Pass()
    if _called(node) == "query":
        return ast.Constant(True)
    if _called(node) in EVENTS:
        return ast.parse("__import__('avgpipe.device').device.never_recorded()", mode="eval").body
    return ast.parse("__import__('contextlib').nullcontext()", mode="eval").body


NEVER_RECORDED = """

def never_recorded():
    return backend.Event(torch.accelerator.current_accelerator() or torch.device("cpu", 0))
"""


def run(site: Site | None) -> tuple[str, float]:
    """The test that finds the mutant, "" if none does, and seconds. Without a site the source as it is."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "python", "avgpipe")
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if site is not None:
            path = package / site.file
            path.write_text(mutated(path.read_text(), site))
            with (package / "device.py").open("a") as file:
                file.write(NEVER_RECORDED)
        environment = os.environ | {
            "PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        for tests in TESTS:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-m",
                "not slow or grid",
                "-p",
                "no:cacheprovider",
                *tests,
            ]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(LIMIT_S)
                )
            except subprocess.TimeoutExpired:
                return f"{tests[0]}: not ended after {LIMIT_S} s", time.perf_counter() - begin
            if done.returncode:
                return _finding(done.stdout + done.stderr), time.perf_counter() - begin
    return "", time.perf_counter() - begin


def _finding(output: str) -> str:
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    how = re.search(r"times (race|freed and reused)", output)
    return (failed[1] if failed else output[-200:]) + (f" ({how[1]})" if how else "")


def _who(finder: str) -> str:
    if not finder:
        return "not found"
    return "found by the simulated device" if "simulated_device" in finder else "found by clocks of streams"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the sites' names")
    parser.add_argument("--list", action="store_true", help="print the sites and end")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the record there")
    options = parser.parse_args()
    chosen = [site for site in sites() if options.only in site.name]
    if options.list:
        print("\n".join(f"{site.name:32} {site.what}" for site in chosen))
        return
    finder, seconds = run(None)
    print(f"{'the source as it is':32} {seconds:5.0f} s  {finder or 'passes'}", flush=True)
    if finder:
        sys.exit("the tests fail without a mutant")
    rows = []
    with ThreadPoolExecutor(options.processes) as pool:
        for site, (finder, seconds) in zip(chosen, pool.map(run, chosen)):
            print(f"{site.name:32} {seconds:5.0f} s  {site.what}\n      {finder or 'NOT FOUND'}", flush=True)
            rows.append({**site._asdict(), "found_by": finder})
    counts = Counter(_who(row["found_by"]) for row in rows)
    print(f"{len(rows)} mutants: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if counts[_who("")] else 0)


if __name__ == "__main__":
    main()
