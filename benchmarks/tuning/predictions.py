"""Question: how far are predicted from measured times per batch and peak memory, over many plans of real models?

    OMP_NUM_THREADS=1 python benchmarks/tuning/predictions.py

Two cores, so plans of up to two workers, and of three where no more than two can be busy at once. In every round each
model is profiled, by one process and by two at once, and then each of its plans trained, in processes of their own, for
some seconds. Each profile and each trial is divided by the machine's pace at the time (paced.py), and predictions and
measurements are medians over the rounds; without that division the errors are given, too. The cuts are those of the
first round's search.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe.plan import Plan
    from avgpipe.profiling.profile import Profile
    from avgpipe.tuning.trial import Subject
    from avgpipe.workloads.workload import Workload

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("awd-lstm", "gpt", "bert")
SETTINGS = (  # K, N, M
    *((1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 1, 8), (2, 1, 16)),
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 3, 2), (2, 3, 4), (3, 1, 1), (3, 1, 2)),
)
_BUDGET_S = 5.0
_LIMIT_S = 300.0


@dataclass
class Setting:
    """A plan, and what each round predicted and measured; seconds by the machine's pace, and as they were."""

    model: str
    plan: Plan
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    predicted_bytes: list[tuple[float, ...]] = field(default_factory=list)
    measured_bytes: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def error(self) -> float:
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1

    @property
    def plain_error(self) -> float:
        """Without the division by the pace."""
        return statistics.median(self.predicted_s) / statistics.median(self.measured_s) - 1

    @property
    def memory(self) -> list[tuple[float, float]]:
        """Of each worker, predicted and measured."""
        columns = zip(zip(*self.predicted_bytes), zip(*self.measured_bytes))
        return [(statistics.median(a), statistics.median(b)) for a, b in columns]

    @property
    def memory_error(self) -> float:
        """The largest of its workers."""
        return max((a / b - 1 for a, b in self.memory), key=abs)

    def to_json(self) -> dict[str, Any]:
        errors = {"error": self.error, "plain_error": self.plain_error, "memory_error": self.memory_error}
        return {**asdict(self), **errors}


def main() -> None:
    from avgpipe.bench.machine import machine, versions
    from avgpipe.files import write_atomically

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    contests = [Contest(model, arguments.preset) for model in arguments.models]
    for number in range(arguments.rounds):  # all models in turn, so that no hour is one model's
        for contest in contests:
            contest.round(number)
    settings = [setting for contest in contests for setting in contest.settings]
    show(settings)
    date = time.strftime("%Y-%m-%d")
    record = {
        "question": "predicted against measured time per batch and peak memory",
        "date": date,
        "command": "OMP_NUM_THREADS=1 "
        + shlex.join(["python", "benchmarks/tuning/predictions.py", *sys.argv[1:]]),
        "machine": machine(1, "cpu"),
        "versions": versions(),
        "settings": [setting.to_json() for setting in settings],
    }
    path = Path(arguments.out or RESULTS / f"tuning-predictions-{date}.json")
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


