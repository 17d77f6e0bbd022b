"""A record that is written after each row, and a budget of seconds after which rows are left out by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from avgpipe.files import write_atomically


class RowsRecord:
    """Rows of a program that may be cut off at any time, the most important ones first.

    Args:
        head: What all rows have in common, such as the question, the device and versions.
        budget_s: Seconds since ``began`` (of ``time.time()``) in which a row may begin.
        out: The file; None: rows are only printed.
        quiet: Whether this process prints and writes nothing, as all ranks but the first.
    """

    def __init__(
        self,
        head: dict[str, Any],
        budget_s: float,
        out: Path | None = None,
        began: float | None = None,
        quiet: bool = False,
    ) -> None:
        self.budget_s, self._out, self._quiet = budget_s, out, quiet
        self._began = time.time() if began is None else began
        self._found = {**head, "verdict": "nothing was measured", "rows": [], "left_out": []}
        self.rows: list[dict[str, Any]] = self._found["rows"]
        self._write()

    @property
    def is_late(self) -> bool:
        return time.time() - self._began > self.budget_s

    def measure(self, row: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
        """Add the row with what ``run`` found, or with its failure: the other rows may run."""
        begin = time.time()
        try:
            found = run()
        except Exception as error:  # too little memory, say, or an operator that is not there
            found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        self.add({**row, **found, "took_s": round(time.time() - begin, 1)})

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self._quiet:
            print(json.dumps(row), flush=True)
        self._write()

    def leave_out(self, row: dict[str, Any]) -> None:
        self._found["left_out"].append(row)
        self._write()

    def _write(self) -> None:
        failed = sum("failed" in row for row in self.rows)
        left = len(self._found["left_out"])
        self._found["verdict"] = f"{len(self.rows) - failed} rows, {failed} failed, {left} left out"
        if self._out and not self._quiet:
            write_atomically(self._out, json.dumps(self._found, indent=1) + "\n")
