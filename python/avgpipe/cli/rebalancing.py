"""``avgpipe train --rebalance``: another cut of the model, if batches would take less time with it."""

from __future__ import annotations

from dataclasses import replace

import torch

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.measuring import typical_batch
from avgpipe.cli.record import Record
from avgpipe.cli.resolve import profile_options
from avgpipe.measure.profiler import profile
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.planning import Profile
from avgpipe.planning.rebalance import rebalanced
from avgpipe.tasks import Workload

_LEAST_GAIN = 0.05  # share of a batch's time for which layers move: less is noise between runs
_PROFILE_S = 10.0


class Rebalancer:
    """Finds better cuts of a run's model, by the measured times of its stages and a profile of its layers."""

    def __init__(self, config: TrainConfig, workload: Workload, record: Record) -> None:
        self._config, self._workload, self._record = config, workload, record
        self._profile: str | None = None  # profile of the layers, once it was needed; "" if profiling failed

    def better_cut(self, pipeline: Pipeline) -> tuple[int, ...] | None:
        """Return the first layers of the later stages, and note them in the record; None to keep the cut."""
        layers = self._profiled(pipeline)
        if layers is None:
            return None
        plan, chosen, bounds = pipeline.plan, pipeline.advance, pipeline.bounds
        schedule = (plan if chosen is None else replace(plan, advance=chosen.advance)).build_schedule()
        costs = pipeline.measured_costs()
        found = rebalanced(layers, bounds, costs, schedule, plan.pipelines, plan.weights or "flush")
        if found is None or found.gain < _LEAST_GAIN:
            return None
        before, after = (", ".join(map(str, firsts)) for firsts in (bounds[1:-1], found.boundaries))
        self._record.note(
            f"rebalanced: stages now begin with layers {after} instead of {before}; batches should take "
            f"{100 * found.gain:.0f} % less time"
        )
        return found.boundaries

    def _profiled(self, pipeline: Pipeline) -> Profile | None:
        """Return the profile of the layers, measured once, on the first worker, which needs some seconds.

        None if it cannot be measured.
        """
        if self._profile is None:
            text = self._profile_here(pipeline.plan) if pipeline.world.rank == 0 else ""
            self._profile = pipeline.world.gather(text)[0]
        return Profile.from_json(self._profile) if self._profile else None

    def _profile_here(self, plan: Plan) -> str:
        workload = self._workload
        try:
            inputs, target = typical_batch(workload)
            return profile(
                workload.layers,
                inputs,
                target=target,
                micro_batch_sizes=[max(1, workload.batch_size // plan.micro_batches)],
                threads=torch.get_num_threads(),
                budget_s=_PROFILE_S,
                layers_only=True,
                **profile_options(self._config, workload),
            ).to_json()
        except (ValueError, TypeError, RuntimeError) as error:
            self._record.note(
                f"warning: stages are not rebalanced, as their layers cannot be measured: {error}"
            )
            return ""
