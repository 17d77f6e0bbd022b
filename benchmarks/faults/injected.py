"""Question: a thousand faults at places drawn from seeds: what happens that must not?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.injected --faults 1000 --out FILE --resume

Runs ``avgpipe bench faults`` as root for K = 1 to 3 stages and N = 1 to 4 pipelines in turn, each time with a new
seed, until ``--faults`` faults have happened, which takes hours. With ``--resume`` it continues an existing record.
Verdicts do not depend on the machine's load, such as that of ``--at-once`` other commands; pauses do, and are upper
bounds then.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from avgpipe.files import read_json
from avgpipe_lab.bench.namespaces import check_namespaces
from benchmarks.common.record import RESULTS, say, write_record
from benchmarks.tables.injected import injected

SIZES = list(product((1, 2, 3), (1, 2, 3, 4)))  # stages, pipelines
WRONG_EXIT = 1  # of the command: something has happened that must not


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="about when to stop")
    parser.add_argument("--seconds-each", type=float, default=150.0, help="of one command")
    parser.add_argument("--mean-seconds", type=float, default=8.0, help="between two kills from outside")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=1, help="commands that run beside each other")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    check_namespaces("this benchmark")
    out = Path(asked.out or RESULTS / f"faults-injected-{time.strftime('%Y-%m-%d')}.json")
    commands = read_json(out)["commands"] if asked.resume and out.is_file() else []
    end = time.monotonic() + asked.seconds
    run = partial(_run, seconds=asked.seconds_each, mean_s=asked.mean_seconds, timeout_s=asked.timeout)
    sizes = islice(cycle(SIZES), len(commands), None)
    while (total := sum(c["faults"] for c in commands)) < asked.faults and time.monotonic() < end:
        now = list(islice(sizes, asked.at_once))
        say(f"{total} faults so far; now stages and pipelines {now}")
        with ThreadPoolExecutor(asked.at_once) as pool:
            commands += pool.map(run, now)
        record = {"timeout_s": asked.timeout, "mean_seconds": asked.mean_seconds, "commands": commands}
        write_record("faults-injected", "a thousand injected faults", record, str(out))
    print(injected(read_json(out)))


def _run(size: tuple[int, int], seconds: float, mean_s: float, timeout_s: float) -> dict[str, Any]:
    """Return what one command has found, without what only concerns single runs."""
    stages, pipelines = size
    # One pipeline has nobody to go on without it, and one process no neighbour that keeps a copy.
    ways = ["isolate", "hosts"] * (pipelines > 1) + ["spares"] * (stages > 1) + ["plain"]
    words = ["bench", "faults", "--json", "--seconds", f"{seconds:g}", "--mean-seconds", f"{mean_s:g}"]
    words += ["--stages", str(stages), "--pipelines", str(pipelines), "--timeout", f"{timeout_s:g}"]
    words += ["--ways", ",".join(ways), "--seed", str(secrets.randbelow(10**6))]
    ended = subprocess.run([sys.executable, "-m", "avgpipe", *words], stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (0, WRONG_EXIT):
        raise RuntimeError(f"avgpipe {' '.join(words)} ended with exit code {ended.returncode}")
    found = json.loads(ended.stdout)
    ways: dict[str, dict[str, Any]] = {}
    kinds: dict[tuple[str, str], list[float | None]] = {}
    phases: Counter[str] = Counter()
    for run in found["runs"]:
        way = ways.setdefault(run["way"], {"runs": 0, "went_on": 0, "trained_again": 0, "wrong": {}})
        way["runs"] += 1
        way["went_on"] += not run["ended"]
        way["trained_again"] += run["repeated"]
        for column in run["wrong"]:
            way["wrong"][column] = way["wrong"].get(column, 0) + 1
        for fault in run["faults"]:
            kinds.setdefault((run["way"], fault["kind"]), []).append(fault["pause_s"])
            phases[fault["phase"]] += 1
    return {
        "command": found["command"],
        **{name: found[name] for name in ("seed", "seconds", "faults", "violations")},
        "stages": stages,
        "pipelines": pipelines,
        "ways": ways,
        "pauses_s": [{"way": way, "kind": kind, "each": each} for (way, kind), each in sorted(kinds.items())],
        "phases": phases,
    }


if __name__ == "__main__":
    main()
