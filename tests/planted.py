"""Mutation testing. Question: which faults do the tests of every commit miss that the nightly ones find?

    python -m tests.planted --commit unit.cov promises.cov order.cov --nightly ranks slow composes --out record.json

Faults of five kinds are planted in the source, one at a time and drawn by a seed: a wrong sign, a dropped term, off by
one, a missing wait, swapped arguments. Each is looked for by the tests of a commit that run its lines; which these are
is what ``pytest -p tests.covering`` has written down. Tests of a map whose name contains "order" run under
``--happens-before``. What none of them finds is looked for at night: as most of it is found by nothing, all of it is
planted together, the parts run once, and each test that fails is asked which fault it was. A record is continued.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coverage import CoverageData

from tests.happens_before.plugin import OPTION

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "avgpipe"
ROOMS = ("runtime", "elastic", "links", "ranks", "checkpoint")
LIMIT_S = 1800  # for the tests of one map
PART_S = 10800
PARTS = "ranks", "slow", "composes", "guides", "order"
# As of nightly-order in the Makefile.
ORDER = [
    *(
        "-m",
        "not host",
        "--part",
        "unit",
        "--part",
        "promises",
        "--part",
        "slow",
        "--part",
        "ranks",
        "--part",
    ),
    *("composes", "tests/runtime", "tests/checkpoint", "tests/systems"),
]
TIMED_OUT = "timed out"
WAITS = re.compile(
    "wait(_until|_event|_stream)?|record(_event|_stream)?|join|synchronize|acquire|settle|drain|finish|flush|fsync|poll"
    "|meet|barrier|used_on"
)
SYMMETRIC = {"isinstance", "issubclass", "max", "min", "zip", "print", "hasattr", "cast", "super"}
ONE_MORE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


class Fault(NamedTuple):
    file: str
    line: int
    last_line: int
    column: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind}"


# ---- where faults can be ---------------------------------------------------------------------------------------------


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


def _wrong(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What can stand in the place of a node, and which kind of fault that is."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not _is_text(node):
        changed.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "wrong sign", changed
        yield "dropped term", node.left
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "wrong sign", node.operand
    elif isinstance(node, ast.BoolOp):
        changed.values = changed.values[:-1]
        yield "dropped term", changed if len(changed.values) > 1 else changed.values[0]
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in ONE_MORE:
        changed.ops[0] = ONE_MORE[type(node.ops[0])]()  # type: ignore[index]
        yield "off by one", changed
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.Slice):
        for part in ast.walk(changed.slice):
            if isinstance(part, ast.Constant) and type(part.value) is int:
                part.value += 1
                yield "off by one", changed
                break
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and WAITS.fullmatch(_called(node.value))
    ):
        yield "missing wait", ast.Pass()
    elif isinstance(node, ast.Call) and len(node.args) > 1 and _called(node) not in SYMMETRIC:
        first, second = node.args[:2]
        if ast.dump(first) != ast.dump(second) and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            changed.args[:2] = changed.args[1::-1]
            yield "swapped arguments", changed


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _nodes(tree: ast.AST) -> Iterator[Any]:
    """Code that functions run: no annotations, messages of errors, texts for people."""
    skipped = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)

    def inside(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, skipped):
            return
        if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            return
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from inside(child)

    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    yield from inside(statement)


def faults() -> list[Fault]:
    """Every fault that can be planted, in the order of the source."""
    found: dict[Fault, None] = {}
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in _nodes(ast.parse(path.read_text())):
                for kind, other in _wrong(node):
                    place = str(path.relative_to(PACKAGE)), node.lineno, node.end_lineno, node.col_offset
                    found[Fault(*place, kind, ast.unparse(node)[:90], ast.unparse(other)[:90])] = None
    return list(found)


def planted(source: str, *faults: Fault) -> str:
    wanted = {(fault.line, fault.last_line, fault.column): fault for fault in faults}

    class Plant(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            where = tuple(getattr(node, name, 0) for name in ("lineno", "end_lineno", "col_offset"))
            if (fault := wanted.get(where)) is not None:
                for kind, other in _wrong(node):
                    if kind == fault.kind and ast.unparse(node)[:90] == fault.before:
                        return ast.copy_location(other, node)
            return self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Plant().visit(ast.parse(source))))


# ---- who finds them --------------------------------------------------------------------------------------------------


def test_of(context: str) -> str:
    """The test that a context of a line names, "" if none."""
    return re.sub(r"^.*\|(?=tests/)| \((setup|call|teardown)\)$", "", context)


class Map:
    """Which tests run which lines."""

    def __init__(self, path: Path) -> None:
        self.name, self.options = path.stem, [OPTION] if "order" in path.name else []
        data = CoverageData(str(path))
        data.read()
        self._lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            name = file.rpartition("/python/avgpipe/")[2]
            lines = self._lines.setdefault(name, defaultdict(list))
            for line, contexts in data.contexts_by_lineno(file).items():
                lines[line] += contexts

    def tests(self, fault: Fault) -> list[str]:
        """Those that run the fault's lines, the ones that run little else of the file first."""
        lines = self._lines.get(fault.file, {})
        names = {test_of(c) for n in range(fault.line, fault.last_line + 1) for c in lines.get(n, ())} - {""}
        runs = Counter(test_of(c) for contexts in lines.values() for c in contexts)
        return sorted(names, key=lambda name: (runs[name], name))


