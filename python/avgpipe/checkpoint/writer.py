"""Saving one pipeline: at once, or from a snapshot by a thread while training goes on."""

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
from avgpipe.ranks import probe
from avgpipe.ranks.rendezvous import in_thread
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.worker import Worker

_NICE = 10  # a tenth of a processor that others want, too


class Writer:
    """Writes checkpoints of a pipeline, one at a time. Every rank calls its methods, in one order."""

    def __init__(self, model: Model, worker: Worker) -> None:
        self._model, self._worker = model, worker
        self._locks = FolderLocks()
        self._snapshot = Snapshot()
        self._world: World | None = None  # the ranks' threads
        self._writing: Future[None] | None = None

    def save(self, directory: Path, plan: Plan, batches: int, also: Sequence[Path] = ()) -> None:
        """Write what the pipeline holds after ``batches``, none of which is in flight."""
        self.wait()
        model, worker = self._model, self._worker
        checkpoint = self._checkpoint(directory, plan, batches, also)
        checkpoint.write(lambda: {n: content_of(model, worker, n) for n in worker.held}, worker.world)

    def begin(self, directory: Path, plan: Plan, batches: int, also: Sequence[Path] = ()) -> None:
        """Have a thread write it, once it is copied: see :meth:`Snapshot.begin`. :meth:`wait` tells how that went."""
        self.wait()
        self._directory, world = directory, self._threads_world()
        checkpoint, snapshot = self._checkpoint(directory, plan, batches, also), self._snapshot

        def start() -> None:
            self._writing = in_thread(lambda: _giving_way(checkpoint.write)(snapshot.whole, world))

        snapshot.begin(self._model, self._worker, batches, start)

    @property
    def has_begun(self) -> bool:
        """Whether something was begun before; if not, no batch may be in flight at the first time, as ranks meet."""
        return self._world is not None

    @property
    def is_under_way(self) -> bool:
        """Whether what was begun last is not copied yet."""
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
        """Copy what has been begun and is not yet copied; no batch is in flight."""
        self._snapshot.finish()

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
            if self.is_under_way:
                raise CheckpointError(
                    f"nothing was saved to {self._directory}: it was not copied before the end"
                )
        finally:
            self.release()

    def release(self) -> None:
        """Let others save into the folders."""
        self._locks.release()


def _giving_way(write: Callable[..., None]) -> Callable[..., None]:
    """Return ``write`` for a thread that leaves the processor to others, so that it takes what training leaves."""

    def after(*arguments: Any) -> None:
        thread = threading.get_native_id()
        with suppress(OSError):  # a system where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
        write(*arguments)

    return after


@dataclass(frozen=True)
class _Checkpoint:
    """What is to be written, but for its contents."""

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
