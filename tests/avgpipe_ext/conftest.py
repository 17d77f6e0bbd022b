"""Grids of operators, dtypes and sizes: some of their cells are quick tests, all of them slow ones."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

QUICK = 24  # cells of each grid, always the same


def pytest_collection_modifyitems(items):
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid"):
            grids[item.function].append(item)
    for function, cells in grids.items():
        quick = random.Random(function.__name__).sample(cells, min(QUICK, len(cells)))
        for cell in cells:
            if cell not in quick:
                cell.add_marker(pytest.mark.slow)
