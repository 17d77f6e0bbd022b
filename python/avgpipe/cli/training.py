"""The run of ``avgpipe train``: the same on every rank; the first rank sends its events to the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from avgpipe.checkpoint.folder import NotFinite
from avgpipe.cli.config import TrainConfig
from avgpipe.cli.folder import rows_until
from avgpipe.cli.output import CommandFailed, arguments, note, running, say
from avgpipe.cli.progress import links_line, links_of, log_records, warnings_of
from avgpipe.cli.record import Record, RemoteRecord, Standing, WrittenRecord
from avgpipe.cli.resolve import pipeline_options, prepare
from avgpipe.errors import CheckpointError, PeerLost, PipelineError
from avgpipe.pipeline import Pipeline
from avgpipe.ranks.process import PEER_LOST
from avgpipe.ranks.signals import Answers, answering
from avgpipe.report.course import Course, Totals, target_text
from avgpipe.report.loop import ENDLESS, TrainingLoop, TrainingSegment, batches_of_run
from avgpipe.report.rows import of_all
from avgpipe.saving import Checkpoints
from avgpipe.tasks import Workload

_COPIES_S = 10.0  # of work are lost at most, about, where a rank is replaced


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
        lost = isinstance(failure.__cause__, PeerLost)
        (note if lost else say)(str(failure))  # of a lost rank the launcher says whether the run ends
        raise SystemExit(PEER_LOST if lost else failure.exit_code) from failure


class TrainingRun(TrainingLoop):
    """A run from its first validation, or from its last checkpoint, to its summary.

    Making one builds the pipeline, loads the checkpoint or validates the initial weights, and then makes the
    run's folder: an error of the model is raised before anything is written. Raises ValueError, TypeError,
    OSError or PipelineError.

    Args:
        config: A complete configuration.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        workload, plan = prepare(config)
        options = pipeline_options(config, workload)
        self._standing = None if config.spares is None else Standing(_COPIES_S)
        if self._standing is not None:
            options["extensions"].append(self._standing)
        with log_records() as logged:
            pipeline = Pipeline(workload.layers, plan, **options)
        launcher, replaces_one = pipeline.launcher, pipeline.batches > 0
        joins_late = replaces_one or (launcher is not None and launcher.has_begun)
        # Workers that were started one by one may have chosen the name of their folder at different times.
        self.out = Path(config.out if replaces_one else of_all(pipeline, "folder", config.out)[0])
        every_s = 60 * config.checkpoint_minutes
        self._checkpoints = Checkpoints(pipeline, self.out / "checkpoints", every_s=every_s, keep=config.keep)
        done = Totals(workload.lower_is_better, config.target)
        if config.resume and not joins_late:
            self._checkpoints.load()
            done = _recalled(done, pipeline, self.out)
        rows = None
        if self._standing is not None and replaces_one:
            rows = self._standing.rows(self.out, pipeline.batches)
            _take_rows(done, rows, pipeline.batches)
        course = Course.of(config)
        self.record = _record(config, pipeline, done, batches_of_run(workload, course), rows)
        super().__init__(pipeline, workload, course, self.record, done, warnings_of(logged))
        self._saver = Saver(pipeline, self._checkpoints, self.record, config.wait_for_checkpoints)
        self._resumed_at = done.batches
        if replaces_one:
            self.record.open(pipeline.plan)
            return
        links = links_line(of_all(pipeline, "links", links_of(logged)))
        if not joins_late:
            self._begin([*links, *warnings_of(logged)])

    def _begin(self, notes: list[str]) -> None:
        """Describe the run, validate the initial weights, and open the record once that has succeeded."""
        self.record.note(self._title())
        if self.workload.trivial is not None:
            answer, score = self.workload.trivial
            self.record.note(f"baseline: {answer}, {self.workload.metric_name} {score:.2f}")
        for text in notes:
            self.record.note(text)
        if self.config.resume:
            self.record.open(self.pipeline.plan)
            return
        found = None if self.workload.valid_batches is None else self.evaluate()
        self.record.open(self.pipeline.plan)
        if found is not None:
            self.note_validation(*found)
        self._saver.save(wait=True)
        if self._saver.failure is not None:  # before hours of training
            raise self._saver.failure

    def train(self) -> bool:
        """Train to the end and write the summary, or until the run is preempted, and save; return whether it ended."""
        rest = self._catch_up()
        if rest is None:
            epoch, start = _position(self.done, self.workload, self.pipeline)
        else:
            epoch, start = rest.place(self.pipeline.batches)
        is_preempted = False
        while (rest or self.goes_on(epoch)) and not is_preempted:
            is_preempted = not self.train_epoch(epoch, start, rest)
            self._saver.save(wait=is_preempted)
            epoch, start, rest = epoch + 1, 0, None
        self._saver.wait()
        if self.config.target is not None and self.done.reached:
            self.record.note(f"target {target_text(self.config.target)} reached")
        has_news = self.done.batches > self._resumed_at or not (self.out / "summary.json").is_file()
        if has_news and not is_preempted:
            self._finish()
        self.record.close()
        self._saver.raise_failure()
        return not is_preempted

    def preempt(self) -> None:
        """End the run once it is saved."""
        self.pipeline.preempt()

    def close(self) -> None:
        self.record.close()
        self.pipeline.close()

    # ---- segments ----------------------------------------------------------------------------------------------------

    def begin_segment(self, epoch: int, start: int, left: int, most: int = ENDLESS) -> TrainingSegment:
        segment = super().begin_segment(epoch, start, left, min(most, self._checkpoints.batches_to_agreement))
        segment = replace(segment, checkpoints=self._checkpoints.standing())
        self.record.segment(asdict(segment))
        if self._standing is not None:
            self._standing.segment(asdict(segment))
        return segment

    def note_row(self, row: Mapping[str, Any]) -> None:
        if self._standing is not None:
            self._standing.row(row)

    def is_save_due(self, segment: TrainingSegment) -> bool:
        return self._checkpoints.due(segment.count)

    def segment_ended(self, saves: bool) -> None:
        if saves or self._saver.is_best:
            self._saver.save()

    def note_validation(self, loss: float, metrics: Mapping[str, float]) -> bool:
        is_best = super().note_validation(loss, metrics)
        if is_best:
            self._saver.is_best = True
        return is_best

    def _catch_up(self) -> TrainingSegment | None:
        """Enter the run; if others already train, return the segment that they are in."""
        if self._standing is not None:
            return self._segment_of(self._standing.given)
        results, batches, launcher = self.pipeline.enter(), self.pipeline.batches, self.pipeline.launcher
        if launcher is None or not launcher.is_late:
            return None
        sent = self.record.standing(results, batches) if isinstance(self.record, RemoteRecord) else None
        standing = self.pipeline.world.gather(sent)[0]
        segment = TrainingSegment(**standing["segment"])
        self.done = replace(Totals(**standing["done"]), batches=batches)
        self._checkpoints.go_on(segment.checkpoints, standing["segment_s"])
        self.rows.go_on(self.done, self.steps())
        return segment

    def _segment_of(self, given: Mapping[str, Any] | None) -> TrainingSegment | None:
        """Return the segment that the other ranks are in, for a process that replaces one."""
        if given is None or not self.pipeline.batches:
            return None
        segment = TrainingSegment(**given["segment"])
        self._checkpoints.go_on(segment.checkpoints, time.monotonic() - given["begun_at"])
        return segment

    # ---- what is printed and written ---------------------------------------------------------------------------------

    def _what(self) -> str:
        title = self.workload.title
        return self.workload.label + (f" ({title})" if title else "")

    def _title(self) -> str:
        config, plan, workload = self.config, self.pipeline.plan, self.workload
        action = f"resumes after batch {self.done.batches}" if config.resume else "begins"
        sizes = f"stages {plan.stages}, pipelines {plan.pipelines}, micro-batches {plan.micro_batches}"
        return (
            f"{self._what()} {action}: {plan.system}, {plan.schedule}; {sizes}, batch size {workload.batch_size}; "
            f"{config.device}; writes {self.out}"
        )

    def _finish(self) -> None:
        """Write summary, trace and picture of the run."""
        about = {name: getattr(self.config, name) for name in ("workload", "seed")}
        found = self.rows.summary(self.pipeline, self.done, **about)
        if found is None:
            return
        summary, timeline, longest = found
        if self.record.finish(summary, self._what()) and timeline.events:
            timeline.to_chrome_trace(self.out / "timeline.json")
            longest.plot(self.out / "timeline.png")


