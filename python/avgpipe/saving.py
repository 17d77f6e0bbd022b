"""When a training loop saves, and which checkpoints it keeps."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from avgpipe.checkpoint.manifest import BEST, LAST, checkpoints_in, delete_old, kept_name
from avgpipe.errors import CheckpointError, check_count
from avgpipe.pipeline import Pipeline

_log = logging.getLogger("avgpipe")


class Checkpoints:
    """The checkpoints of a training loop. Every rank calls its methods, in one order.

    The newest is the folder ``last``; with ``keep`` above 1 the newest ones are also ``batch-N``, and the one
    saved with ``best=True`` is ``best``. Each loads by itself, and files that several share exist once::

        checkpoints = avgpipe.Checkpoints(pipeline, "run", every_s=60, keep=3)
        checkpoints.load()
        for result in pipeline.train(batches_from(pipeline.batches)):
            if checkpoints.due():
                checkpoints.save(wait=False)

    Args:
        folder: for the folders of the checkpoints.
        every_s: about the seconds between two; :meth:`due` decides.
        keep: how many of the newest are kept, ``last`` included.
    """

    def __init__(
        self, pipeline: Pipeline, folder: str | Path, *, every_s: float = 600.0, keep: int = 1
    ) -> None:
        check_count("keep", keep)
        if not every_s > 0:
            raise ValueError(f"every_s must be positive, not {every_s}")
        self._pipeline, self._folder, self._keep = pipeline, Path(folder), keep
        self._pace = Timetable(every_s, pipeline.plan.batches_per_round)
        self._batches = 0  # since the ranks agreed last
        self._saved_at = time.monotonic()
        self._source: str | None = None  # the one loaded instead of newer ones, until another is written
        self._has_saved = False  # since that load
        self._shares_state = False  # whether processes that join get standing()

    @property
    def batches_to_agreement(self) -> int:
        """The number of further batches until :meth:`due` may return True."""
        return max(1, self._pace.batches() - self._batches)

    def due(self, batches: int = 1) -> bool:
        """Whether to save now, on all ranks alike, after ``batches`` more batches; ranks seldom agree on it.

        ValueError with ``Copies`` and ``isolate``: a process that joins later does not know when they
        last did.
        """
        may_join_later = self._pipeline.has_copies or self._pipeline.plan.isolate
        if may_join_later and not self._shares_state:
            raise ValueError(
                "due() reads a clock, and a process that joins later does not know since when: with Copies or "
                "isolate=True save by the number of a batch, as if result.batch % 1000 == 999"
            )
        self._batches += batches
        if self._batches < self._pace.batches():
            return False
        batches, self._batches = self._batches, 0
        elapsed_s = self._pipeline.once(
            "seconds since a checkpoint", lambda: time.monotonic() - self._saved_at
        )
        return self._pace.due(batches, float(elapsed_s))

    def standing(self) -> dict[str, Any]:
        """Return the state of :meth:`due`, for JSON, for processes that join."""
        self._shares_state = True
        elapsed_s = time.monotonic() - self._saved_at
        return {"pace": asdict(self._pace), "batches": self._batches, "elapsed_s": elapsed_s}

    def go_on(self, standing: dict[str, Any], ago_s: float) -> None:
        """Make :meth:`due` agree with processes that had the state ``standing`` ``ago_s`` seconds ago."""
        self._shares_state = True
        self._pace, self._batches = Timetable(**standing["pace"]), standing["batches"]
        self._saved_at = time.monotonic() - standing["elapsed_s"] - ago_s

    def save(self, *, best: bool = False, wait: bool = True) -> None:
        """Save, as the pipeline's ``save`` does, and delete the checkpoints that are not kept.

        Raises:
            CheckpointError: as in the pipeline's ``save``. If a save without ``wait`` has failed, the next
                save or the pipeline's ``wait_for_save`` raises it; that save is written nevertheless.
        """
        self._saved_at, failure = time.monotonic(), None
        self._pace.saved()
        try:
            self._pipeline.wait_for_save()
        except CheckpointError as error:
            failure = error
        else:
            self._source = None if self._has_saved else self._source
        name = kept_name(self._pipeline.batches)
        self._pipeline.once("old checkpoints are deleted", lambda: self._delete_old(name))
        also = [BEST] * best + [name] * (self._keep > 1)
        folders = [self._folder / name for name in also]
        self._pipeline.save(self._folder / LAST, wait=wait, also=folders)
        self._has_saved = True
        if failure is not None:
            raise failure

    def _delete_old(self, following: str) -> None:
        if self._pipeline.world.rank == 0:
            delete_old(self._folder, self._keep - 1, following, self._source)

    def load(self) -> bool:
        """Resume from the newest checkpoint that loads; False if there is none.

        CheckpointError, that of the newest, if none of them loads.
        """
        paths = self._pipeline.once(
            "checkpoints there", lambda: [str(path) for path in checkpoints_in(self._folder)]
        )
        failures: list[CheckpointError] = []
        for path in paths:
            try:
                self._pipeline.load(path)
            except CheckpointError as error:
                failures.append(error)
            else:
                self._note_loaded(Path(path).name if failures else None)
                if failures and self._pipeline.world.rank == 0:
                    _log.warning("%s; %s is loaded instead", failures[0], path)
                return True
        if failures:
            raise failures[0]
        return False

    def _note_loaded(self, source: str | None) -> None:
        """Note the checkpoint loaded instead of newer ones, also for pipelines that join, which load none."""
        self._source = self._pipeline.once("checkpoint in place of newer ones", lambda: source)
        self._has_saved = False


@dataclass
class Timetable:
    """When the ranks agree on whether a checkpoint is due: seldom, since each time their pipelines run empty.

    The segments between agreements double in length at first; later they last as long as the checkpoint interval.
    Everything follows from numbers that are the same on all ranks, so all make the same decisions.

    Attributes:
        interval_s: between two checkpoints.
        per_round: batches from which every pipeline makes an update.
        rounds: of the next segment.
        since_save: batches since the last checkpoint.
    """

    interval_s: float
    per_round: int
    rounds: int = 4
    since_save: int = 0

    def batches(self) -> int:
        """Batches of the next segment."""
        return self.rounds * self.per_round

    def due(self, batches: int, elapsed_s: float) -> bool:
        """Whether to save now, after a segment of ``batches``, ``elapsed_s`` after the last checkpoint was saved."""
        self.since_save += batches
        per_round_s = elapsed_s * self.per_round / self.since_save
        save = elapsed_s >= self.interval_s
        left_s = self.interval_s if save else self.interval_s - elapsed_s
        longest = left_s / per_round_s if per_round_s > 0 else 2.0 * self.rounds
        self.rounds = max(1, min(2 * self.rounds, int(longest) + 1))
        if save:
            self.saved()
        return save

    def saved(self) -> None:
        """Record that a checkpoint was saved."""
        self.since_save = 0
