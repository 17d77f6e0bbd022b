"""Question: how far are predicted from measured times per batch and peak memory, over many plans of real models?

    OMP_NUM_THREADS=1 python -m benchmarks.tuning.predictions

Two cores, so plans of up to two workers, and of three where no more than two can be busy at once. Each plan is trained
in processes of its own, in slices of a second, and between them the layers are profiled (by two processes at once, for
K = 1 by one): the machine is quicker in one second than in another. Predictions and measurements are medians of these,
and the error "in pairs" is the median of the ratios of neighbours.
The cuts are those that the search finds from a profile made before; around the layers counts what was measured once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from avgpipe.cli.config import ProfilingOptions
    from avgpipe.measure.workers import WorkerCosts
    from avgpipe.plan import Plan
    from avgpipe.planning.profile import Profile

MODELS = ("awd-lstm", "gpt", "bert")
SETTINGS = (  # K, N, M
    *((1, 1, 4), (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 1, 8), (2, 1, 16)),
    *((2, 2, 2), (2, 2, 4), (2, 3, 2), (3, 1, 1)),
)
_FIRST_BUDGET_S, _BUDGET_S = 5.0, 0.8
_LIMIT_S = 400.0
_CORES = 2


@dataclass
class Setting:
    """A plan, and what was predicted from each profile and measured in each slice; bytes are of each worker."""

    model: str
    plan: Plan
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    predicted_bytes: list[tuple[float, ...]] = field(default_factory=list)
    measured_bytes: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def error(self) -> float:
        return statistics.median(self.predicted_s) / statistics.median(self.measured_s) - 1

    @property
    def paired_error(self) -> float:
        """Of each slice and the profile made just before it: what the machine's pace does to both is not in it."""
        return statistics.median(p / m for p, m in zip(self.predicted_s, self.measured_s)) - 1

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
        errors = {"error": self.error, "paired_error": self.paired_error, "memory_error": self.memory_error}
        return {**asdict(self), **errors}


def main() -> None:
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=12, help="of each plan")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    settings = [
        setting
        for model in arguments.models
        for setting in settings_of(model, arguments.preset, arguments.slices)
    ]
    show(settings)
    found = {"settings": [setting.to_json() for setting in settings]}
    question = "predicted against measured time per batch and peak memory"
    write_record("tuning-predictions", question, found, arguments.out)


def settings_of(model: str, preset: str, slices: int) -> list[Setting]:
    from avgpipe.cli.config import ProfilingOptions
    from avgpipe.cli.measuring import build, loaded, profile_of
    from avgpipe.measure.search import profiled_sizes
    from avgpipe.measure.workers import measure_workers
    from avgpipe.model.layers import layers_of

    config = ProfilingOptions(workload=model, preset=preset, budget_s=_FIRST_BUDGET_S)
    workload, _ = build(config)
    size = workload.batch_size
    loads = f"{loaded.__module__}:loaded", {"config": config.to_json()}
    around = measure_workers(layers_of(workload.layers), 1, True, loads)
    first = profile_of(config, profiled_sizes(size), at_once=2)
    settings = []
    for plan, expected_s in plans(first, size):
        setting = Setting(model, plan)
        settings.append(setting)
        measure(setting, expected_s, config, size, around, slices)
        print(line(setting), file=sys.stderr, flush=True)
    return settings


def measure(
    setting: Setting, expected_s: float, config: ProfilingOptions, size: int, around: WorkerCosts, slices: int
) -> None:
    from avgpipe.measure.forecast import OnCluster
    from avgpipe.measure.profiler import with_workers
    from avgpipe.planning.cluster import Cluster
    from avgpipe.planning.profile import Profile
    from benchmarks.tuning.turns import in_turn

    plan = setting.plan
    asked = {"config": config.to_json(), "repeats": slices}
    if size % plan.micro_batches:
        raise ValueError(f"{plan.micro_batches} micro-batches of {size} samples: none in whole samples")
    of_layers = {**asked, "size": size // plan.micro_batches, "budget_s": _BUDGET_S}
    of_trial = {**asked, "plan": plan.to_json(), "expected_s": expected_s}
    profiles, ranks = in_turn(
        [
            ("benchmarks.tuning.measured:profiles", min(plan.workers, _CORES), of_layers),
            ("benchmarks.tuning.measured:trial", plan.workers, of_trial),
        ],
        _LIMIT_S,
    )
    for text in profiles[0]:
        profile = with_workers(Profile.from_json(text), around, None)
        problem = OnCluster(profile, plan, size, Cluster.like(profile, plan.workers))
        found = problem.forecast(tuple(plan.partition or ()))
        setting.predicted_s.append(found.batch_s)
        setting.predicted_bytes.append(found.memory_bytes)
    setting.measured_s += ranks[0]["batch_s"]
    setting.measured_bytes.append(tuple(rank["memory_bytes"] for rank in ranks))


def plans(profile: Profile, size: int) -> list[tuple[Plan, float]]:
    """With the cuts that the search finds, and about how many seconds a batch takes."""
    from avgpipe.measure.forecast import OnCluster
    from avgpipe.measure.search import PlanShape
    from avgpipe.planning.cluster import Cluster
    from avgpipe.planning.cuts import CutSearch

    found = []
    for stages, pipelines, micro_batches in SETTINGS:
        plan = PlanShape(stages, 1, pipelines, micro_batches).plan()
        problem = OnCluster(profile, plan, size, Cluster.like(profile, stages))
        best = problem.forecast(CutSearch(problem, None).best()[0])
        found.append((best.plan, best.batch_s))
    return found


def line(setting: Setting) -> str:
    plan = setting.plan
    predicted, measured = statistics.median(setting.predicted_s), statistics.median(setting.measured_s)
    memory = ", ".join(f"{a / 2**20:.0f}/{b / 2**20:.0f}" for a, b in setting.memory)
    cells = [setting.model, plan.stages, plan.pipelines, plan.micro_batches, plan.partition or "-"]
    cells += [f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}", f"{100 * setting.error:+.1f} %"]
    cells += [f"{100 * setting.paired_error:+.1f} %"]
    cells += [memory, f"{100 * setting.memory_error:+.1f} %"]
    return f"| {' | '.join(map(str, cells))} |"


def show(settings: list[Setting]) -> None:
    print(
        "| model | K | N | M | cut | predicted ms | measured ms | error | in pairs | MiB, predicted/measured | "
        "error |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for setting in settings:
        print(line(setting))
    for what, errors in (
        ("time", [abs(s.error) for s in settings]),
        ("time in pairs", [abs(s.paired_error) for s in settings]),
        ("peak memory", [abs(s.memory_error) for s in settings]),
    ):
        worst, middle = 100 * max(errors), 100 * statistics.median(errors)
        print(f"{what}: median error {middle:.1f} %, worst {worst:.1f} %, {len(errors)} settings")


if __name__ == "__main__":
    main()
