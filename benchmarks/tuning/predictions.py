"""Question: how far are predicted from measured times per batch and peak memory, over many plans of real models?

    OMP_NUM_THREADS=1 python benchmarks/tuning/predictions.py

Two cores, so plans of up to two workers, and of three where no more than two can be busy at once. In every round each
model is profiled, by one process and by two at once, and then each of its plans trained, in processes of their own, for
some seconds; predictions and measurements are medians over the rounds. The cuts are those of the first round's search.
"""

from __future__ import annotations

import argparse
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
    from avgpipe.tuning.forecast import Forecast
    from avgpipe.tuning.trial import Trial

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("awd-lstm", "gpt", "bert")
SETTINGS = (  # K, N, M
    *((1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 1, 8), (2, 1, 16)),
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 3, 2), (2, 3, 4), (3, 1, 1), (3, 1, 2)),
)
_BUDGET_S = 8.0


@dataclass
class Setting:
    """A plan, and what each round predicted and measured."""

    model: str
    plan: Plan
    forecasts: list[Forecast] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    @property
    def predicted_s(self) -> float:
        return statistics.median(f.batch_s for f in self.forecasts)

    @property
    def measured_s(self) -> float:
        return statistics.median(t.batch_s for t in self.trials)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory(self) -> list[tuple[float, float]]:
        """Of each worker, predicted and measured."""
        predicted = zip(*(f.memory_bytes for f in self.forecasts))
        measured = zip(*(t.memory_bytes for t in self.trials))
        return [(statistics.median(a), statistics.median(b)) for a, b in zip(predicted, measured)]

    @property
    def memory_error(self) -> float:
        """The largest of its workers."""
        return max((a / b - 1 for a, b in self.memory), key=abs)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plan": asdict(self.plan),
            "predicted_s": [f.batch_s for f in self.forecasts],
            "measured_s": [t.batch_s for t in self.trials],
            "rounds_s": [t.rounds_s for t in self.trials],
            "error": self.error,
            "memory_bytes": self.memory,
        }


def main() -> None:
    from avgpipe.bench.machine import machine, versions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    settings: list[Setting] = []
    for model in arguments.models:
        settings += of_model(model, arguments.preset, arguments.rounds)
    record = {
        "question": "predicted against measured time per batch and peak memory",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(
            ["OMP_NUM_THREADS=1", "python", "benchmarks/tuning/predictions.py", *sys.argv[1:]]
        ),
        "machine": machine(1, "cpu"),
        "versions": versions(),
        "settings": [setting.to_json() for setting in settings],
    }
    show(settings)
    import json

    from avgpipe.files import write_atomically

    path = Path(arguments.out or RESULTS / f"tuning-predictions-{record['date']}.json")
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


def of_model(model: str, preset: str, rounds: int) -> list[Setting]:
    from avgpipe.tuning.cluster import Cluster
    from avgpipe.tuning.forecast import forecast
    from avgpipe.tuning.shapes import profiled_sizes
    from avgpipe.tuning.subject import profile_of, workload_of
    from avgpipe.tuning.trial import Subject, measure

    subject = Subject(model, preset)
    workload = workload_of(subject)
    size = workload.batch_size
    found: list[Setting] = []
    for number in range(rounds):
        sizes = profiled_sizes(size)
        profiles = [
            profile_of(
                *(subject, workload),
                micro_batch_sizes=sizes,
                link=None,
                budget_s=_BUDGET_S,
                at_once=workers,
            )
            for workers in (1, 2)
        ]
        if not found:
            found = [Setting(model, plan) for plan in plans(profiles[1], size)]
        for setting in found:
            profile = profiles[setting.plan.workers > 1]
            cluster = Cluster.like(profile, setting.plan.workers)
            setting.forecasts.append(forecast(profile, setting.plan, size, cluster))
            setting.trials.append(measure(subject, setting.forecasts[-1]))
            say(f"round {number}: {line(setting)}")
    return found


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
    ours, theirs = setting.predicted_s, setting.measured_s
    memory = ", ".join(f"{a / 2**20:.0f}/{b / 2**20:.0f}" for a, b in setting.memory)
    return (
        f"| {setting.model} | {plan.stages} | {plan.pipelines} | {plan.micro_batches} | {plan.partition or '-'} | "
        f"{1e3 * ours:.1f} | {1e3 * theirs:.1f} | {100 * setting.error:+.1f} % | {memory} | "
        f"{100 * setting.memory_error:+.1f} % |"
    )


def show(settings: list[Setting]) -> None:
    print(
        "| model | K | N | M | cut | predicted ms | measured ms | error | MiB, predicted/measured | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for setting in settings:
        print(line(setting))
    for what, errors in (
        ("time", [abs(s.error) for s in settings]),
        ("peak memory", [abs(s.memory_error) for s in settings]),
    ):
        print(
            f"{what}: median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
