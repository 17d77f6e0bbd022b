"""Which part of the tests a test is in: ``pytest --part unit``. Each is in exactly one, so none is lost.

`unit`, `order` and `promises` run for every commit, the others nightly; CONTRIBUTING.md says which packages each
belongs to.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

OPTION = "--part"
COMMIT = ("unit", "order", "promises")
NIGHTLY = ("slow", "ranks", "composes", "guides", "streams")

# Run with several pipelines, replicas, versions or stages: their quick tests run under --happens-before, and only so.
_ORDERED = [
    "checkpoint/test_checkpoint.py",
    "runtime/test_auto.py",
    "runtime/test_elastic.py",
    "runtime/test_evaluate.py",
    "runtime/test_on_ranks.py",
    "runtime/test_schedules.py",
    "runtime/test_shared_batch.py",
    "runtime/test_skips.py",
    "runtime/test_spread.py",
    "runtime/test_streams.py",
    "runtime/test_warmup.py",
]
# Every pair of options, families of models, compilers.
_COMPOSES = [
    "interop/test_families.py",
    "interop/test_transformers.py",
    "runtime/test_compile.py",
    "runtime/test_inplace.py",
    "runtime/test_vision.py",
    "runtime/test_what_composes.py",
]
_GUIDES = ("docs/", "examples/", "lab/pages/test_browser.py")
_STREAMS = ("simulated_device/",)
_HERE = Path(__file__).parent
_QUICK = 24  # cells of a grid, unless it says another number


def part_of(path: str, marks: Collection[str]) -> str:
    """The part of a test, from its file's path below ``tests/`` and the names of its marks."""
    if "promise" in marks:
        return "promises"
    if path.startswith(_STREAMS):
        return "streams"
    if {"slow", "ranks"}.isdisjoint(marks):
        return "order" if path in _ORDERED else "unit"
    if path.startswith(_GUIDES):
        return "guides"
    if path in _COMPOSES:
        return "composes"
    return "ranks" if "ranks" in marks else "slow"


def _marks(item: Any, number: int) -> set[str]:
    """Names of a test's marks; that of a promise is for the cells that it numbers, or all of them."""
    names = {mark.name for mark in item.iter_markers()}
    cells = [cell for mark in item.iter_markers("promise") for cell in mark.args]
    return names - {"promise"} if cells and number not in cells else names


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="append", choices=(*COMMIT, *NIGHTLY), help="run this part alone; may be repeated"
    )


def _is_part_of(path: Path, part: str) -> bool:
    """Whether a file may have tests of a part: a quick look, so that the others need not be imported."""
    name = path.relative_to(_HERE).as_posix()
    if part == "order":
        return name in _ORDERED
    if part == "promises":
        return "pytest.mark.promise" in path.read_text()
    if part == "streams":
        return name.startswith(_STREAMS)
    return not name.startswith(_STREAMS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption(OPTION)
    if not chosen or not collection_path.name.startswith("test_"):
        return None
    return None if any(_is_part_of(collection_path, part) for part in chosen) else True


def _sample(items: list[Any]) -> None:
    """Of each grid, some cells drawn by its name are quick tests; the others are slow ones."""
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid"):
            grids[item.function].append(item)
    for function, cells in grids.items():
        quick = next(iter(cells[0].get_closest_marker("grid").args), _QUICK)
        cells = [cell for cell in cells if not cell.get_closest_marker("slow")]
        for cell in set(cells) - set(random.Random(function.__name__).sample(cells, min(quick, len(cells)))):
            cell.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    _sample(items)
    for item in items:
        if item.get_closest_marker("promise"):
            item.add_marker(pytest.mark.ranks)
    chosen = config.getoption(OPTION)
    if not chosen:
        return
    ours: dict[bool, list[Any]] = {True: [], False: []}
    cells: Counter[Any] = Counter()  # of each function, so far
    last: Counter[Any] = Counter()  # number of a promise
    for item in items:
        path = item.path.relative_to(_HERE).as_posix()
        function = path, item.originalname
        ours[part_of(path, _marks(item, cells[function])) in chosen].append(item)
        cells[function] += 1
        last[function] = max(
            last[function], *(n for mark in item.iter_markers("promise") for n in (0, *mark.args)), 0
        )
    for function, number in last.items():
        if number >= cells[function]:
            raise pytest.UsageError(f"{function}: promise({number}), but there are {cells[function]} cells")
    config.hook.pytest_deselected(items=ours[False])
    items[:] = ours[True]
