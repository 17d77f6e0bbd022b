"""Question: for how long do the others pause when an isolated pipeline is lost, on one host and over several?

    OMP_NUM_THREADS=1 python -m benchmarks.faults.pauses

Runs of ``avgpipe bench faults``, each with one fault from outside at a moment that a seed draws: a process gets
SIGKILL or SIGSTOP, or a host is cut off for good. On one host with 2 and 3 pipelines, and with one on each of 3 hosts,
which are emulated by network namespaces, as root. The pause is the longest time without a result of the others, from
the fault on, before and after that pipeline joins again; "back" is its first result then. Each run is checked like
those of that command: each sample counts once in the weights, references are equal in every bit, exit codes are right,
nothing is left over.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from avgpipe_lab.bench.chaos.draw import Scenario, Strike
from avgpipe_lab.bench.chaos.episode import RunShape, SeenRun, play
from avgpipe_lab.bench.chaos.judge import judge
from avgpipe_lab.bench.namespaces import check_namespaces
from benchmarks.common.record import say, write_record
from benchmarks.tables.faults import faults_pauses

CASES = {"one host, N = 2": ("isolate", 2), "one host, N = 3": ("isolate", 3), "3 hosts": ("hosts", 3)}
KINDS = {"isolate": ("kill", "stop"), "hosts": ("kill", "stop", "cut line")}
WHEN_S = (0.5, 4.0)  # after all train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="of each kind in each case")
    parser.add_argument("--ways", default="isolate,hosts", help="isolate: on one host")
    parser.add_argument("--kinds", default="kill,stop,cut line")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    if "hosts" in asked.ways:
        check_namespaces("--ways hosts")
    settings = {name: getattr(asked, name) for name in ("stages", "timeout_s", "seed")} | {"when_s": WHEN_S}
    trials: list[dict[str, Any]] = []
    for case, scenario, pipelines in _scenarios(asked):
        shape = RunShape(asked.stages, pipelines, "auto", asked.timeout_s)
        trials.append({"case": case, "kind": scenario.kind, **_trial(scenario, shape)})
        say(f"{scenario.name}: {trials[-1]}")
        question = "how long the others pause when an isolated pipeline is lost"
        record = {**settings, "trials": trials}
        write_record("faults-pauses", question, record, asked.out)  # what there is, is kept
    print(faults_pauses(record))


def _scenarios(asked: argparse.Namespace) -> Iterator[tuple[str, Scenario, int]]:
    """Yield the case, the run and the number of pipelines; cases and kinds in turn, as a machine's speed changes."""
    for number in range(asked.trials):
        for case, (way, pipelines) in CASES.items():
            for kind in KINDS[way]:
                if way in asked.ways.split(",") and kind in asked.kinds.split(","):
                    name = f"{case}, {kind}, {asked.seed + number}"
                    chance = random.Random(name)
                    strike = Strike(kind, chance.uniform(*WHEN_S), chance.randrange(10**6))
                    yield case, Scenario(name, way, strikes=(strike,)), pipelines


def _trial(scenario: Scenario, shape: RunShape) -> dict[str, Any]:
    seen = play(scenario, shape)
    verdict = judge(seen, shape, {})
    return {
        **_pauses(seen),
        "ended": verdict.ended,
        "codes": list(seen.codes.values()),
        "wrong": [f"{column}: {text}" for column, texts in verdict.wrong.items() for text in texts],
    }


def _pauses(seen: SeenRun) -> dict[str, float | None]:
    """Return the longest times without a result of the others, before and after the lost pipeline joins again."""
    fault = next(iter(seen.of("fault")), None)
    if fault is None:
        return dict.fromkeys(("pause_s", "pause_later_s", "back_after_s"))
    at_s, lost = fault["at_s"], fault["pipeline"]
    others = [e["at_s"] for e in seen.of("result", "evaluation", "end") if e["pipeline"] != lost]
    again = [e["at_s"] for e in seen.of("result") if e["pipeline"] == lost and e["life"] > fault["life"]]
    joins = f"pipeline {lost} trains with the others"
    joined_s = min((s for s, line in seen.said if s > at_s and line.startswith(joins)), default=math.inf)
    ends = sorted(s for s in others if s > at_s)
    pauses = [(end, end - begin) for begin, end in pairwise([at_s, *ends])]
    return {
        "pause_s": max((length for end, length in pauses if end <= joined_s), default=None),
        "pause_later_s": max((length for end, length in pauses if end > joined_s), default=None),
        "back_after_s": min(again) - at_s if again else None,
    }


if __name__ == "__main__":
    main()
