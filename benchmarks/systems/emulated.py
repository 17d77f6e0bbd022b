"""Question: does each system run as fast as simulated on an emulated cluster, and which is the quickest?

    python -m benchmarks.systems.emulated            (as root: it makes network namespaces)

Six workers, M = 12, t_f = 10 ms, t_b = 20 ms, activations of 1 MiB: through shared memory of one host, and over lines
of 1 Gbit/s. Every row that there is, ours beside their simulated times; every panel is one run of
the cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from avgpipe.errors import PipelineError
from avgpipe.ranks.environment import cpu_model
from benchmarks.common import emulated
from benchmarks.common.emulated import EmulatedSettings
from benchmarks.common.record import say, write_record
from benchmarks.common.report import plot_schedules, table
from benchmarks.common.schedules import ALL

WITHIN = 0.10  # of the simulated time
CASES: dict[str, dict[str, Any]] = {"loopback": {"link": "shm"}, "1Gbit": {"rate_bits_per_s": 1e9}}


def main() -> None:
    arguments = _arguments()
    base = EmulatedSettings(rounds=arguments.rounds, batches=arguments.batches, only=arguments.rows or (ALL,))
    cases = [replace(base, **CASES[name]) for name in arguments.cases]
    for settings in cases:
        emulated.check(settings)
    screen = Console(highlight=False, width=120)
    results, failures = [], []
    for name, settings in zip(arguments.cases, cases):
        try:
            results.append(emulated.run(settings, say))
        except PipelineError as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], file=sys.stderr)
            continue
        screen.print(table(results[-1]))
        screen.print("\n".join(answer(results[-1])))
        # After every case: what has been measured is kept, whatever happens to the others.
        cases_found = [{"answer": answer(result), **result} for result in results]
        question = "systems on an emulated cluster, measured and simulated"
        write_record("systems-emulated", question, {"cases": cases_found}, arguments.out)
        if arguments.plot:
            plot_schedules(results, f"emulated cluster, {cpu_model()}", arguments.plot)
    sys.exit(1 if failures else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4, help="of a row in a round, at least")
    parser.add_argument("--cases", type=_names, default=tuple(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--rows", type=_names, default=(), help="default: all")
    parser.add_argument("--plot", help="file of the picture")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"--cases {','.join(unknown)}: use some of {','.join(CASES)}")
    return arguments


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def answer(result: dict[str, Any]) -> list[str]:
    """The questions, in a line each."""
    over = {row["name"]: row.get("over_simulated") for row in result["rows"]}
    as_ran = {row["name"]: row.get("over_simulated_as_measured") for row in result["rows"]}
    ranking = sorted(result["rows"], key=lambda row: row["median_s"])
    quickest = ", ".join(f"{row['name']} {row['median_s'] * 1e3:.0f} ms" for row in ranking[:3])
    return [
        f"within {WITHIN:.0%} of simulated: {_within(over)}",
        f"with the times that actions took: {_within(as_ran)}",
        f"quickest: {quickest}",
    ]


def _within(ratios: Mapping[str, float | None]) -> str:
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    off = [f"{name} {ratio:.3f}" for name, ratio in known.items() if not 1 - WITHIN <= ratio <= 1 + WITHIN]
    return f"{len(known) - len(off)} of {len(known)}; not: {', '.join(off) or 'none'}"


if __name__ == "__main__":
    main()
