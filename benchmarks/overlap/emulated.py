"""Question: on an emulated cluster, how near to the bounds of their schedules do our pipelines and torch's come?

    python -m benchmarks.overlap.emulated            (as root: it makes network namespaces)

Six stages, M = 12, t_f = 10 ms, t_b = 20 ms: activations of 1 and 4 MiB over lines of 1 Gbit/s, and 1 MiB over plain
loopback, by each link there. Every panel is one run of the cluster.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from rich.console import Console

from avgpipe.ranks.environment import cpu_model
from benchmarks.common import emulated
from benchmarks.common.emulated import EmulatedSettings
from benchmarks.common.record import say, write_record
from benchmarks.common.report import plot_schedules, table

CASES: dict[str, dict[str, Any]] = {
    "1MiB": {"rate_bits_per_s": 1e9, "activation_bytes": 2**20},
    "4MiB": {"rate_bits_per_s": 1e9, "activation_bytes": 4 * 2**20},
    "loopback-shm": {"link": "shm"},
    "loopback-gloo": {"link": "gloo"},
}


def main() -> None:
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
    base = EmulatedSettings(rounds=arguments.rounds, batches=arguments.batches, only=arguments.rows)
    cases = [replace(base, **CASES[name]) for name in arguments.cases]
    for settings in cases:
        emulated.check(settings)
    screen = Console(highlight=False, width=120)
    results = []
    for settings in cases:
        results.append(emulated.run(settings, say))
        screen.print(table(results[-1]))
        # After every case: what has been measured is kept, whatever happens to the others.
        question = "schedules on an emulated cluster"
        write_record("overlap-emulated", question, {"cases": results}, arguments.out)
        if arguments.plot:
            plot_schedules(results, f"emulated cluster, {cpu_model()}", arguments.plot)


if __name__ == "__main__":
    main()
