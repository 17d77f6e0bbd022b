"""The training loop of ``avgpipe train``: the same on every rank; the first rank sends its events to the record."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe import __version__
from avgpipe.checkpoint.folder import NotFinite
from avgpipe.cli.config import TrainConfig
from avgpipe.cli.folder import RunFolder
from avgpipe.cli.measuring import typical_batch
from avgpipe.cli.output import CommandFailed, arguments, running, say
from avgpipe.cli.progress import links_line, links_of, log_records, warnings_of
from avgpipe.cli.record import Record, RemoteRecord, WrittenRecord
from avgpipe.cli.resolve import pipeline_options, prepare, profile_options
from avgpipe.errors import CheckpointError, PeerLost
from avgpipe.measure.profiler import profile
from avgpipe.pipeline import Pipeline
from avgpipe.planning import Profile
from avgpipe.planning.rebalance import rebalanced
from avgpipe.ranks.environment import peak_memory_bytes
from avgpipe.ranks.process import PEER_LOST
from avgpipe.ranks.signals import Answers, answering
from avgpipe.report.course import Totals, Validations, parse_target, target_text, unbroken
from avgpipe.runtime.evaluate import EvaluationResult
from avgpipe.saving import Checkpoints
from avgpipe.tasks import AveragingOptimizer
from avgpipe.timeline.timeline import Timeline

_ENDLESS = 1 << 62  # batches
_LEAST_GAIN = 0.05  # share of a batch's time for which layers move: less is noise between runs
_PROFILE_S = 10.0


def run_rank(config: TrainConfig) -> bool:
    """Train as this rank; return whether it was preempted. Raises CommandFailed."""
    with arguments():
        run = TrainingRun(config)
    answers = Answers(run.preempt, config.preemption_seconds, lambda: run.pipeline.doing())
    try:
        with running(), answering(answers):
            is_preempted = not run.train()
            run.close()
    except BaseException:
        with suppress(OSError):
            run.record.close()
        raise
    return is_preempted


def run_worker(config: str) -> bool:
    """Run :func:`run_rank` in a rank that the command started; the exit code names the kind of failure."""
    try:
        return run_rank(TrainConfig.from_json(config))
    except CommandFailed as failure:
        say(str(failure))
        lost = isinstance(failure.__cause__, PeerLost)
        raise SystemExit(PEER_LOST if lost else failure.exit_code) from failure


class TrainingRun:
    """A run from its first validation, or from its last checkpoint, to its summary.

    Making one builds the pipeline, loads the checkpoint or validates the initial weights, and then makes the
    run's folder: an error of the model is raised before anything is written. Raises ValueError, TypeError,
    OSError or PipelineError.

    Args:
        config: A complete configuration.
        on_result: Gets each row of metrics.jsonl, of a batch or of a validation, on the first rank.
    """

    def __init__(
        self, config: TrainConfig, on_result: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        self.config, self._on_result = config, on_result
        self.workload, self.plan = prepare(config)
        with log_records() as logged:
            self.pipeline = self._make_pipeline()
        self._world, self._launcher = self.pipeline.world, self.pipeline.launcher
        first, is_isolated = self._world.rank == 0, self._launcher is not None
        comes_late = self._launcher is not None and self._launcher.has_begun
        # Workers that were started one by one may have chosen the name of their folder at different times.
        self.out = Path(self._world.gather(config.out)[0])
        self.done = Totals(self.workload.lower_is_better, config.target)
        self._checkpoints = self._make_checkpoints()
        if config.resume and not comes_late:
            self._checkpoints.load()
            if first:
                folder = RunFolder(self.out, writes=not is_isolated)
                self.done.recall(folder.cut(self.pipeline.batches), self.pipeline.batches)
            self.done = Totals(**self._world.gather(asdict(self.done))[0])
        # Of the whole run, assuming that all epochs have the length of the first one.
        total = self.workload.epochs * len(self.workload.train_batches(0))
        self._total = total = min(total, config.max_batches or total)
        size = self.workload.batch_size
        validations = 1 if self.workload.valid_batches is None else config.validations  # the one at the end
        self._validations = Validations(total * size, validations, self.plan.batches_per_round * size)
        self.record: Record
        if self._launcher is not None and first:
            self.record = RemoteRecord(self._launcher, self.done, total)
        else:
            self.record = WrittenRecord(config, self.done, total, first and not is_isolated, on_result)
        self._warnings = warnings_of(logged)
        links = links_line(self._world.gather(links_of(logged)))
        self._is_to_end = False
        self._is_best = False  # whether the next checkpoint is of the best weights
        self._unsaved: CheckpointError | None = None  # why the last checkpoint was not written
        self._stretches: list[tuple[int, int]] = []  # steps, first and last, without a pause between them
        self._resumed_at = self.done.batches
        self._epoch_samples: int | None = None  # known once a loader without a length has ended
        self._validated_at = replace(self.done), self._steps()
        self._skipped = 0  # updates, of pipelines before the last rebalancing
        self._profile: str | None = None  # profile of the layers, once it was needed; "" if profiling failed
        self._is_open = comes_late
        if comes_late:
            return
        self.record.note(self._title())
        if self.workload.trivial is not None:
            answer, score = self.workload.trivial
            self.record.note(f"baseline: {answer}, {self.workload.metric_name} {score:.2f}")
        for note in (*links, *self._warnings):
            self.record.note(note)
        if config.resume:
            self._open()
        else:
            self._validate()  # opens the folder and the loggers once it has succeeded
            self._save(wait=True)
            if self._unsaved is not None:  # before hours of training
                raise self._unsaved

    def train(self) -> bool:
        """Train to the end and write the summary, or until the run is preempted, and save; return whether it ended."""
        rest = self._catch_up()
        epoch, start = self._position() if rest is None else rest.place(self.pipeline.batches)
        is_preempted = False
        while (rest or self._goes_on(epoch)) and not is_preempted:
            is_preempted = not self._train_epoch(epoch, start, rest)
            self._save(wait=is_preempted)
            epoch, start, rest = epoch + 1, 0, None
            if self.config.rebalance and self._goes_on(epoch) and not is_preempted:
                self._rebalance()
        self._wait_for_save()
        if self.config.target is not None and self.done.reached:
            self.record.note(f"target {target_text(self.config.target)} reached")
        has_news = self.done.batches > self._resumed_at or not (self.out / "summary.json").is_file()
        if has_news and not is_preempted:
            self._finish()
        self.record.close()
        if self._unsaved is not None:
            self._end_all(self._unsaved)
            raise self._unsaved
        return not is_preempted

    def _goes_on(self, epoch: int) -> bool:
        return epoch < self.workload.epochs and self._left() > 0 and not self.done.reached

    def preempt(self) -> None:
        """End the run once it is saved."""
        self._is_to_end = True
        self.pipeline.preempt()

    def _make_pipeline(self) -> Pipeline:
        config, workload = self.config, self.workload
        return Pipeline(workload.layers, self.plan, **pipeline_options(config, workload))

    def _make_checkpoints(self) -> Checkpoints:
        every_s = 60 * self.config.checkpoint_minutes
        return Checkpoints(self.pipeline, self.out / "checkpoints", every_s=every_s, keep=self.config.keep)

    def _end_all(self, failure: Exception) -> None:
        """Have the launcher of isolated pipelines end the run, as no pipeline could continue."""
        if self._launcher is not None:
            self._launcher.ask("fail", str(failure))

    def close(self) -> None:
        self.record.close()
        self.pipeline.close()

    def _catch_up(self) -> TrainingSegment | None:
        """Enter the run; if isolated pipelines already train, return the segment that they are in."""
        results, batches = self.pipeline.enter(), self.pipeline.batches
        if self._launcher is None or not self._launcher.is_late:
            return None
        sent = self.record.standing(results, batches) if isinstance(self.record, RemoteRecord) else None
        standing = self._world.gather(sent)[0]
        segment = TrainingSegment(**standing["segment"])
        self.done = replace(Totals(**standing["done"]), batches=batches)
        self._checkpoints.go_on(segment.checkpoints, standing["segment_s"])
        self._validated_at = replace(self.done), self._steps()
        return segment

    # ---- training ----------------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int, start: int, rest: TrainingSegment | None) -> bool:
        """Train an epoch from batch ``start`` on; ``rest``: the segment that others have begun there.

        Return whether the epoch, or the run, is at its end; else it was preempted.
        """
        batches = self.workload.train_batches(epoch, start)
        left = min(len(batches), self._left())
        source = iter(batches)
        self.done.enter(epoch)
        first = self._steps()
        while rest or (left > 0 and not self.done.reached and not self.pipeline.preempted):
            segment, rest = rest or self._begin_segment(epoch, start, left), None
            count = segment.first + segment.count - self.pipeline.batches
            trained = self._train_batches(islice(source, count))
            left, start = left - trained, start + trained
            if trained < count and not self.pipeline.preempted:  # a loader without a length has ended
                left, self._epoch_samples = 0, self.done.epoch_samples
            ends = not left and (epoch + 1 == self.workload.epochs or not self._left())
            # Optimizers that observe the validation loss do so at each epoch's end.
            validates = (
                (segment.validates and trained == count) or ends or (not left and bool(self._averaging))
            )
            saves = left > 0 and not self.pipeline.preempted and self._checkpoints.due(segment.count)
            if first < self._steps() and (validates or saves or not left):
                self._stretches.append((first, self._steps() - 1))
                first = self._steps()
            if validates and self.done.validated < self.done.batches:
                self._validate(ends)
            if not left:
                self._observe()
            if saves or (left and self._is_best):
                self._save()
        return left <= 0 or self.done.reached

    def _until_preempted(self, batches: Iterator[tuple[object, object]]) -> Iterator[tuple[object, object]]:
        for batch in batches:
            yield batch
            if self.pipeline.preempted:
                return

    def _begin_segment(self, epoch: int, start: int, left: int) -> TrainingSegment:
        ahead = self._to_next_validation()
        count = min(left, ahead, self._checkpoints.batches_to_agreement)
        standing, first = self._checkpoints.standing(), self.pipeline.batches
        segment = TrainingSegment(epoch, start, first, count, count == ahead, standing)
        self.record.segment(asdict(segment))
        return segment

    def _steps(self) -> int:
        """Return how many batches have begun, as timelines count them; for isolated pipelines, steps of all."""
        return self.done.batches if self._launcher is None else self._launcher.begun

    def _to_next_validation(self) -> int:
        """Return the number of batches before the next validation."""
        rounds = self._validations.rounds_to_next(self.done.samples)
        return _ENDLESS if rounds is None else rounds * self.plan.batches_per_round

    def _train_batches(self, batches: Iterator[tuple[object, object]]) -> int:
        """Train on the batches; return how many there were."""
        done, before = self.done, self.done.batches
        clock = time.perf_counter()
        for result in self.pipeline.train(self._until_preempted(batches)):
            now = time.perf_counter()
            done.note_batch(result.samples, now - clock)
            row: dict[str, Any] = {"batch": result.batch, "pipeline": result.pipeline, "epoch": done.epoch}
            row |= {"samples": done.samples, "loss": result.loss, "seconds": round(done.seconds, 6)}
            extra = {"lr": self._lr(), "grad_norm": getattr(result, "grad_norm", None)}
            if self.workload.valid_batches is None:  # else validation rows have it
                extra["total_batches"] = self._total
            row |= {name: value for name, value in extra.items() if value is not None}
            self.record.batch(row, result.samples, now - clock)
            clock = now
        done.batches = self.pipeline.batches
        return done.batches - before

    def _validate(self, ends: bool = False) -> None:
        """Validate the reference weights, record the results, and note whether the weights are the best so far.

        ``ends``: whether this validation is the last one of the run.
        """
        known = self.workload.valid_batches is not None
        loss, metrics = self._evaluate(ends) if known else (math.nan, {})
        metric = metrics.get(self.workload.metric_name)
        if not self._is_open:
            self._open()
        if not known:
            return
        done = self.done
        speed = self._since_last_validation()
        best = done.note_validation(done.batches, loss, metric)
        place = {"epoch": done.epoch, "batch": done.batches, "samples": done.samples}
        found = {"loss": loss, "metric": metric, "metrics": metrics}
        if self.plan.pipelines > 1:
            found["distances"] = asdict(self.pipeline.distances())
        skipped, peaks = self._of_ranks()
        facts: dict[str, Any] = {"skipped_updates": skipped, "peak_memory_bytes": peaks}
        if self._warnings and not done.batches:
            facts["warnings"] = self._warnings
        facts |= {"total_batches": self._total, "seconds": round(done.seconds, 6)}
        self.record.validation(place | found | speed | facts)
        self._is_best |= best

    def _evaluate(self, ends: bool = False) -> tuple[float, dict[str, float]]:
        """Evaluate the reference's weights, or once optimizers keep running means, those of the first pipeline.

        Replicas stay near their reference, and the running mean averages out the rest.
        """
        self.pipeline.drain()  # nothing may be in flight while the parameters hold something else
        assert self.workload.valid_batches is not None
        batches = self.record.validating(self.workload.valid_batches(), self.config.valid_batches)
        with ExitStack() as swapped:
            weights: str | int = "reference"
            for optimizer in self._averaging:
                if optimizer.triggered:
                    swapped.enter_context(optimizer.averages())
                    weights = 0 if self._launcher is None else self._launcher.pipeline
            evaluate = partial(self.pipeline.evaluate, batches, self.workload.metric_fn, weights=weights)
            if weights == "reference":
                result = evaluate()
            else:  # each isolated pipeline has running means, so one evaluates for all
                result = EvaluationResult(**self.pipeline.once("means", lambda: asdict(evaluate())))
            means = result.metric if isinstance(result.metric, dict) else {}
            found = self.workload.metrics(result.loss, means)
            if self.workload.decode is not None and (ends or self._decodes(result.loss)):
                decode = partial(self.workload.decode, partial(self.pipeline.predict, weights=weights))
                found |= self.pipeline.once("decoding", decode)
        return result.loss, found

    def _decodes(self, loss: float) -> bool:
        """Return whether a validation that found this loss translates or generates, too.

        That may take as long as the training between two validations, so with a loss as target it is done
        only at both ends of the run.
        """
        if self.config.target is None or not self.done.batches:
            return True
        target, of_loss = parse_target(self.config.target)
        return not of_loss or loss <= target

    def _observe(self) -> None:
        """Let the workload's optimizers react to the epoch's validation, before the checkpoint with their state."""
        for optimizer in self._averaging:
            optimizer.observe(self.done.loss)

    @property
    def _averaging(self) -> list[AveragingOptimizer]:
        inner = [getattr(optimizer, "inner", optimizer) for optimizer in self.pipeline.optimizers]
        return [optimizer for optimizer in inner if isinstance(optimizer, AveragingOptimizer)]

    def _of_ranks(self) -> tuple[int, list[int]]:
        """Return how many updates were skipped since the run began or was resumed, and the ranks' peaks of memory."""
        own = self._skipped + self.pipeline.skipped_updates, peak_memory_bytes(self.pipeline.device)
        skipped, peaks = zip(*self._world.gather(own))
        # Every rank with a stage of a pipeline counts the skipped updates of that pipeline.
        apart = self.plan.pipelines if self.plan.spread and self._world.size > 1 else 1
        return sum(skipped) * apart // self._world.size, list(peaks)

    def _since_last_validation(self) -> dict[str, Any]:
        """Return speed and busy shares since the last validation; nothing if there was no batch."""
        done, (before, first) = self.done, self._validated_at
        self._validated_at = replace(done), self._steps()
        if done.batches == before.batches:
            return {}
        seconds = done.seconds - before.seconds
        return {
            "samples_per_second": (done.samples - before.samples) / seconds if seconds > 0 else None,
            "worker_busy_fraction": [round(share, 4) for share in self.pipeline.busy_fractions(first)],
        }

    def _lr(self) -> float | None:
        """Return the next update's learning rate in the first optimizer's first group; None if it is no number."""
        optimizer = next(iter(self.pipeline.optimizers), None)
        lr = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        return lr if isinstance(lr, float | int) else None

    # ---- rebalancing -------------------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        """Continue from the checkpoint with another cut, if batches take less time with it."""
        layers = self._profiled()
        if layers is None or self._unsaved is not None:
            return
        plan, chosen, bounds = self.plan, self.pipeline.advance, self.pipeline.bounds
        schedule = (plan if chosen is None else replace(plan, advance=chosen.advance)).build_schedule()
        costs = self.pipeline.measured_costs()
        found = rebalanced(layers, bounds, costs, schedule, plan.pipelines, plan.weights or "flush")
        if found is None or found.gain < _LEAST_GAIN:
            return
        before, after = (", ".join(map(str, firsts)) for firsts in (bounds[1:-1], found.boundaries))
        self.record.note(
            f"rebalanced: stages now begin with layers {after} instead of {before}; batches should take "
            f"{100 * found.gain:.0f} % less time"
        )
        self._skipped += self.pipeline.skipped_updates
        self.pipeline.close()
        self.plan = replace(plan, partition=found.boundaries)
        self.config = replace(self.config, partition=found.boundaries)
        self.pipeline = self._make_pipeline()
        self._world = self.pipeline.world
        if self._is_to_end:
            self.pipeline.preempt()
        self._checkpoints = self._make_checkpoints()
        self._checkpoints.load()
        assert isinstance(self.record, WrittenRecord), "isolated pipelines keep their cut"
        self.record.folder.note_plan(self.config, self.plan)

    def _profiled(self) -> Profile | None:
        """Return the profile of the layers, measured once, on the first worker, which needs some seconds.

        None if it cannot be measured.
        """
        if self._profile is None:
            text = self._profile_here() if self._world.rank == 0 else ""
            self._profile = self._world.gather(text)[0]
        return Profile.from_json(self._profile) if self._profile else None

    def _profile_here(self) -> str:
        workload = self.workload
        try:
            inputs, target = typical_batch(workload)
            return profile(
                workload.layers,
                inputs,
                target=target,
                micro_batch_sizes=[max(1, workload.batch_size // self.plan.micro_batches)],
                threads=torch.get_num_threads(),
                budget_s=_PROFILE_S,
                layers_only=True,
                **profile_options(self.config, workload),
            ).to_json()
        except (ValueError, TypeError, RuntimeError) as error:
            self.record.note(
                f"warning: stages are not rebalanced, as their layers cannot be measured: {error}"
            )
            return ""

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, wait: bool = False) -> None:
        """Save a checkpoint. A full disk does not end a run.

        Weights that are not finite do end it, as they would stay so.
        """
        best, self._is_best = self._is_best, False
        wait = wait or self.config.wait_for_checkpoints
        self._failure_of(self.pipeline.wait_for_save)  # of the save before
        self._unsaved = self._failure_of(lambda: self._checkpoints.save(best=best, wait=wait))

    def _wait_for_save(self) -> None:
        self._unsaved = self._failure_of(self.pipeline.wait_for_save) or self._unsaved

    def _failure_of(self, action: Callable[[], None]) -> CheckpointError | None:
        try:
            action()
        except NotFinite as error:
            self._end_all(error)
            raise
        except CheckpointError as error:
            self.record.note(f"warning: {error}; training continues, and tries again at its next checkpoint")
            return error
        return None

    def _position(self) -> tuple[int, int]:
        """Return the epoch and the first batch to continue with.

        With another number of pipelines or batch size, this is where about as many samples of the epoch have
        been used; if pipelines train on batches in turn, batch j of an epoch is for pipeline j % N, as the
        pipeline keeps counting.
        """
        done, n = self.done, self.plan.batches_per_round
        start = -(-done.epoch_samples // self.workload.batch_size)
        start += (done.batches - start) % n
        if start >= len(self.workload.train_batches(done.epoch)):
            return done.epoch + 1, done.batches % n
        return done.epoch, start

    def _left(self) -> int:
        limit = self.config.max_batches
        return max(0, limit - self.done.batches) if limit is not None else _ENDLESS

    # ---- notes and files ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open = True
        self.record.open(self.plan)

    def _what(self) -> str:
        title = self.workload.title
        return self.workload.label + (f" ({title})" if title else "")

    def _title(self) -> str:
        config, plan, workload = self.config, self.plan, self.workload
        action = f"resumes after batch {self.done.batches}" if config.resume else "begins"
        sizes = f"stages {plan.stages}, pipelines {plan.pipelines}, micro-batches {plan.micro_batches}"
        return (
            f"{self._what()} {action}: {plan.system}, {plan.schedule}; {sizes}, batch size {workload.batch_size}; "
            f"{config.device}; writes {self.out}"
        )

    def _finish(self) -> None:
        """Write summary, trace and picture of the run."""
        timeline = self.pipeline.timeline()
        skipped, peaks = self._of_ranks()
        if self._world.rank != 0:
            return
        longest = unbroken(timeline, self._stretches)
        summary = self._summary(longest) | {"peak_memory_bytes": peaks, "skipped_updates": skipped}
        if self.record.finish(summary, self._what()) and timeline.events:
            timeline.to_chrome_trace(self.out / "timeline.json")
            longest.plot(self.out / "timeline.png")

    def _summary(self, timeline: Timeline) -> dict[str, Any]:
        """Return the content of summary.json; times are of training, without validations and checkpoints."""
        config, plan, done, workload = self.config, self.plan, self.done, self.workload
        chosen = self.pipeline.advance  # the choice of advance="auto"
        layers = workload.layers
        whole = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
        epoch = self._epoch_samples or len(workload.train_batches(done.epoch)) * workload.batch_size
        share = min(1.0, done.epoch_samples / epoch) if epoch else math.nan
        versions = {"avgpipe": __version__, "torch": torch.__version__, "python": platform.python_version()}
        of_plan = ("system", "stages", "pipelines", "micro_batches", "schedule")
        of_workload = ("preset", "batch_size", "metric_name", "lower_is_better", "title")
        return {
            **{name: getattr(config, name) for name in ("workload", "seed", "target")},
            **{name: getattr(plan, name) for name in of_plan},
            **{name: getattr(workload, name) for name in of_workload},
            **{name: getattr(done, name) for name in ("batches", "metric")},
            **done.figures(),
            **{name: getattr(timeline, name) for name in ("worker_busy_fraction", "bubble_fraction")},
            "advance": plan.advance if chosen is None else chosen.advance,
            "epochs": round(done.epoch + share, 4),
            "best_metric": done.best,
            "trivial_metric": workload.trivial[1] if workload.trivial else None,
            "parameters": sum(p.numel() for p in whole.parameters()),
            "versions": versions,
            "warnings": self._warnings,
        }


@dataclass(frozen=True)
class TrainingSegment:
    """Batches that are trained without a pause; an isolated pipeline that joins within them needs these values.

    Attributes:
        epoch: Epoch of the batches.
        start: Number of batches of the epoch before them.
        first: Number of the first batch.
        count: Number of batches; fewer are trained if the epoch ends earlier.
        validates: Whether a validation follows.
        checkpoints: State, before these batches, of when the next checkpoint is due.
    """

    epoch: int
    start: int
    first: int
    count: int
    validates: bool
    checkpoints: dict[str, Any]

    def place(self, batch: int) -> tuple[int, int]:
        """Return the epoch of a batch, and its index within the epoch."""
        return self.epoch, self.start + batch - self.first
