"""Saves one pipeline: at once, or from a snapshot by a thread while training continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from avgpipe.checkpoint.content import content_of
from avgpipe.checkpoint.folder import FolderLocks, agreed
from avgpipe.checkpoint.manifest import Manifest
from avgpipe.checkpoint.save import nothing_saved, refuse_nonfinite, save_checkpoint
from avgpipe.checkpoint.snapshot import Snapshot
from avgpipe.errors import CheckpointError, PipelineTimeout
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.ranks import environment as probe
from avgpipe.ranks.rendezvous import in_thread
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.worker import Worker

_NICE = 10  # gives it a tenth of a processor that others also use


class Writer:
    """Writes checkpoints of a pipeline, one at a time. Every rank calls its methods, in one order."""

    def __init__(self, model: Model, worker: Worker) -> None:
        self._model, self._worker = model, worker
        self._locks = FolderLocks()
        self._snapshot = Snapshot()
        self._world: World | None = None  # the ranks' threads
        self._writing: Future[None] | None = None

    def save(self, directory: Path, plan: Plan, batches: int, also: Sequence[Path] = ()) -> None:
        """Write the state of the pipeline after ``batches``, none of which is in flight."""
        self.wait()
        model, worker = self._model, self._worker
        checkpoint = self._checkpoint(directory, plan, batches, also)
        checkpoint.write(lambda: {n: content_of(model, worker, n) for n in worker.held}, worker.world)

    def begin(self, directory: Path, plan: Plan, batches: int, also: Sequence[Path] = ()) -> None:
        """Let a thread write a snapshot: see :meth:`Snapshot.begin`. :meth:`wait` reports the result."""
        self.wait()
        self._directory, world = directory, self._threads_world()
        checkpoint, snapshot = self._checkpoint(directory, plan, batches, also), self._snapshot

        def start() -> None:
            self._writing = in_thread(lambda: _giving_way(checkpoint.write)(snapshot.whole, world))

        snapshot.begin(self._model, self._worker, batches, start)

    @property
    def has_begun(self) -> bool:
        """Whether a snapshot was begun before; at the first, no batch may be in flight, as ranks connect."""
        return self._world is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the last snapshot is not copied yet."""
        return self._snapshot.is_under_way

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` returns at once. If not, no batch may be in flight then, as others need it."""
        return not self.is_under_way and (self._writing is None or self._writing.done())

    def _threads_world(self) -> World:
        if self._world is None:
            self._world = self._worker.world.beside()
        return self._world

    def _checkpoint(self, directory: Path, plan: Plan, batches: int, also: Sequence[Path]) -> _Checkpoint:
        place = {**self._worker.place, "batch": batches}
        probe.at("save", action="begin", **place)
        manifest = Manifest(asdict(plan), batches, self._model.bounds, self._model.signature(), [])
        return _Checkpoint(directory, also, manifest, place, self._locks, self._worker.placement)

    def settle(self) -> None:
        """Copy the rest of a snapshot that has begun; no batch is in flight."""
        self._snapshot.finish()

    def finish(self, limit_s: float) -> None:
        """Wait until the thread has written, or failed; :meth:`wait` reports a failure."""
        if self._writing is not None:
            try:
                self._writing.exception(limit_s)
            except Unanswered:
                raise PipelineTimeout(
                    f"rank {self._worker.world.rank} has waited {limit_s:g} s for its checkpoint to be written"
                ) from None

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise CheckpointError, once, if that failed."""
        self.finish(self._worker.world.timeout_s)
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self, patience_s: float) -> None:
        """Wait, no longer than ``patience_s``, and release the folders for others."""
        try:
            self.finish(patience_s)
            self.wait()
            if self.is_under_way:
                raise CheckpointError(
                    f"nothing was saved to {self._directory}: it was not copied before the end"
                )
        finally:
            self.release()

    def release(self) -> None:
        """Release the folders for others."""
        self._locks.release()


def _giving_way(write: Callable[..., None]) -> Callable[..., None]:
    """Return ``write`` for a thread of low priority, which uses processor time that training leaves."""

    def after(*arguments: Any) -> None:
        thread = threading.get_native_id()
        with suppress(OSError):  # a system without thread priorities
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        write(*arguments)

    return after


@dataclass(frozen=True)
class _Checkpoint:
    """What is to be written, except for its contents."""

    directory: Path
    also: Sequence[Path]
    manifest: Manifest
    place: Mapping[str, Any]
    locks: FolderLocks
    placement: Placement

    def write(self, find: Callable[[], dict[int, dict[str, Any]]], world: World) -> None:
        """Write what ``find`` returns here, with the other ranks; CheckpointError on all of them."""
        contents: dict[int, dict[str, Any]] = {}

        def look() -> None:
            contents.update(find())
            refuse_nonfinite(contents, self.placement)

        agreed(world, nothing_saved(self.directory), look)
        save_checkpoint(self.directory, contents, self.manifest, world, self.locks, self.place, self.also)
