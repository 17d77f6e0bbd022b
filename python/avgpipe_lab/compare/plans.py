"""Choose the plans of compared systems with the tuner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from avgpipe.cli.config import ProfilingOptions, WorkloadOptions
from avgpipe.cli.measuring import profile_of
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.ranks.process import cores
from avgpipe.tasks import check_workload
from avgpipe.units import format_bytes, format_seconds
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.planning.of_system import best_of_system


def tuned_plans(
    config: CompareConfig, systems: Iterable[str], say: Callable[[str], None]
) -> dict[str, Path | ValueError]:
    """Profile the workload and write the best plan of each system to the folder, or return why not.

    The profile is written there, too. Raises PipelineError when profiling fails.
    """
    out = Path(config.out)
    batch_size = check_workload(config.workload, config.build_options()).batch_size
    asked = {f.name: getattr(config, f.name) for f in fields(WorkloadOptions) if f.name in config.explicit}
    profiling = ProfilingOptions.of(**{**asked, "workload": config.workload})
    say(f"profiling for about {profiling.budget_s:g} s, to choose plans")
    at_once = min(config.stages, cores()) if config.device == "cpu" else 1
    profile = profile_of(profiling, profiled_sizes(batch_size), at_once)
    profile.save(out / "profile.json")
    cluster = Cluster.like(profile, config.stages, config.memory_limit_bytes)
    given: dict[str, Any] = {
        name: config.explicit[name] for name in ("pipelines", "micro_batches") if name in config.explicit
    }
    found: dict[str, Path | ValueError] = {}
    for system in systems:
        try:
            best = best_of_system(system, profile, cluster, batch_size, given)
        except ValueError as error:
            found[system] = error
            continue
        path = out / f"{system}-plan.json"
        best.plan.save(path)
        found[system] = path
        say(
            f"{system}: {_chosen(best.plan)}; predicted {format_seconds(best.batch_s)} a batch, "
            f"{format_bytes(max(best.memory_bytes))} on the worker that needs most"
        )
    return found


def _chosen(plan: Plan) -> str:
    recompute = "" if plan.recompute == "never" else f", recomputes {plan.recompute}"
    return (
        f"pipelines {plan.pipelines}, micro-batches {plan.micro_batches}, advance {plan.advance}{recompute}"
    )
