"""Question: which families of transformers train in two stages as they do on one device?

    OMP_NUM_THREADS=1 python -m benchmarks.models.families

Families whose configurations state a pipeline plan, 12 named ones that state none, and further ones. Each is built
tiny, without dropout, in float64 where it runs so, else in float32. Two stages, two micro-batches, three steps of SGD
with momentum, in one process and in two, against a plain loop of the model's own forward over the same micro-batches.
Compared are outputs, the gradients of the first step, and the weights after the last.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.models.catalogue import Family, families

EQUAL, REFUSED, WRONG, FAILED, UNBUILT = "equal", "refused", "wrong", "failed", "not built"
BOUNDS = {"float64": 1e-6, "float32": 1e-5}  # of relative differences
_TOGETHER = 20  # families that one pair of processes tries


def main() -> None:
    arguments = _arguments()
    from benchmarks.common.record import say, write_record

    _quieten()
    chosen = [f for f in families() if re.search(arguments.only, f.name)]
    rows: dict[str, dict[str, Any]] = {}
    for family in chosen:
        rows[family.name] = {"group": family.group, **in_one_process(family)}
        say(f"{family.name}: {_told(rows[family.name])}")
    both = [f for f in chosen if rows[f.name]["verdict"] == EQUAL]
    for n in range(0, len(both), _TOGETHER):
        for name, found in in_two_processes(both[n : n + _TOGETHER], say).items():
            rows[name] |= found
            if "two" in found:
                rows[name]["verdict"] = _verdict(found["two"], rows[name]["dtype"])
            say(f"{name}, two processes: {_told(rows[name])}")
    question = "families of transformers in two stages, against a plain loop of the model's own forward"
    write_record(
        "families", question, {"bounds": BOUNDS, "transformers": _version(), "rows": rows}, arguments.out
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="families by name; default: all")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    return parser.parse_args()


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _told(row: dict[str, Any]) -> str:
    return f"{row['verdict']} {row.get('reason', '')}".strip()


def _quieten() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()


def in_one_process(family: Family) -> dict[str, Any]:
    """Try a family with both stages in this process."""
    from avgpipe.errors import reason
    from benchmarks.models import tiny

    gc.collect()  # models hold themselves in cycles
    begun = time.perf_counter()
    try:
        model = tiny.build(family)
    except Exception as error:
        return {"verdict": UNBUILT, "reason": _line(reason(error))}
    row: dict[str, Any] = {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(next(model.parameters()).dtype)[6:],
    }
    expected = tiny.plain(copy.deepcopy(model))
    try:
        found = tiny.differences(tiny.piped(model), expected)
    except ValueError as error:
        return {**row, "verdict": REFUSED, "reason": _line(reason(error))}
    except Exception as error:
        return {**row, "verdict": FAILED, "reason": _line(reason(error))}
    return {
        **row,
        "verdict": _verdict(found, row["dtype"]),
        "one": found,
        "seconds": time.perf_counter() - begun,
    }


def in_two_processes(some: Sequence[Family], say: Any) -> dict[str, dict[str, Any]]:
    """Try families with a process for each stage; if one of them ends a pair, each with a pair of its own."""
    from avgpipe.errors import PipelineError
    from avgpipe.ranks.launch import run_on_ranks

    asked = {"some": [asdict(family) for family in some]}
    try:
        ranks = run_on_ranks("benchmarks.models.families:worker", 2, asked, timeout_s=900, say=say)
    except PipelineError as error:
        if len(some) == 1:
            return {some[0].name: {"verdict": FAILED, "reason": f"in two processes: {_line(str(error))}"}}
        return {name: row for family in some for name, row in in_two_processes([family], say).items()}
    return {
        name: {"two": {what: max(rank[name][what] for rank in ranks) for what in found}}
        for name, found in ranks[0].items()
    }


def worker(some: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Try families together with another rank; return differences, of gradients of this rank's stage alone."""
    from benchmarks.models import tiny

    _quieten()
    rows = {}
    for family in (Family(**fields) for fields in some):
        gc.collect()
        model = tiny.build(family)
        expected = tiny.plain(copy.deepcopy(model))
        rows[family.name] = tiny.differences(tiny.piped(model), expected)
    return rows


def _verdict(found: dict[str, float], dtype: str) -> str:
    return EQUAL if all(by <= BOUNDS[dtype] for by in found.values()) else WRONG


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(/[\w.-]+){3,}/", "", text)).strip()[:300]


if __name__ == "__main__":
    main()
