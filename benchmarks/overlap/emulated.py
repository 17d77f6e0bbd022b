"""Question: on an emulated cluster, how near to the bounds of their schedules do our pipelines and torch's come?

    python benchmarks/overlap/emulated.py            (as root: it makes network namespaces)

Six stages, M = 12, t_f = 10 ms, t_b = 20 ms: activations of 1 and 4 MiB over lines of 1 Gbit/s, and 1 MiB over plain
loopback, by each link there. Every panel is one run of ``avgpipe bench schedules``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "1MiB": {"rate_bits_per_s": 1e9, "activation_bytes": 2**20},
    "4MiB": {"rate_bits_per_s": 1e9, "activation_bytes": 4 * 2**20},
    "loopback-shm": {"link": "shm"},
    "loopback-gloo": {"link": "gloo"},
}


def main() -> None:
    from record import write_record
    from rich.console import Console

    from avgpipe.bench.machine import cpu_model
    from avgpipe.bench.schedules import benchmark
    from avgpipe.bench.schedules.picture import plot_schedules
    from avgpipe.bench.schedules.settings import ScheduleSettings
    from avgpipe.bench.schedules.table import table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="of a row in a round, at least")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=list(CASES), help="some of them"
    )
    parser.add_argument(
        "--rows", type=lambda text: tuple(text.split(",")), default=(), help="default: those of the command"
    )
    parser.add_argument("--plot", help="file of the picture")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    base = ScheduleSettings(rounds=arguments.rounds, batches=arguments.batches, only=arguments.rows)
    cases = [replace(base, **CASES[name]) for name in arguments.cases]
    for settings in cases:
        benchmark.check(settings)
    screen = Console(highlight=False, width=110)
    results = []
    for settings in cases:
        results.append(benchmark.run(settings, lambda line: print(line, file=sys.stderr)))
        screen.print(table(results[-1]))
        # After every case: what has been measured is kept, whatever happens to the others.
        found = [{"command": " ".join(r.settings.command()), **r.to_json()} for r in results]
        write_record("emulated", "schedules on an emulated cluster", {"cases": found}, arguments.out)
        if arguments.plot:
            plot_schedules(results, f"emulated cluster, {cpu_model()}", arguments.plot)


if __name__ == "__main__":
    main()
