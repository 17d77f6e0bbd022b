"""A plan: all choices of a run, as one value that can be printed, saved and edited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from avgpipe.errors import check_count, check_name
from avgpipe.rules import RULES, Elasticity, suited_rule, suited_warmup
from avgpipe.schedule import (
    RECOMPUTE,
    RowCursor,
    Schedule,
    build_schedule,
    published,
)
from avgpipe.schedule.builders import MOST

BATCHES = ("global", "per-pipeline")


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        stages: K, the number of parts that the model is cut into.
        pipelines: N, how many replicas of the model train at once.
        micro_batches: M, the parts of a batch. Pipelines that share a batch need one each: a smaller M is
            raised to N.
        schedule: the order of actions, see ``build_schedule``.
        advance: of the schedule "advance-forward", see ``build_schedule``; "auto" lets a Pipeline measure and choose.
        system: the name of the published system that this is; the other attributes must match its row of
            ``avgpipe.systems``: ``Plan.for_system`` sets them.
        partition: the first layer of stages 1..K-1 as indices, or as module names for a traced model; None: balanced by
            an estimate, of the work on ``Pipeline(example_inputs=...)`` if that is given; ``print(pipeline)``
            names the kind of estimate.
        alpha: elasticity, see ``Reference``; so are the next three. With one pipeline they have no effect.
        rule: by which pipelines and reference are averaged. "mean-gradient": one optimizer for all, which steps the
            reference by the mean of the pipelines' gradients; "avgpipe", "easgd": each has its own, and an elastic
            force ties them. None: "mean-gradient" if pipelines share each batch and neither ``alpha`` nor
            ``period`` nor an asynchronous ``staleness`` needs more, else "avgpipe".
        staleness: 0, 1 or "asynchronous", the age of the reference that a pipeline is pulled to.
        period: updates of a pipeline in a round of averaging.
        warmup_rounds: batches at the beginning of training whose gradients are of the newest weights: with rule
            "mean-gradient", rounds of staleness 0; schedules without a flush have one batch in flight. Gradients change
            fast then, and late ones cost most. None: 100 rounds with rule "mean-gradient" and staleness 1,
            else 0.
        recompute: which micro-batches store only their stage's input and run the forward again before the backward:
            "never", "always", or "except-last" (all but the last micro-batch, as its backward comes soonest).
        weights: the version of the weights that a batch runs on; None: as the schedule was published.
            "flush": the newest, for schedules that flush. For those that do not: "stash" (PipeDream), forward
            and backward on the version that was the newest on the stage at the first forward;
            "vertical-sync", on the one that was the newest on the first stage; "double-buffer" (2BW), on the
            newest but one; "predicted" (SpecTrain), as "stash" with the correction "predicted".
        replication: how many workers each stage has, R_k; micro-batch m goes to number m % R_k of stage k, and
            gradients are summed over them. None: one each.
        stages_per_worker: of the schedules "interleaved-1f1b", "interleaved-zero-bubble" and "looped-bfs", see
            ``build_schedule``.
        spread: whether each pipeline has its own workers, which average over the network, instead of sharing
            all.
        isolate: whether each pipeline has its own processes, one for each worker, on the workers that all
            share. If one pipeline is lost, the others go on, and it may join again: see
            ``avgpipe run --isolate``.
        placement: for each stage its workers, in ascending order: the rank that runs it. None: workers are
            numbered stage after stage, or as the schedule has them.
        batch: how several pipelines use a batch of the loader. "global": all of them share it, pipeline i
            trains on the i-th N-th of its micro-batches, and the reference moves once, so that a batch is
            about the step that one pipeline would make of it. "per-pipeline": batch j is pipeline j % N's,
            and the reference moves by the mean of N updates once all have theirs, so that N batches are a
            step like that of an N-fold batch. At one pipeline's learning rate that learns much less from a
            batch: a small language model needed 1.5 times the samples with two pipelines and 3 times with
                four. Raise
            the rate as for a batch N times as large.
        correction: of gradients of weights that are some updates old, with schedules without a flush.
            "predicted": forward and backward run on the weights as the optimizer's state (SGD with momentum, Adam,
            AdamW) predicts them for the time of the batch's update; "error-feedback": each step adds its
            difference from the one before; "nesterov": with momentum over the steps and its look-ahead. The
            last two work with any optimizer. None: no correction.
    """

    stages: int = 1
    pipelines: int = 1
    micro_batches: int = 1
    schedule: str = "advance-forward"
    advance: int | Sequence[int] | str | None = None
    system: str = "avgpipe"
    partition: Sequence[int] | Sequence[str] | None = None
    alpha: float | None = None
    rule: str | None = None
    staleness: int | str = 1
    period: int = 1
    warmup_rounds: int | None = None
    recompute: str = "never"
    weights: str | None = None
    replication: Sequence[int] | None = None
    stages_per_worker: int | None = None
    spread: bool = False
    isolate: bool = False
    placement: Sequence[Sequence[int]] | None = None
    batch: str = "global"
    correction: str | None = None

    def __post_init__(self) -> None:
        for name in ("advance", "partition", "replication", "placement"):
            object.__setattr__(self, name, as_tuples(getattr(self, name)))
        for name in ("stages", "pipelines", "micro_batches"):
            check_count(name, getattr(self, name), most=MOST)
        check_name("recompute", self.recompute, RECOMPUTE)
        check_name("batch", self.batch, BATCHES)
        object.__setattr__(self, "micro_batches", max(self.micro_batches, self.shares))
        if self.rule is None:
            rule = suited_rule(self.pipelines, self.alpha, self.staleness, self.period, self.batch)
            object.__setattr__(self, "rule", rule)
        assert self.rule is not None
        if self.warmup_rounds is None and self.rule in tuple(RULES):
            rounds = suited_warmup(self.pipelines, self.rule, self.staleness)
            object.__setattr__(self, "warmup_rounds", rounds)
        Elasticity.checked(
            self.pipelines, self.alpha, self.rule, self.staleness, self.period, self.warmup_rounds or 0
        )
        self._check_partition()
        schedule = self.build_schedule()
        if self.weights is None:
            object.__setattr__(self, "weights", published(self.schedule).weights)
        is_plain = schedule.flush and self.weights == "flush" and self.correction is None
        if not is_plain or self.replication is not None or self.isolate:
            from avgpipe.plan_checks import check

            if check(self, schedule):
                object.__setattr__(self, "correction", "predicted")
        if not isinstance(self.spread, bool):
            raise ValueError(f"spread must be True or False, not {self.spread!r}")
        for name in ("spread", "isolate"):
            if getattr(self, name) and self.advance == "auto":
                raise ValueError(f"{name}=True cannot have advance 'auto': give numbers")
        if self.system != "avgpipe":  # the default, of any options
            from avgpipe.systems import check_options

            check_options(self.system, self)

    def _check_partition(self) -> None:
        if self.partition is None:
            return
        if len(self.partition) != self.stages - 1:
            raise ValueError(
                f"partition {self.partition} names {len(self.partition)} first layers; {self.stages} stages need "
                f"{self.stages - 1}, one for each stage but the first"
            )
        if all(isinstance(p, int) for p in self.partition):
            if any(a >= b for a, b in pairwise([0, *self.partition])):
                raise ValueError(
                    f"partition {self.partition} must rise from at least 1: no stage may be empty"
                )
        elif not all(isinstance(p, str) for p in self.partition):
            raise TypeError(f"partition must hold layer indices or module names, not {self.partition}")

    @property
    def shares(self) -> int:
        """How many pipelines train on parts of each batch of the loader: N, or 1 if they take turns."""
        return self.pipelines if self.batch == "global" else 1

    @property
    def micro_batches_each(self) -> int:
        """The most micro-batches that a pipeline has of a batch: of isolated ones, the last may have all."""
        return self.micro_batches if self.isolate else -(-self.micro_batches // self.shares)

    @property
    def batches_per_round(self) -> int:
        """The batches of the loader from which every pipeline makes an update."""
        return self.pipelines // self.shares

    @property
    def batches_in_flight(self) -> int:
        """How many batches of the loader are trained on at once, at most."""
        schedule = self.build_schedule()
        if not schedule.flush:  # as many as it takes for the oldest to end
            return 1 + schedule.lookahead
        if self.shares == 1:
            return self.pipelines
        # With staleness the next one too, so that a pipeline which is ahead of the others can continue.
        return 2 if self.staleness else 1

    @property
    def delays(self) -> tuple[int, ...]:
        """The lateness of each stage's gradients, in updates, once the pipeline is full; 0 with a flush."""
        schedule, weights = self.build_schedule(), self.weights or "flush"
        first_row = schedule.rows[schedule.worker_of(0)]
        rows = [schedule.rows[workers[0]] for workers in schedule.replicas]
        return tuple(RowCursor(row, weights, first_row).steady_delay(k) for k, row in enumerate(rows))

    @property
    def workers(self) -> int:
        """The number of worker processes that the plan needs."""
        one = self.build_schedule().workers
        return one * self.pipelines if self.spread else one

    def build_schedule(self) -> Schedule:
        """The schedule of one pipeline, with the replicas of stages."""
        schedule = build_schedule(
            self.schedule,
            self.stages,
            self.micro_batches_each,
            self.advance,
            self.stages_per_worker,
            self.replication,
        )
        return schedule if self.placement is None else schedule.placed(self.placement)

    @classmethod
    def for_system(cls, system: str, **options: Any) -> Plan:
        """The plan of a published system: its row of ``avgpipe.systems``, completed by ``options``.

        ``stages``: of systems that have no stages, such as data parallelism, the workers.
        """
        from avgpipe.systems import complete

        return cls(**complete(system, options))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        from avgpipe.files import dataclass_of, json_object

        values = json_object("a plan", text)
        values.setdefault("batch", "per-pipeline")  # the only choice of plans without this key
        plan: Plan = dataclass_of("plan", cls, values)
        return plan

    def save(self, path: str | Path) -> None:
        from avgpipe.files import write_atomically

        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        from avgpipe.files import reading

        with reading(path) as text:
            return cls.from_json(text)


def as_tuples(value: Any) -> Any:
    """Return lists, and lists in them, as tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value
