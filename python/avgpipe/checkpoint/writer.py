"""Saving one pipeline: at once, or from a snapshot by a thread while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from avgpipe import faults
from avgpipe.checkpoint.content import content_of
from avgpipe.checkpoint.folder import FolderLocks, agreed
from avgpipe.checkpoint.manifest import Manifest
from avgpipe.checkpoint.save import nothing_saved, refuse_nonfinite, save_checkpoint
from avgpipe.checkpoint.snapshot import Snapshot
from avgpipe.errors import PipelineTimeout
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.ranks.rendezvous import in_thread
from avgpipe.ranks.world import World
from avgpipe.runtime.worker import Worker


class Writer:
    """Writes checkpoints of a pipeline, one at a time. Every rank calls its methods, in one order."""

    def __init__(self, model: Model, worker: Worker) -> None:
        self._model, self._worker = model, worker
        self._locks = FolderLocks()
        self._snapshot = Snapshot()
        self._world: World | None = None  # the ranks' threads
        self._writing: Future[None] | None = None

    def save(self, directory: Path, plan: Plan, batches: int, wait: bool, also: Sequence[Path] = ()) -> None:
        """Write what the pipeline holds after ``batches``, none of which is in flight.

        Without ``wait`` a thread writes it, and CheckpointError here is for weights alone.
        """
        self.wait()
        place = {**self._worker.place, "batch": batches}
        faults.at("save", action="begin", **place)
        model, worker, snapshot = self._model, self._worker, self._snapshot
        contents: dict[int, dict[str, Any]] = {}

        def look() -> None:
            if wait:
                contents.update({n: content_of(model, worker, n) for n in worker.held})
            else:
                snapshot.take(model, worker, batches)
                contents.update(snapshot.contents)
            refuse_nonfinite(contents, worker.placement)

        agreed(worker.world, nothing_saved(directory), look)
        manifest = Manifest(asdict(plan), batches, model.bounds, model.signature(), [])
        if wait:
            save_checkpoint(directory, contents, manifest, worker.world, self._locks, place, also)
            return
        if self._world is None:
            self._world = worker.world.beside()
        save = partial(save_checkpoint, directory, contents, manifest, self._world, self._locks, place, also)
        self._writing = in_thread(save)

    def finish(self, limit_s: float) -> None:
        """Wait until the thread has written, or failed, of which :meth:`wait` tells then."""
        if self._writing is not None:
            try:
                self._writing.exception(limit_s)
            except Unanswered:
                raise PipelineTimeout(
                    f"rank {self._worker.world.rank} has waited {limit_s:g} s for its checkpoint to be written"
                ) from None

    def wait(self) -> None:
        """Wait until what was saved last is there; CheckpointError, once, where it could not be written."""
        self.finish(self._worker.world.timeout_s)
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self, patience_s: float) -> None:
        """Wait, no longer than ``patience_s``, and let others save into the folders."""
        try:
            self.finish(patience_s)
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Let others save into the folders."""
        self._locks.release()