@contextmanager
def changed(*faults: Fault, is_planted: bool = True) -> Iterator[dict[str, str]]:
    """An environment in which avgpipe has the faults; without, files are still rewritten from their syntax trees."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "python", "avgpipe")
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for file in {fault.file for fault in faults}:
            path, own = package / file, [fault for fault in faults if fault.file == file and is_planted]
            path.write_text(planted(path.read_text(), *own))
        python = f"{package.parent}{os.pathsep}{ROOT}"
        yield os.environ | {"PYTHONPATH": python, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}


def run(arguments: Sequence[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest; return its exit code, None where it has not ended in time, and what it said."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # ranks that outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def failing(tests: Sequence[str], options: Sequence[str], environment: dict[str, str]) -> str:
    """The first of these tests that fails, "" if none does."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "tests.txt")
        names.write_text("\n".join(tests))
        code, said = run(["-x", *options, f"@{names}"], environment, LIMIT_S)
    if code is None:
        return TIMED_OUT
    if code == 0:
        return ""
    if code < 0:  # a crash of the whole process: the last test that has begun
        return max(tests, key=lambda name: (said.rfind(name), len(name)))
    failed = [name for name in tests if f"FAILED {name}" in said or f"ERROR {name}" in said]
    if not failed:
        raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
    return max(failed, key=len)


def finds(test: str, fault: Fault, options: Sequence[str]) -> bool:
    """Whether a test fails with the fault, and passes without it."""
    with changed(fault) as environment:
        fails = failing([test], options, environment) not in ("", TIMED_OUT)
    with changed(fault, is_planted=False) as environment:
        return fails and not failing([test], options, environment)


def first_failure(fault: Fault, tests: list[str], options: Sequence[str]) -> str:
    """The first of these tests that fails with the fault, whenever it runs, and passes without it; "" if none does."""
    while tests:
        with changed(fault) as environment:
            found = failing(tests, options, environment)
        if found in ("", TIMED_OUT) or finds(found, fault, options):  # again: some tests draw what they do
            return found
        tests = [name for name in tests if name != found]
    return ""


def look(fault: Fault, maps: Sequence[Map], row: dict[str, Any]) -> dict[str, Any]:
    """Look for a fault with the tests of a commit, by maps that have not been looked through before."""
    begin, found, seen = time.perf_counter(), row.get("commit", ""), list(row.get("maps", ()))
    for one in maps:
        if found or one.name in seen:
            continue
        tests = one.tests(fault)
        found = first_failure(fault, tests, one.options) if tests else ""
        seen.append(one.name)
    seconds = row.get("seconds", 0) + round(time.perf_counter() - begin)
    return {**row, "name": fault.name, **fault._asdict(), "commit": found, "maps": seen, "seconds": seconds}


def found_at_night(faults: Sequence[Fault], part: str) -> dict[Fault, str]:
    """Plant faults together, run a part of the nightly tests, and return the tests that find one, by fault."""
    options = [OPTION] if part == "order" else []
    arguments = [*ORDER, *options] if part == "order" else ["--part", part]
    with changed(*faults) as environment:
        code, said = run(["-n", "2", *arguments], environment, PART_S)
    if code is None:
        raise RuntimeError(f"the part {part} has not ended within {PART_S} s")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    found: dict[Fault, str] = {}
    for test in failed:
        print(f"{part}: {test}", flush=True)
        for fault in faults:
            if fault not in found and finds(test, fault, options):
                found[fault] = test
                break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", type=Path, nargs="+", required=True, help="maps of what each commit runs")
    parser.add_argument("--nightly", nargs="*", default=[], choices=PARTS, help="parts of the nightly tests")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=46)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the record there, and go on from it if it is there")
    options = parser.parse_args()
    maps = [Map(path) for path in options.commit]
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults():
        by_kind[fault.kind].append(fault)
    draw, share = random.Random(options.seed), options.faults // len(by_kind)
    chosen = [fault for kind in sorted(by_kind) for fault in draw.sample(by_kind[kind], share)]
    rows: dict[Fault, dict[str, Any]] = {fault: {} for fault in chosen}
    if options.out and options.out.exists():
        known = {
            (row["name"], row["before"], row["after"]): row
            for row in json.loads(options.out.read_text())["faults"]
        }
        rows = {fault: known.get((fault.name, fault.before, fault.after), {}) for fault in chosen}

    def note() -> None:
        if options.out:
            record = {"seed": options.seed, "faults": [row for row in rows.values() if row]}
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    with ThreadPoolExecutor(options.processes) as pool:
        for fault, row in zip(chosen, pool.map(lambda fault: look(fault, maps, rows[fault]), chosen)):
            rows[fault] = row
            print(f"{fault.name} {row['seconds']} s\n    {row['before']} -> {row['after']}", flush=True)
            print(f"    {row['commit'] or 'not found'}", flush=True)
            note()
    for part in options.nightly:
        rest = [
            fault
            for fault, row in rows.items()
            if not (row["commit"] or row.get("nightly")) and part not in row["maps"]
        ]
        found = found_at_night(rest, part) if rest else {}
        for fault in rest:
            rows[fault]["maps"].append(part)
            rows[fault]["nightly"] = found.get(fault, "")
        note()
    at_once = sum(bool(row["commit"]) for row in rows.values())
    at_night = sum(bool(row.get("nightly")) for row in rows.values())
    print(
        f"{len(rows)} faults: {at_once} found for every commit, {at_night} more at night, "
        f"{len(rows) - at_once - at_night} by no test"
    )
    sys.exit(at_once < 0.95 * (at_once + at_night))


if __name__ == "__main__":
    main()