class Contest:
    """A model with its settings."""

    def __init__(self, model: str, preset: str) -> None:
        from avgpipe.profiling.workers import measure_workers
        from avgpipe.runtime.split import layers_of
        from avgpipe.tuning.subject import loaded, workload_of
        from avgpipe.tuning.trial import Subject

        self.subject: Subject = Subject(model, preset)
        workload: Workload = workload_of(self.subject)
        self.size = workload.batch_size
        loads = f"{loaded.__module__}:loaded", {"subject": asdict(self.subject)}
        self.around = measure_workers(layers_of(workload.layers), 1, True, loads)
        self.settings: list[Setting] = []

    def round(self, number: int) -> None:
        from avgpipe.bench.schedules.cluster import run_workers
        from avgpipe.tuning.cluster import Cluster
        from avgpipe.tuning.forecast import forecast

        profiles = [self._profile(workers) for workers in (1, 2)]
        if not self.settings:
            self.settings = [
                Setting(self.subject.workload, plan) for plan in plans(profiles[1][0], self.size)
            ]
        for setting in self.settings:
            profile, pace_s = profiles[setting.plan.workers > 1]
            found = forecast(profile, setting.plan, self.size, Cluster.like(profile, setting.plan.workers))
            arguments = {
                "subject": asdict(self.subject),
                "plan": setting.plan.to_json(),
                "expected_s": found.batch_s,
            }
            ranks = run_workers("paced:trial", setting.plan.workers, arguments, timeout_s=_LIMIT_S)
            first = ranks[0]
            setting.predicted.append(found.batch_s / pace_s)
            setting.predicted_s.append(found.batch_s)
            setting.measured.append(
                statistics.median(s / p for s, p in zip(first["rounds_s"], first["paces_s"]))
            )
            setting.measured_s.append(statistics.median(first["rounds_s"]))
            setting.predicted_bytes.append(found.memory_bytes)
            setting.measured_bytes.append(tuple(rank["memory_bytes"] for rank in ranks))
            print(f"round {number}: {line(setting)}", file=sys.stderr, flush=True)

    def _profile(self, at_once: int) -> tuple[Profile, float]:
        """And the pace of the processes that made it."""
        from avgpipe.bench.schedules.cluster import run_workers
        from avgpipe.profiling.profile import Profile
        from avgpipe.profiling.profiler import with_workers
        from avgpipe.tuning.shapes import profiled_sizes

        asked = {
            "subject": asdict(self.subject),
            "micro_batch_sizes": list(profiled_sizes(self.size)),
            "budget_s": _BUDGET_S,
        }
        ranks = run_workers("paced:layers", at_once, asked, timeout_s=_LIMIT_S)
        found = with_workers(Profile.from_json(ranks[0]["profile"]), self.around, None)
        return found, statistics.fmean(rank["pace_s"] for rank in ranks)


def plans(profile: Profile, size: int) -> list[Plan]:
    """With the cuts that the search finds."""
    from avgpipe.partitioning.search import CutSearch
    from avgpipe.tuning.cluster import Cluster
    from avgpipe.tuning.forecast import OnCluster
    from avgpipe.tuning.shapes import Shape

    found = []
    for stages, pipelines, micro_batches in SETTINGS:
        plan = Shape(stages, 1, pipelines, micro_batches).plan()
        problem = OnCluster(profile, plan, size, Cluster.like(profile, stages))
        found.append(problem.forecast(CutSearch(problem, None).best()[0]).plan)
    return found


def line(setting: Setting) -> str:
    plan = setting.plan
    predicted, measured = statistics.median(setting.predicted_s), statistics.median(setting.measured_s)
    memory = ", ".join(f"{a / 2**20:.0f}/{b / 2**20:.0f}" for a, b in setting.memory)
    return (
        f"| {setting.model} | {plan.stages} | {plan.pipelines} | {plan.micro_batches} | {plan.partition or '-'} | "
        f"{1e3 * predicted:.1f} | {1e3 * measured:.1f} | {100 * setting.plain_error:+.1f} % | "
        f"{100 * setting.error:+.1f} % | {memory} | {100 * setting.memory_error:+.1f} % |"
    )


def show(settings: list[Setting]) -> None:
    print(
        "| model | K | N | M | cut | predicted ms | measured ms | error | error by pace | MiB, predicted/measured | "
        "error |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for setting in settings:
        print(line(setting))
    for what, errors in (
        ("time by the machine's pace", [abs(s.error) for s in settings]),
        ("time as it was", [abs(s.plain_error) for s in settings]),
        ("peak memory", [abs(s.memory_error) for s in settings]),
    ):
        worst, middle = 100 * max(errors), 100 * statistics.median(errors)
        print(f"{what}: median error {middle:.1f} %, worst {worst:.1f} %, {len(errors)} settings")


if __name__ == "__main__":
    main()
