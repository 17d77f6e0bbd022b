"""The record of a run: files and printed lines, of the first rank, or of isolated pipelines' launcher."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from avgpipe.checkpoint.folder import FolderLocks
from avgpipe.cli.config import TrainConfig
from avgpipe.cli.folder import RunFolder, number, rows_until
from avgpipe.cli.output import FAILED, CommandFailed, arguments, note
from avgpipe.cli.progress import ProgressBar
from avgpipe.fault.joining import ADDRESS
from avgpipe.fault.membership import Membership
from avgpipe.files import strict_json
from avgpipe.options import Copies
from avgpipe.plan import Plan
from avgpipe.report.course import Totals, read_metrics
from avgpipe.report.loggers import Loggers
from avgpipe.report.loop import Results
from avgpipe.report.pictures import Curve, plot_curves

_LATEST = 64  # rows, more than batches can be in flight


class Record(Results):
    """Receives the events of a rank's training loop, which this class ignores, as all but a first rank do."""

    def note(self, text: str) -> None:
        """Print a line that stays."""

    def open(self, plan: Plan) -> None:
        """Begin the files."""

    def segment(self, values: dict[str, Any]) -> None:
        """Begin batches without a pause; pipelines that join within them need the values."""

    def finish(self, summary: Mapping[str, Any], heading: str) -> bool:
        """Write the summary and draw the curves; return whether this process is to add the timeline."""
        return False

    def close(self) -> None:
        """Write what is left."""


