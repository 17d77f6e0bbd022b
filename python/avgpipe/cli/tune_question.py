"""What ``avgpipe tune`` is asked, and how it is answered."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from avgpipe.cli.launch import cores
from avgpipe.cli.profile import check_subject
from avgpipe.measure.shapes import Space, profiled_sizes
from avgpipe.measure.trial import Subject
from avgpipe.planning.cluster import Cluster
from avgpipe.planning.profile import LinkProfile, Profile

if TYPE_CHECKING:
    from avgpipe.measure.result import Tuning


@dataclass(frozen=True)
class Question:
    """profile, cluster: files. batch_size: None: the workload's. The others as of the command."""

    subject: Subject | None
    profile: str | None
    cluster: str | None
    batch_size: int | None
    workers: int | None
    memory_limit_bytes: int | None
    link: LinkProfile | None
    pipelines: tuple[int, ...]
    micro_batches: tuple[int, ...] | None
    budget_s: float
    trials: int
    baselines: bool
    traversal: bool

    def prepared(self) -> Prepared:
        """With what the files and the workload say. ValueError or OSError for what cannot be."""
        self._check()
        profile = Profile.load(self.profile) if self.profile is not None else None
        cluster = Cluster.load(self.cluster) if self.cluster is not None else None
        facts = check_subject(self.subject) if self.subject is not None else None
        batch_size = facts.batch_size if facts is not None else self.batch_size
        assert batch_size is not None
        # What does not depend on the profile is refused before it is made.
        Space(1, 1, batch_size, self.pipelines, self.micro_batches)
        made = Prepared(self, profile, cluster, batch_size)
        why_not = made.why_not_timed or ("--trials is 0" if self.trials == 0 else "")
        if why_not and (self.baselines or self.traversal):
            option = "--traversal" if self.traversal else "--baselines"
            raise ValueError(f"{option} times plans, but {why_not}: leave it out")
        return made

    def _check(self) -> None:
        if self.subject is None and (self.profile is None or self.batch_size is None):
            raise ValueError("name a WORKLOAD to profile, or give --profile FILE and --batch-size B")
        if (self.workers is None) == (self.cluster is None):
            raise ValueError("say what the plan is for: --workers K, or --cluster FILE")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers}: must be at least 1")
        if self.memory_limit_bytes == 0:
            raise ValueError("--memory-limit 0: must be more than 0")
        for option, value in (("--memory-limit", self.memory_limit_bytes), ("--bandwidth", self.link)):
            if self.cluster is not None and value is not None:
                raise ValueError(f"{option} with --cluster: write it into the file, or leave one of them out")


@dataclass(frozen=True)
class Prepared:
    question: Question
    profile: Profile | None
    cluster: Cluster | None
    batch_size: int

    @property
    def why_not_timed(self) -> str:
        """ "" where plans can be."""
        asked = self.question
        if asked.subject is None:
            return "there is no workload"
        if asked.cluster is not None or asked.link is not None:
            return "the plan is for other links than those that are here"
        assert asked.workers is not None
        here, kind = devices(asked.subject.device)
        return (
            "" if asked.workers <= here else f"{asked.workers} workers are more than the {here} {kind} here"
        )

    @property
    def notes(self) -> list[str]:
        asked = self.question.trials > 0
        return [f"not timed: {self.why_not_timed}"] if self.why_not_timed and asked else []

    def profiled(self) -> tuple[Profile, float | None]:
        """The profile that was given, else a new one, and the seconds that it took. Raises PipelineError for a process
        that fails.
        """
        if self.profile is not None:
            return self.profile, None
        from avgpipe.measure.subject import profile_of

        question = self.question
        assert question.subject is not None
        _say(f"profiling for about {question.budget_s:g} s")
        here = self.cluster is None and question.subject.device == "cpu"
        begin = time.perf_counter()
        found = profile_of(
            question.subject,
            micro_batch_sizes=profiled_sizes(self.batch_size),
            link=question.link,
            budget_s=question.budget_s,
            at_once=min(question.workers or 1, cores()) if here else 1,
        )
        return found, time.perf_counter() - begin

    def answer(self, profile: Profile, profile_s: float | None) -> Tuning:
        """ValueError where nothing fits into the memory."""
        from avgpipe.measure.trial import measure
        from avgpipe.measure.tuner import study

        question = self.question
        if self.cluster is not None:
            place = self.cluster
        else:
            assert question.workers is not None
            place = Cluster.like(profile, question.workers, question.memory_limit_bytes, question.link)
        lanes = max(profile.second_lane, default=1.0) > 1
        space = Space(
            *(place.workers, len(profile.layers), self.batch_size),
            *(question.pipelines, question.micro_batches, lanes),
        )
        times = not self.why_not_timed and question.trials > 0
        return study(
            *(profile, place, space),
            partial(measure, question.subject) if times and question.subject is not None else None,
            trials=question.trials,
            baselines=question.baselines,
            traversal=question.traversal,
            say=_say,
            profile_s=profile_s,
        )


def devices(device: str) -> tuple[int, str]:
    """How many workers find a place of their own here, and what that is."""
    if device == "cuda":
        import torch

        return torch.cuda.device_count(), "CUDA devices"
    return cores(), "cores"


def _say(line: str) -> None:
    """Progress, for whoever watches."""
    if sys.stderr.isatty():
        print(f"{line} ...", file=sys.stderr, flush=True)
