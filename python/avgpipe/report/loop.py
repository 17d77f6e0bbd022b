"""The training loop over epochs and segments between validations, until the end of a run or its target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from avgpipe.pipeline import Pipeline
from avgpipe.report.course import Course, Totals, Validations, parse_target
from avgpipe.report.rows import RowMaker
from avgpipe.runtime.evaluate import EvaluationResult
from avgpipe.tasks import AveragingOptimizer, Workload

ENDLESS = 1 << 62  # batches


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
    checkpoints: dict[str, Any] = field(default_factory=dict)

    def place(self, batch: int) -> tuple[int, int]:
        """Return the epoch of a batch, and its index within the epoch."""
        return self.epoch, self.start + batch - self.first


class Results:
    """Receives the results of a training loop, which this class ignores."""

    def batch(self, row: Mapping[str, Any], samples: int, seconds: float) -> None:
        """Record a finished batch: its row, its samples, and the seconds of training since the batch before."""

    def validating(self, batches: Iterable[Any], most: int | None) -> Iterator[Any]:
        """Return the batches, or the first ``most`` of them."""
        return islice(batches, most)

    def validation(self, row: Mapping[str, Any]) -> None:
        """Record a finished validation."""


def batches_of_run(workload: Workload, course: Course) -> int:
    """Return the batches of the whole run, assuming that all epochs have the length of the first one."""
    total = workload.epochs * len(workload.train_batches(0))
    return min(total, course.max_batches or total)


class TrainingLoop:
    """Trains a workload on a pipeline, and validates it; the same on every rank.

    A subclass overrides what happens between segments, such as checkpoints.

    Args:
        done: Totals of the run before this process.
        warnings: Warnings that the run's rows and summary name.

    Attributes:
        done: Totals of the run so far.
        rows: Makes the rows of the results.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        workload: Workload,
        course: Course,
        results: Results,
        done: Totals,
        warnings: Sequence[str] = (),
    ) -> None:
        self.pipeline, self.workload, self.course, self.done = pipeline, workload, course, done
        self._results = results
        total, size = batches_of_run(workload, course), workload.batch_size
        validations = 1 if workload.valid_batches is None else course.validations  # the one at the end
        self._validations = Validations(total * size, validations, pipeline.plan.batches_per_round * size)
        self.rows = RowMaker(workload, total, warnings, done, self.steps())

    def train(self) -> bool:
        """Validate, and train all epochs; return whether the run ended, else it was preempted."""
        self.validate()
        epoch = 0
        while self.goes_on(epoch) and self.train_epoch(epoch, 0):
            epoch += 1
        return not self.pipeline.preempted

    def goes_on(self, epoch: int) -> bool:
        return epoch < self.workload.epochs and self._left() > 0 and not self.done.reached

    def train_epoch(self, epoch: int, start: int, rest: TrainingSegment | None = None) -> bool:
        """Train an epoch from batch ``start`` on; ``rest``: the segment that others have begun there.

        Return whether the epoch, or the run, is at its end; else it was preempted.
        """
        batches = self.workload.train_batches(epoch, start)
        left = min(len(batches), self._left())
        source = iter(batches)
        self.done.enter(epoch)
        first = self.steps()
        while rest or (left > 0 and not self.done.reached and not self.pipeline.preempted):
            segment, rest = rest or self.begin_segment(epoch, start, left), None
            count = segment.first + segment.count - self.pipeline.batches
            trained = self._train_batches(islice(source, count))
            left, start = left - trained, start + trained
            if trained < count and not self.pipeline.preempted:  # a loader without a length has ended
                left = 0
                self.rows.note_epoch(self.done.epoch_samples)
            ends = not left and (epoch + 1 == self.workload.epochs or not self._left())
            # Optimizers that observe the validation loss do so at each epoch's end.
            observes = not left and bool(averaging(self.pipeline))
            validates = (segment.validates and trained == count) or ends or observes
            saves = left > 0 and not self.pipeline.preempted and self.is_save_due(segment)
            if first < self.steps() and (validates or saves or not left):
                self.rows.note_stretch(first, self.steps() - 1)
                first = self.steps()
            if validates and self.done.validated < self.done.batches:
                self.validate(ends)
            if not left:  # before the checkpoint with the optimizers' states
                for optimizer in averaging(self.pipeline):
                    optimizer.observe(self.done.loss)
            if left:
                self.segment_ended(saves)
        return left <= 0 or self.done.reached

    def begin_segment(self, epoch: int, start: int, left: int, most: int = ENDLESS) -> TrainingSegment:
        """Return the next segment of an epoch with ``left`` batches from ``start`` on; ``most``: its most batches."""
        rounds = self._validations.rounds_to_next(self.done.samples)
        ahead = ENDLESS if rounds is None else rounds * self.pipeline.plan.batches_per_round
        count = min(left, ahead, most)
        return TrainingSegment(epoch, start, self.pipeline.batches, count, count == ahead)

    def is_save_due(self, segment: TrainingSegment) -> bool:
        """Return whether a checkpoint follows the segment."""
        return False

    def segment_ended(self, saves: bool) -> None:
        """Called after a segment, and its validation, that does not end its epoch; ``saves``: a checkpoint is due."""

    def note_row(self, row: Mapping[str, Any]) -> None:
        """Called with the row of each batch."""

    def steps(self) -> int:
        """Return how many batches have begun, as timelines count them; for isolated pipelines, steps of all."""
        launcher = self.pipeline.launcher
        return self.done.batches if launcher is None else launcher.begun

    def _left(self) -> int:
        limit = self.course.max_batches
        return max(0, limit - self.done.batches) if limit is not None else ENDLESS

    def _train_batches(self, batches: Iterator[tuple[object, object]]) -> int:
        """Train on the batches; return how many there were."""
        done, before = self.done, self.done.batches
        clock = time.perf_counter()
        for result in self.pipeline.train(self._until_preempted(batches)):
            now = time.perf_counter()
            done.note_batch(result.samples, now - clock)
            row = self.rows.batch(self.pipeline, result, done)
            self.note_row(row)
            self._results.batch(row, result.samples, now - clock)
            clock = now
        done.batches = self.pipeline.batches
        return done.batches - before

    def _until_preempted(self, batches: Iterator[tuple[object, object]]) -> Iterator[tuple[object, object]]:
        for batch in batches:
            yield batch
            if self.pipeline.preempted:
                return

    # ---- validations -------------------------------------------------------------------------------------------------

    def validate(self, ends: bool = False) -> None:
        """Validate the reference's weights, if there is held-out data, and record the results.

        ``ends``: whether this validation is the last one of the run.
        """
        if self.workload.valid_batches is not None:
            self.note_validation(*self.evaluate(ends))

    def note_validation(self, loss: float, metrics: Mapping[str, float]) -> bool:
        """Record the results of a validation; return whether the weights are the best so far."""
        done = self.done
        is_best = done.note_validation(done.batches, loss, metrics.get(self.workload.metric_name))
        self._results.validation(self.rows.validation(self.pipeline, done, metrics, self.steps()))
        return is_best

    def evaluate(self, ends: bool = False) -> tuple[float, dict[str, float]]:
        """Evaluate, and return the loss and the metrics.

        To translate or generate, too, may take as long as the training between two validations, so with a loss as
        target it is done only at both ends of the run.
        """
        workload, target, valid = self.workload, self.done.target, self.workload.valid_batches
        assert valid is not None
        value, of_loss = (None, False) if target is None else parse_target(target)
        decoded = value if of_loss and self.done.batches and not ends else None
        batches = _Reread(lambda: self._results.validating(valid(), self.course.valid_batches))
        return evaluate(self.pipeline, workload, batches, decoded)