class WrittenRecord(Record):
    """A record in the run's folder.

    Args:
        done: Totals of the run before this process.
        total: Batches of the whole run.
        rows: Of metrics.jsonl before this process; by default those of a resumed run.
    """

    def __init__(
        self, config: TrainConfig, done: Totals, total: int, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._config, self._begun = config, done.batches
        if rows is None:  # an attempt that saved nothing may have left some
            rows = rows_until(Path(config.out), done.batches) if config.resume else []
        self._rows = rows
        self.folder = RunFolder(Path(config.out))
        self.progress = ProgressBar(total, done.batches)
        self._loggers = Loggers({}, self.note)  # until the folder exists
        self._newest = done.batches - 1  # newest batch

    def note(self, text: str) -> None:
        self.progress.note(text)

    def open(self, plan: Plan) -> None:
        about, folder = self._config.complete, self.folder.path
        self._loggers = Loggers.opened(self._config.logger, folder, about, self._begun, self.note)
        self.folder.open(self._config, plan, self._rows)

    def batch(self, row: Mapping[str, Any], samples: int, seconds: float) -> None:
        is_new = row["batch"] > self._newest
        self._newest = max(self._newest, row["batch"])
        self._add("train", self._newest, row if is_new else {**row, "taken_over": True})
        self.progress.batch(row["loss"], samples, seconds, is_new)

    def validating(self, batches: Any, most: int | None) -> Iterator[Any]:
        return self.progress.validating(batches, most)

    def validation(self, row: Mapping[str, Any]) -> None:
        self._add("valid", row["batch"], row)
        when = f"after {row['batch']} batches" if row["batch"] else "before training"
        metrics = row["metrics"].items()
        values = "".join(f"{name} {number(value)}, " for name, value in metrics if name != "loss")
        skipped = row["skipped_updates"]
        note = f"; updates skipped so far: {skipped}" if skipped else ""
        self.note(f"validation {when}: {values}loss {row['loss']:.4f}{note}")

    def _add(self, kind: str, step: int, row: Mapping[str, Any]) -> None:
        """Add a row; loggers require steps that do not decrease."""
        self.folder.row(kind, **row)
        self._loggers.log(step, row, kind)

    def finish(self, summary: Mapping[str, Any], heading: str) -> bool:
        self.progress.close()
        self.folder.write("summary.json", strict_json(summary, indent=2) + "\n")
        curve = Curve.of(read_metrics(self.folder.path))
        what = summary["metric_name"], summary["trivial_metric"], summary["target"]
        plot_curves({summary["system"]: curve}, heading, *what, self.folder.path / "curves.png")
        return True

    def close(self) -> None:
        self.progress.close()
        self._loggers.close()
        self.folder.close()


# ---- replaced ranks --------------------------------------------------------------------------------------------------


class Standing(Copies):
    """Copies of the state by which a process that replaces another also learns where the others' loop is.

    Attributes:
        given: What they gave this process, if it replaces one; None before the first segment.
    """

    def __init__(self, every_s: float) -> None:
        super().__init__(every_s)
        self.given: dict[str, Any] | None = None
        self._segments: deque[dict[str, Any]] = deque(maxlen=_LATEST)
        self._rows: deque[dict[str, Any]] = deque(maxlen=_LATEST)

    def segment(self, values: dict[str, Any]) -> None:
        """Note the segment that begins."""
        # One clock for all processes of a host.
        self._segments.append({"segment": values, "begun_at": time.monotonic()})

    def row(self, row: Mapping[str, Any]) -> None:
        """Note the row of a batch, which the first rank may not have written when it is lost."""
        self._rows.append({"kind": "train", **row})

    def give(self, batches: int) -> dict[str, Any] | None:
        begun = [one for one in self._segments if one["segment"]["first"] <= batches]
        return {**begun[-1], "rows": [*self._rows]} if begun else None

    def take(self, given: dict[str, Any] | None) -> None:
        self.given = given
        if given is not None:
            self._segments.append({name: given[name] for name in ("segment", "begun_at")})

    def rows(self, folder: Path, batches: int) -> list[dict[str, Any]]:
        """Return the rows of the run's first ``batches`` batches, for a process that replaces another."""
        found = rows_until(folder, batches)
        newest = max((row["batch"] for row in found if row["kind"] == "train"), default=-1)
        missing = [] if self.given is None else self.given["rows"]
        return [*found, *(row for row in missing if newest < row["batch"] < batches)]


# ---- isolated pipelines ----------------------------------------------------------------------------------------------


class RemoteRecord(Record):
    """A record that the launcher keeps; the first rank of a pipeline sends it the events.

    All pipelines send the same events, and the launcher records each one once.
    """

    def __init__(self, launcher: Membership, done: Totals, total: int) -> None:
        self._launcher, self._results = launcher, 0  # batches of the run that have results
        launcher.tell("begin", asdict(done), total)

    def standing(self, results: int, batches: int) -> Any:
        """Return the state of a run that other pipelines train: totals, current segment and its age in seconds."""
        self._results = results
        return self._launcher.ask("standing", results, batches)

    def note(self, text: str) -> None:
        self._launcher.tell("note", self._results, text)

    def open(self, plan: Plan) -> None:
        self._launcher.tell("open", plan.to_json())

    def segment(self, values: dict[str, Any]) -> None:
        self._launcher.tell("segment", values)

    def batch(self, row: Mapping[str, Any], samples: int, seconds: float) -> None:
        self._launcher.tell("batch", self._results, dict(row), samples)
        self._results += 1

    def validation(self, row: Mapping[str, Any]) -> None:
        self._launcher.tell("validation", dict(row))

    def finish(self, summary: Mapping[str, Any], heading: str) -> bool:
        return bool(self._launcher.ask("finish", dict(summary), heading))


class SharedRecord:
    """Keeps the record of a run of isolated pipelines, in the launcher, from the events that they send.

    Times are those at which events arrive: clocks of several hosts cannot be compared.

    Args:
        meeting: Folder where avgpipe join finds the address of this run.
    """

    def __init__(self, config: TrainConfig, meeting: Path) -> None:
        self._config, self._link, self._meeting = config, Path(config.out) / ADDRESS, meeting / ADDRESS
        self._locks = FolderLocks()
        self._written: WrittenRecord | None = None
        self._done = Totals(lower_is_better=False)
        self._taken = 0  # results of batches that pipelines have sent
        self._notes: set[tuple[int, str]] = set()
        self._segment: dict[str, Any] = {}
        self._segment_at = 0.0  # when it began, on the monotonic clock
        self._ended_at = 0.0  # when the last result arrived, or the pause after it ended
        self._waiting: list[tuple[int, int, Callable[[Any], None]]] = []
        self._ending: tuple[dict[str, Any], str] | None = None
        self._has_timeline = False  # a process has agreed to add it

    def say(self, text: str) -> None:
        """Print a line about the pipelines."""
        (note if self._written is None else self._written.note)(text)

    def close(self, history: Mapping[str, Any]) -> None:
        """Write what is left: if the run reached its end, the summary with the history of its pipelines."""
        if self._written is not None:
            if self._ending is not None:
                summary, heading = self._ending
                self._written.finish({**summary, **self._done.figures(), **history}, heading)
            self._written.close()
        if self._link.is_symlink() and self._link.readlink() == self._meeting:
            self._link.unlink()
        self._locks.release()

    # ---- events from pipelines ---------------------------------------------------------------------------------------

    def hear(self, kind: str, *values: Any) -> None:
        if kind == "begin":
            self._begin(*values)
        elif self._written is None:
            raise ValueError(f"{kind} before the run has begun")
        else:
            takers: dict[str, Callable[..., None]] = {"note": self._note, "open": self._open}
            takers |= {"batch": self._take_batch, "validation": self._take_validation}
            takers |= {"segment": self._take_segment}
            takers[kind](self._written, *values)
        self._answer_waiting()

    def _begin(self, done: dict[str, Any], total: int) -> None:
        if self._written is None:
            self._done = Totals(**done)
            self._written = WrittenRecord(self._config, self._done, total)

    def _take_segment(self, written: WrittenRecord, values: dict[str, Any]) -> None:
        if values["first"] > self._segment.get("first", -1):
            self._segment = values
            self._segment_at = self._ended_at = time.monotonic()

    def _note(self, written: WrittenRecord, place: int, text: str) -> None:
        if (place, text) not in self._notes:
            self._notes.add((place, text))
            written.note(text)

    def _open(self, written: WrittenRecord, plan: str) -> None:
        if not written.folder.is_open:
            with arguments():
                written.open(Plan.from_json(plan))
                # Held until the end of the run: avgpipe watch looks for this lock.
                with self._locks.saving(Path(self._config.out)):
                    self._link.unlink(missing_ok=True)
                    self._link.symlink_to(self._meeting)

    def _take_batch(self, written: WrittenRecord, place: int, row: dict[str, Any], samples: int) -> None:
        if place > self._taken:
            raise ValueError(f"result {place} arrived after result {self._taken - 1}")
        if place == self._taken:
            self._taken += 1
            now = time.monotonic()
            seconds, self._ended_at = now - self._ended_at, now
            row["seconds"] = round(self._done.seconds + seconds, 6)
            self._done.take({"kind": "train", **row})
            written.batch(row, samples, seconds)

    def _take_validation(self, written: WrittenRecord, row: dict[str, Any]) -> None:
        if row["batch"] > self._done.validated:
            row["seconds"] = round(self._done.seconds, 6)
            self._done.take({"kind": "valid", **row})
            written.validation(row)

    # ---- requests of pipelines ---------------------------------------------------------------------------------------

    def answer(self, reply: Callable[[Any], None], writes: bool, kind: str, *values: Any) -> None:
        if kind == "finish":
            reply(writes and not self._has_timeline)
            self._has_timeline |= writes
            self._ending = self._ending or (values[0], values[1])
        elif kind == "standing":
            self._waiting.append((values[0], values[1], reply))
            self._answer_waiting()
        elif kind == "fail":
            raise CommandFailed(values[0], FAILED)
        else:
            raise ValueError(f"unknown question {kind!r}")

    def _answer_waiting(self) -> None:
        """Reply to joining pipelines with the state of the run, once all results before it have arrived."""
        first, count = self._segment.get("first", 0), self._segment.get("count", -1)
        for waiting in list(self._waiting):
            results, batches, reply = waiting
            if results <= self._taken and first <= batches <= first + count:
                segment_s = time.monotonic() - self._segment_at
                reply({"done": asdict(self._done), "segment": self._segment, "segment_s": segment_s})
                self._waiting.remove(waiting)
