"""What commands print: tables and JSON on standard output, how far they are on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

_FILE_COLUMNS = 160  # of tables that are not for a terminal


def answer(
    as_json: bool, found: Mapping[str, Any], *items: RenderableType, columns: int = _FILE_COLUMNS
) -> None:
    """Print what a command found: one JSON object, or texts and tables."""
    if as_json:
        print(json.dumps(found))
    else:
        show(*items, columns=columns)


def show(*items: RenderableType, columns: int = _FILE_COLUMNS) -> None:
    """Print texts and tables; ``columns`` is the width where there is no terminal."""
    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = columns
    for item in items:
        screen.print(item, soft_wrap=isinstance(item, str))  # a text is left to the terminal


def grid(rows: Sequence[Mapping[str, str]], texts: int = 1, styles: Sequence[str] = ()) -> Table:
    """Make a table of rows, whose cells have headings: columns of text, then of numbers, which are never broken.

    What a row has not is "-" in it, and what no row has is no column.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for place, heading in enumerate(headings):
        number = place >= texts
        made.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row, style in zip_longest(rows, styles):
        made.add_row(*(row.get(heading, "-") for heading in headings), style=style)
    return made


def tell(line: str) -> None:
    """Show a line that the next one replaces, on a terminal.

    No spinner: its thread would take a processor from what is measured.
    """
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: what is not finite becomes null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def check_file(out: str) -> None:
    """Refuse an ``--out`` that cannot be written, before anything is measured."""
    folder = Path(out).absolute().parent
    if Path(out).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--out {out}: cannot be written, name a file in a folder that you may write to")
