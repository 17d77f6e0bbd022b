"""The training loop of ``avgpipe train``: the same on every rank; only the first writes files and shows progress."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from avgpipe.checkpoint.agreement import NotFinite
from avgpipe.cli.checks import prepare
from avgpipe.cli.folder import RunFolder, Tally, note_validation, reaches, tally
from avgpipe.cli.log import LogNotes, links_line
from avgpipe.cli.pace import Pace
from avgpipe.cli.progress import Progress, Silent
from avgpipe.cli.settings import TrainSettings
from avgpipe.cli.summary import summarise, unbroken
from avgpipe.errors import CheckpointError
from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.runtime.memory import peak_memory_bytes
from avgpipe.workloads.workload import Workload


class TrainingRun:
    """A run from its first validation, or from its last checkpoint, to its summary.

    Making one builds the pipeline, loads the checkpoint or validates the initial weights, and then makes the run's
    folder: whatever the model refuses, it refuses before anything is written. Raises ValueError, TypeError, OSError or
    PipelineError.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.workload, self.plan = prepare(settings)
        with LogNotes() as log:
            self.pipeline = Pipeline(
                self.workload.layers,
                self.plan,
                loss_fn=self.workload.loss_fn,
                optimizer=self.workload.optimizer,
                lr_scheduler=self.workload.lr_scheduler,
                clip_grad_norm=self.workload.clip_grad_norm,
                skip_nonfinite=settings.skip_nonfinite,
                loss_weight=self.workload.loss_weight,
                autocast=_autocast(settings, self.workload),
                device=settings.device,
                seed=settings.seed,
                timeout_s=settings.timeout_s,
                link=settings.link,
                wire_dtype=None if settings.wire_dtype == "none" else getattr(torch, settings.wire_dtype),
            )
        self._world = self.pipeline.world
        first = self._world.rank == 0
        self.out = self._same_everywhere(settings.out)
        self.folder = RunFolder(self.out, writes=first)
        self.tally = Tally()
        self._epoch_batches = len(self.workload.train_batches(0))
        if settings.resume:
            self.pipeline.load(self.folder.checkpoints / "last")
            self._recall()
        self.progress = Progress(self._total(), self.tally.batches) if first else Silent()
        self.progress.note(self._title())
        if self.workload.trivial is not None:
            answer, score = self.workload.trivial
            self.progress.note(f"to beat: {answer}, {self.workload.metric_name} {score:.2f}")
        self._warnings = log.warnings
        for note in (*links_line(self._world.gather_texts(log.links)), *self._warnings):
            self.progress.note(note)
        self._saved_at = time.monotonic()
        self._unsaved: CheckpointError | None = None  # why the last checkpoint was not written
        self._stretches: list[tuple[int, int]] = []  # batches, first and last, without a pause between them
        self._resumed_at = self.tally.batches
        self.folder_is_open = False
        if settings.resume:
            self._open()
        else:
            self._validate()  # opens the folder once it has succeeded
            self._save()
            if self._unsaved is not None:  # before hours of training
                raise self._unsaved
        self._pace = Pace(settings.checkpoint_minutes * 60, self.plan.pipelines)

    def train(self) -> None:
        """Train to the end and write the summary."""
        epoch, start = self._position()
        while epoch < self.settings.epochs and self._left():
            self._train_epoch(epoch, start)
            self._validate()
            self._observe()
            self._save()
            if self.tally.batches and self._reached():
                self.progress.note(f"target {self.settings.target:g} reached")
                break
            epoch, start = epoch + 1, 0
        self.progress.close()
        if self.tally.batches > self._resumed_at or not (self.out / "summary.json").is_file():
            self._finish()
        self.folder.close()
        if self._unsaved is not None:
            raise self._unsaved

    def close(self) -> None:
        self.progress.close()
        self.pipeline.close()

    # ---- training --------------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int, start: int) -> None:
        batches = self.workload.train_batches(epoch, start)
        left = min(len(batches), self._left())
        source = iter(batches)
        if epoch != self.tally.epoch:
            self.tally.epoch, self.tally.epoch_samples = epoch, 0
        first = self.tally.batches
        while left > 0:
            count = min(left, self._pace.batches())
            self._train_batches(islice(source, count))
            left -= count
            if left > 0 and self._checkpoint_is_due(count):
                self._stretches.append((first, self.tally.batches - 1))
                self._save()
                first = self.tally.batches
        if self.tally.batches > first:
            self._stretches.append((first, self.tally.batches - 1))

    def _train_batches(self, batches: Iterator[tuple[object, object]]) -> None:
        done = self.tally
        clock = time.perf_counter()
        for result in self.pipeline.train(batches):
            now = time.perf_counter()
            done.batches += 1
            done.samples += result.samples
            done.epoch_samples += result.samples
            done.seconds += now - clock
            self.folder.row(
                "train",
                batch=result.batch,
                pipeline=result.pipeline,
                epoch=done.epoch,
                samples=done.samples,
                loss=result.loss,
                seconds=round(done.seconds, 6),
            )
            self.progress.batch(result.loss, result.samples, now - clock)
            clock = now

    def _validate(self) -> None:
        """Validate the reference weights, note what came out, and keep them if they are the best so far."""
        loss, metrics = self._evaluate()
        metric = metrics[self.workload.metric_name]
        if not self.folder_is_open:
            self._open()
        best = note_validation(
            self.tally,
            self.tally.batches,
            loss,
            metric,
            self.settings.target,
            self.workload.lower_is_better,
        )
        self.folder.row(
            "valid",
            epoch=self.tally.epoch,
            batch=self.tally.batches,
            loss=loss,
            metric=metric,
            metrics=metrics,
            seconds=round(self.tally.seconds, 6),
        )
        when = f"after {self.tally.batches} batches" if self.tally.batches else "before training"
        values = ", ".join(f"{name} {value:.2f}" for name, value in metrics.items())
        skipped = self._skipped_updates()
        left_out = f"; updates left out so far: {skipped}" if skipped else ""
        self.progress.note(f"validation {when}: {values}, loss {loss:.4f}{left_out}")
        if best:
            self._try_to_save("best")

    def _evaluate(self) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the reference's weights; once optimizers keep running means, of those of the first
        pipeline: replicas stay near their reference, and the mean evens out the rest.
        """
        self.pipeline.drain()  # nothing may be under way while the parameters hold something else
        batches = self.progress.validating(self.workload.valid_batches())
        with ExitStack() as swapped:
            weights: str | int = "reference"
            averaged = self.workload.averaged or (lambda _: None)
            for optimizer in self.pipeline.optimizers:
                mean = averaged(getattr(optimizer, "inner", optimizer))
                if mean is not None:
                    swapped.enter_context(mean)
                    weights = 0
            result = self.pipeline.evaluate(batches, self.workload.metric_fn, weights=weights)
            means = result.metric if isinstance(result.metric, dict) else {}
            found = self.workload.metrics(result.loss, means)
            if self.workload.decode is not None:
                found |= self.workload.decode(partial(self.pipeline.predict, weights=weights))
        return result.loss, found

    def _observe(self) -> None:
        """Let the workload's optimizers react to the validation, before the checkpoint that holds their state."""
        react = self.workload.after_validation
        if react is not None:
            for optimizer in self.pipeline.optimizers:
                react(getattr(optimizer, "inner", optimizer), self.tally.loss)

    def _skipped_updates(self) -> int:
        """Of all pipelines, by this run or what resumed it last; each is counted by every rank with a part in it."""
        own = torch.tensor([[self.pipeline.skipped_updates]], dtype=torch.float64)
        pipelines_apart = self.plan.pipelines if self.plan.spread and self._world.size > 1 else 1
        return int(self._world.gather_rows(own).sum()) * pipelines_apart // self._world.size

    def _save(self) -> None:
        self._unsaved = self._try_to_save("last")
        self._saved_at = time.monotonic()

    def _try_to_save(self, name: str) -> CheckpointError | None:
        """A disk that is full for a while costs no run. Weights that are not finite end it: they would stay so."""
        try:
            self.pipeline.save(self.folder.checkpoints / name)
        except NotFinite:
            raise
        except CheckpointError as error:
            self.progress.note(f"warning: {error}; training goes on, and tries again at its next checkpoint")
            return error
        return None

    def _checkpoint_is_due(self, batches: int) -> bool:
        """Whether the first rank's clock says so; a short agreement of all ranks."""
        elapsed = torch.tensor(time.monotonic() - self._saved_at, dtype=torch.float64)
        return self._pace.due(batches, float(self._world.broadcast(elapsed, 0)))

    def _title(self) -> str:
        s, p = self.settings, self.plan
        action = f"goes on after batch {self.tally.batches}" if s.resume else "begins"
        what = f"{s.workload} {s.preset}" + (f" ({self.workload.title})" if self.workload.title else "")
        return (
            f"{what} {action}: {p.system}, {p.schedule}; K = {p.stages} stages, "
            f"N = {p.pipelines} pipelines, M = {p.micro_batches} micro-batches of a batch of {s.batch_size}; "
            f"{s.device}; writes {self.out}"
        )

    def _left(self) -> int:
        limit = self.settings.max_batches
        return max(0, limit - self.tally.batches) if limit is not None else 1 << 62

    def _total(self) -> int:
        """Batches of the whole run; epochs of other lengths than the first one are not looked at."""
        total = self.settings.epochs * self._epoch_batches
        return min(total, self.settings.max_batches or total)

    def _reached(self) -> bool:
        target = self.settings.target
        return target is not None and reaches(self.tally.metric, target, self.workload.lower_is_better)

    # ---- resuming --------------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Read what the run had done on the first rank, and tell the others."""
        batches = self.pipeline.batches
        if self._world.rank == 0:
            rows = self.folder.cut(batches)
            self.tally = tally(rows, batches, self.settings.target, self.workload.lower_is_better)
        fields = asdict(self.tally)
        values = self._world.broadcast(torch.tensor(list(fields.values()), dtype=torch.float64), 0).tolist()
        self.tally = Tally(*(type(old)(new) for old, new in zip(fields.values(), values)))

    def _position(self) -> tuple[int, int]:
        """Epoch and first batch to go on with.

        With another number of pipelines or batch size, where about as many samples of the epoch have been used; batch j
        of an epoch is for pipeline j % N, as the pipeline counts on.
        """
        done, n = self.tally, self.plan.pipelines
        start = -(-done.epoch_samples // self.workload.batch_size)
        start += (done.batches - start) % n
        if start >= len(self.workload.train_batches(done.epoch)):
            return done.epoch + 1, done.batches % n
        return done.epoch, start

    # ---- the folder --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.folder.open(self.settings, self.plan)
        self.folder_is_open = True

    def _same_everywhere(self, text: str) -> Path:
        """The first rank's ``text``: workers started one by one may have named their folder at different times."""
        raw = text.encode()
        size = int(self._world.broadcast(torch.tensor(len(raw)), 0))
        buffer = torch.tensor(list(raw[:size].ljust(size)), dtype=torch.uint8)
        return Path(bytes(self._world.broadcast(buffer, 0).tolist()).decode())

    def _finish(self) -> None:
        """Write what the run came to: summary, trace and picture."""
        timeline = self.pipeline.timeline()
        peak = torch.tensor([[peak_memory_bytes(self.pipeline.device)]], dtype=torch.float64)
        peaks = [int(row[0]) for row in self._world.gather_rows(peak).tolist()]
        skipped = self._skipped_updates()
        if self._world.rank != 0:
            return
        longest = unbroken(timeline, self._stretches)
        epochs = self.tally.epoch + self._epoch_share()
        layers = self.workload.layers
        whole = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)
        parameters = sum(p.numel() for p in whole.parameters())
        self.folder.write(
            "summary.json",
            summarise(
                self.settings,
                self._plan_as_run(),
                self.tally,
                self.workload,
                epochs,
                parameters,
                peaks,
                longest,
                skipped,
                self._warnings,
            ),
        )
        if timeline.events:
            timeline.to_chrome_trace(self.out / "timeline.json")
            longest.plot(self.out / "timeline.png")

    def _plan_as_run(self) -> Plan:
        """With what ``advance="auto"`` came to."""
        chosen = self.pipeline.advance
        return self.plan if chosen is None else replace(self.plan, advance=list(chosen.advance))

    def _epoch_share(self) -> float:
        """How much of the current epoch is done, 0 to 1."""
        whole = len(self.workload.train_batches(self.tally.epoch)) * self.workload.batch_size
        return min(1.0, self.tally.epoch_samples / whole) if whole else math.nan


def _autocast(settings: TrainSettings, workload: Workload) -> torch.dtype | None:
    if settings.autocast == "auto":
        return workload.autocast.get(settings.device)
    dtypes: dict[str, torch.dtype | None] = {
        "none": None,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    return dtypes[settings.autocast]
