"""Question: on an emulated cluster, how near to the bounds of their schedules do our pipelines and torch's come?

    python benchmarks/overlap/emulated.py            (as root: it makes network namespaces)

Six stages, M = 12, t_f = 10 ms, t_b = 20 ms: activations of 1 and 4 MiB over lines of 1 Gbit/s, and 1 MiB over plain
loopback, by each link there. Every panel is one run of ``avgpipe bench schedules``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=6, help="of a row in a round, at least")
    parser.add_argument("--links", type=lambda text: text.split(","), default=["shm", "gloo"])
    parser.add_argument("--plot", help="file of the picture")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    base = ScheduleSettings(rounds=arguments.rounds, batches=arguments.batches)
    cases = [replace(base, rate_bits_per_s=1e9, activation_bytes=size * 2**20) for size in (1, 4)]
    cases += [replace(base, link=link) for link in arguments.links]
    for settings in cases:
        benchmark.check(settings)
    screen = Console(highlight=False, width=110)
    results = []
    for settings in cases:
        results.append(benchmark.run(settings, lambda line: print(line, file=sys.stderr)))
        screen.print(table(results[-1]))
    cases_found = [{"command": " ".join(r.settings.command()), **r.to_json()} for r in results]
    write_record("emulated", "schedules on an emulated cluster", {"cases": cases_found}, arguments.out)
    if arguments.plot:
        plot_schedules(results, f"emulated cluster, {cpu_model()}", arguments.plot)


if __name__ == "__main__":
    main()