@dataclass(frozen=True)
class _Reread:
    """Batches that are read again if a rank is replaced meanwhile."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def evaluate(
    pipeline: Pipeline, workload: Workload, batches: Iterable[Any], decoded: float | None = None
) -> tuple[float, dict[str, float]]:
    """Evaluate the reference's weights, or once optimizers keep running means, those of the first pipeline.

    Replicas stay near their reference, and the running mean averages out the rest.

    Args:
        pipeline: Pipeline that trains the workload.
        workload: Its metrics.
        batches: Batches to evaluate on.
        decoded: The greatest loss with which the workload also translates or generates; None: with any.
    """
    pipeline.drain()  # nothing may be in flight while the parameters hold something else
    with ExitStack() as swapped:
        weights: str | int = "reference"
        for optimizer in averaging(pipeline):
            if optimizer.triggered:
                swapped.enter_context(optimizer.averages())
                weights = 0 if pipeline.launcher is None else pipeline.launcher.pipeline
        with_weights = partial(pipeline.evaluate, batches, workload.metric_fn, weights=weights)
        if weights == "reference":
            result = with_weights()
        else:  # each isolated pipeline has running means, so one evaluates for all
            result = EvaluationResult(**pipeline.once("means", lambda: asdict(with_weights())))
        means = result.metric if isinstance(result.metric, dict) else {}
        found = workload.metrics(result.loss, means)
        if workload.decode is not None and (decoded is None or result.loss <= decoded):
            decode = partial(workload.decode, partial(pipeline.predict, weights=weights))
            found |= pipeline.once("decoding", decode)
    return result.loss, found


def averaging(pipeline: Pipeline) -> list[AveragingOptimizer]:
    """Return the pipeline's optimizers on this rank that average weights over steps."""
    inner = [getattr(optimizer, "inner", optimizer) for optimizer in pipeline.optimizers]
    return [optimizer for optimizer in inner if isinstance(optimizer, AveragingOptimizer)]
