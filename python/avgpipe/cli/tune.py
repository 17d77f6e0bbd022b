"""``avgpipe tune``: a good plan for a workload, predicted from a profile and, where the devices are here, measured."""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import torch

from avgpipe.cli.config import TuneConfig
from avgpipe.cli.errors import arguments, running
from avgpipe.cli.profile import check_file, link_of, subject_of
from avgpipe.cli.subject import Subject, profile_of, trial_of
from avgpipe.cli.tune_table import show
from avgpipe.measure.search import Space, profiled_sizes
from avgpipe.measure.tuning import Tuning, study
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.ranks.machine import cores
from avgpipe.workloads import check_workload


def run(config: TuneConfig) -> None:
    with arguments():
        tuning = _Tuning(config)
        check_file(config.out)
    with running():
        profile, profile_s = tuning.profiled()
    with arguments():  # only the profile tells what fits into the memory
        found = tuning.answer(profile, profile_s)
    with running():
        found.plan.save(config.out)
    if config.json:
        print(json.dumps(found.to_json()))
        return
    if tuning.not_timed and config.trials:
        print(f"not timed: {tuning.not_timed}")
    show(found, config.out)


class _Tuning:
    """What is tuned, with what the files and the workload say. Raises ValueError or OSError for what cannot be.

    Attributes:
        not_timed: Why plans cannot be timed; "" where they can.
    """

    def __init__(self, config: TuneConfig) -> None:
        _check(config)
        self.config = config
        self.link: LinkProfile | None = link_of(config)
        self.profile = Profile.load(config.profile) if config.profile is not None else None
        self.cluster = Cluster.load(config.cluster) if config.cluster is not None else None
        self.subject: Subject | None = None
        batch_size = config.batch_size
        if config.workload:
            self.subject = subject_of(config)
            batch_size = check_workload(config.workload, config.build_options()).batch_size
        assert batch_size is not None
        self.batch_size = batch_size
        # What does not depend on the profile is refused before it is made.
        Space(1, 1, batch_size, config.pipelines, config.micro_batches)
        self.not_timed = self._why_not_timed()
        why_not = self.not_timed or ("--trials is 0" if config.trials == 0 else "")
        if why_not and (config.baselines or config.traversal):
            option = "--traversal" if config.traversal else "--baselines"
            raise ValueError(f"{option} times plans, but {why_not}: leave it out")

    def _why_not_timed(self) -> str:
        config = self.config
        if not config.workload:
            return "there is no workload"
        if config.cluster is not None or self.link is not None:
            return "the plan is for other links than those of this machine"
        assert config.workers is not None
        here, kind = (
            (torch.cuda.device_count(), "CUDA devices") if config.device == "cuda" else (cores(), "cores")
        )
        return (
            "" if config.workers <= here else f"{config.workers} workers are more than the {here} {kind} here"
        )

    def profiled(self) -> tuple[Profile, float | None]:
        """The profile that was given, else a new one and the seconds it took. PipelineError for a failed process."""
        if self.profile is not None:
            return self.profile, None
        config = self.config
        assert self.subject is not None
        _say(f"profiling for about {config.budget_s:g} s")
        here = self.cluster is None and config.device == "cpu"
        begin = time.perf_counter()
        found = profile_of(
            self.subject,
            micro_batch_sizes=profiled_sizes(self.batch_size),
            link=self.link,
            budget_s=config.budget_s,
            at_once=min(config.workers or 1, cores()) if here else 1,
        )
        return found, time.perf_counter() - begin

    def answer(self, profile: Profile, profile_s: float | None) -> Tuning:
        """Search for the best plan. ValueError where nothing fits into the memory."""
        config, cluster = self.config, self.cluster
        if cluster is None:
            assert config.workers is not None
            cluster = Cluster.like(profile, config.workers, config.memory_limit_bytes, self.link)
        space = Space(
            workers=cluster.workers,
            layers=len(profile.layers),
            batch_size=self.batch_size,
            pipelines=config.pipelines,
            micro_batches=config.micro_batches,
            lanes=max(profile.second_lane, default=1.0) > 1,
        )
        times = self.subject is not None and not self.not_timed and config.trials > 0
        return study(
            profile,
            cluster,
            space,
            partial(trial_of, self.subject) if times and self.subject is not None else None,
            trials=config.trials,
            baselines=config.baselines,
            traversal=config.traversal,
            say=_say,
            profile_s=profile_s,
        )


def _check(config: TuneConfig) -> None:
    if not config.workload and (config.profile is None or config.batch_size is None):
        raise ValueError("name a WORKLOAD to profile, or give --profile FILE and --batch-size NUMBER")
    if (config.workers is None) == (config.cluster is None):
        raise ValueError("say what the plan is for: --workers NUMBER, or --cluster FILE")
    if config.trials < 0:
        raise ValueError(f"--trials {config.trials}: must be at least 0")
    for option, value in (("--memory-limit", config.memory_limit_bytes), ("--bandwidth", config.bandwidth)):
        if config.cluster is not None and value is not None:
            raise ValueError(f"{option} with --cluster: write it into the file, or give only one of them")


def _say(line: str) -> None:
    """Progress, for whoever watches."""
    if sys.stderr.isatty():
        print(f"{line} ...", file=sys.stderr, flush=True)
