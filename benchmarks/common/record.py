"""Where these programs leave what they found."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from avgpipe.cli.doctor import examine
from avgpipe.files import write_atomically

RESULTS = Path(__file__).parents[1] / "results"


def say(line: str) -> None:
    """Tell whoever watches what goes on."""
    print(line, file=sys.stderr, flush=True)


def facts() -> dict[str, Any]:
    """Return the machine, of which one thread is used, and the versions."""
    found = examine().facts
    return {
        "machine": {**found["machine"], "threads": 1},
        "versions": {**found["versions"], "native": found["native"]},
    }


def write_record(name: str, question: str, found: dict[str, Any], out: str | None = None) -> Path:
    """Write a dated JSON file into benchmarks/results, or to `out`, with versions, machine and command.

    Of the paths of this machine the command keeps their names.
    """
    date = time.strftime("%Y-%m-%d")
    program = ".".join(
        ["benchmarks", *Path(sys.argv[0]).resolve().relative_to(RESULTS.parent).with_suffix("").parts]
    )
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    record = {
        "question": question,
        "date": date,
        "command": "OMP_NUM_THREADS=1 " + shlex.join(["python", "-m", program, *words]),
        **facts(),
        **found,
    }
    path = Path(out) if out else RESULTS / f"{name}-{date}.json"
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    say(f"written to {path}")
    return path
