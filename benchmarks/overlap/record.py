"""Where these programs leave what they found."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def write_record(name: str, question: str, found: dict[str, Any], out: str | None = None) -> Path:
    """A dated JSON file in benchmarks/results, or `out`, with versions, machine and command."""
    from avgpipe.bench.machine import machine, versions

    date = time.strftime("%Y-%m-%d")
    command = ["python", f"benchmarks/overlap/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    record = {
        "question": question,
        "date": date,
        "command": "OMP_NUM_THREADS=1 " + shlex.join(command),
        "machine": machine(1, "cpu"),
        "versions": versions(),
        **found,
    }
    path = Path(out) if out else RESULTS / f"overlap-{name}-{date}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    return path