def _recalled(done: Totals, pipeline: Pipeline, out: Path) -> Totals:
    """Return the totals up to the checkpoint that was loaded, from the run's folder on the first rank."""
    if pipeline.world.rank == 0:
        for row in rows_until(out, pipeline.batches):
            done.take(row)
        done.batches = pipeline.batches
    return Totals(**of_all(pipeline, "totals", asdict(done))[0])


def _take_rows(done: Totals, rows: Iterable[Mapping[str, Any]], batches: int) -> None:
    """Add the rows of a run's first ``batches`` batches; PipelineError if some are missing."""
    for row in rows:
        done.take(row)
    if done.batches != batches:
        raise PipelineError(
            f"this process replaces one after {batches} batches, and metrics.jsonl has {done.batches} of them: resume "
            "from the last checkpoint"
        )


def _position(done: Totals, workload: Workload, pipeline: Pipeline) -> tuple[int, int]:
    """Return the epoch and the first batch to continue with.

    With another number of pipelines or batch size, this is where about as many samples of the epoch have been used; if
    pipelines train on batches in turn, batch j of an epoch is for pipeline j % N, as the pipeline keeps counting.
    """
    n = pipeline.plan.batches_per_round
    start = -(-done.epoch_samples // workload.batch_size)
    start += (done.batches - start) % n
    if start >= len(workload.train_batches(done.epoch)):
        return done.epoch + 1, done.batches % n
    return done.epoch, start


def _record(
    config: TrainConfig,
    pipeline: Pipeline,
    done: Totals,
    total: int,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> Record:
    if pipeline.world.rank:
        return Record()
    if pipeline.launcher is not None:
        return RemoteRecord(pipeline.launcher, done, total)
    return WrittenRecord(config, done, total, rows)


class Saver:
    """Saves the checkpoints of a run. A full disk does not end it; weights that are not finite do, as they stay so.

    Args:
        waits: Whether training always waits for a checkpoint to be written.

    Attributes:
        is_best: Whether the next checkpoint is of the best weights so far.
        failure: Why the last checkpoint was not written.
    """

    def __init__(self, pipeline: Pipeline, checkpoints: Checkpoints, record: Record, waits: bool) -> None:
        self._pipeline, self._checkpoints, self._record, self._waits = pipeline, checkpoints, record, waits
        self.is_best = False
        self.failure: CheckpointError | None = None

    def save(self, wait: bool = False) -> None:
        best, self.is_best = self.is_best, False
        wait = wait or self._waits
        self._failure_of(self._pipeline.wait_for_save)  # of the save before
        self.failure = self._failure_of(lambda: self._checkpoints.save(best=best, wait=wait))

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self.failure = self._failure_of(self._pipeline.wait_for_save) or self.failure

    def raise_failure(self) -> None:
        """Raise the error of the last checkpoint, if it was not written, for the whole run."""
        if self.failure is not None:
            self._end_all(self.failure)
            raise self.failure

    def _failure_of(self, action: Callable[[], None]) -> CheckpointError | None:
        try:
            action()
        except NotFinite as error:
            self._end_all(error)
            raise
        except CheckpointError as error:
            self._record.note(f"warning: {error}; training continues, and tries again at its next checkpoint")
            return error
        return None

    def _end_all(self, failure: Exception) -> None:
        """Have the launcher of isolated pipelines end the run, as no pipeline could continue."""
        if self._pipeline.launcher is not None:
            self._pipeline.launcher.ask("fail", str(failure))
