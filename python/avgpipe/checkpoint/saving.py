"""Saves and loads the checkpoints of a session: at once, or from a snapshot by a thread while training continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from avgpipe.checkpoint import read_checkpoint, restore_checkpoint
from avgpipe.checkpoint.content import content_of
from avgpipe.checkpoint.folder import FolderLocks, NotFinite, agreed
from avgpipe.checkpoint.manifest import Manifest
from avgpipe.checkpoint.save import nothing_saved, refuse_nonfinite, save_checkpoint
from avgpipe.checkpoint.sharded import load_sharded_state, sharded_state
from avgpipe.checkpoint.snapshot import Snapshot, may_run
from avgpipe.errors import CheckpointError, PipelineTimeout
from avgpipe.plan import Plan
from avgpipe.ranks import environment as probe
from avgpipe.ranks.rendezvous import in_thread
from avgpipe.ranks.world import World
from avgpipe.runtime.session import Session

_NICE = 10  # gives the thread a tenth of a processor that others also use


class Saving:
    """Handles the checkpoints of a session, one at a time; made when the first one is saved or loaded.

    Every rank calls its methods, in one order. See ``Pipeline``.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._worker = session, session.worker
        self._locks = FolderLocks()
        self._snapshot = Snapshot()
        # The ranks' threads; made when no batch is in flight, as they connect.
        self._threads: World | None = None
        self._writing: Future[None] | None = None
        self._nothing_saved = ""  # the beginning of an error

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, folders: Sequence[Path], wait: bool) -> None:
        """Write a checkpoint to the first of the folders, and link it in the others."""
        session, plan = self._session, self._session.spec.plan
        _refuse_sharded(
            session,
            "save",
            "use torch.distributed.checkpoint.save(pipeline.sharded_state_dict(), checkpoint_id=folder)",
        )
        if session.policy.pipeline is not None:
            with session.idle(CheckpointError):
                alone = replace(plan, pipelines=1, isolate=False, rule=None, alpha=None)
                find = partial(self._try_to_save, folders, alone)
                found = session.policy.once(session, f"checkpoint {folders[0]}", find)
                if found is not None:
                    raise (NotFinite if found["is_not_finite"] else CheckpointError)(found["why"])
        elif wait:
            with session.idle(CheckpointError):
                self._save(folders, plan)
        else:
            self._begin_to_save(folders)

    def _save(self, folders: Sequence[Path], plan: Plan) -> None:
        self._finish_last()
        model, worker = self._session.spec.model, self._worker
        write = self._prepared(folders, plan)
        write(lambda: {n: content_of(model, worker, n) for n in worker.held}, worker.world)

    def _begin_to_save(self, folders: Sequence[Path]) -> None:
        """Let a thread write a snapshot: see :meth:`Snapshot.begin`. :meth:`wait` reports the result."""
        session, snapshot = self._session, self._snapshot
        batches, is_done = session.feed.next_batch, self._threads is not None and self._is_done
        if not (is_done and may_run(session.spec.running, batches)):
            session.feed.drain()
        with session.settling(CheckpointError):
            self._finish_last()
            self._threads = threads = self._threads or self._worker.world.beside()
            write = self._prepared(folders, session.spec.plan)

            def write_on() -> None:
                thread = threading.get_native_id()
                with suppress(OSError):  # a system without thread priorities
                    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)
                write(snapshot.whole, threads)

            def start() -> None:
                self._writing = in_thread(write_on)

            snapshot.begin(session.spec.model, self._worker, batches, start)
            session.settle()

    def _prepared(
        self, folders: Sequence[Path], plan: Plan
    ) -> Callable[[Callable[[], dict[int, dict[str, Any]]], World], None]:
        """Return a function that writes what another function returns, with the other ranks."""
        spec, batches = self._session.spec, self._session.feed.next_batch
        place = {**self._worker.place, "batch": batches}
        probe.at("save", action="begin", **place)
        manifest = Manifest(asdict(plan), batches, spec.model.bounds, spec.model.signature(), [])
        directory, *also = folders
        what = self._nothing_saved = nothing_saved(directory)

        def write(find: Callable[[], dict[int, dict[str, Any]]], world: World) -> None:
            contents: dict[int, dict[str, Any]] = {}

            def look() -> None:
                contents.update(find())
                refuse_nonfinite(contents, self._worker.placement)

            agreed(world, what, look)
            save_checkpoint(directory, contents, manifest, world, self._locks, place, also)

        return write

    def _try_to_save(self, folders: Sequence[Path], plan: Plan) -> dict[str, Any] | None:
        try:
            self._save(folders, plan)
        except CheckpointError as error:
            return {"why": str(error), "is_not_finite": isinstance(error, NotFinite)}
        finally:
            self._locks.release()  # the next time another pipeline may save
        return None

    @property
    def is_under_way(self) -> bool:
        """Whether the last snapshot is not copied yet."""
        return self._snapshot.is_under_way

    @property
    def _is_done(self) -> bool:
        """Whether :meth:`wait` returns at once. If not, no batch may be in flight then, as others need it."""
        return not self.is_under_way and (self._writing is None or self._writing.done())

    def settle(self) -> None:
        """Copy the rest of a snapshot that has begun; no batch is in flight."""
        self._snapshot.finish()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is written; raise CheckpointError, once, if that failed."""
        if not self._is_done:
            self._session.feed.drain()
        with self._session.settling(CheckpointError):
            self._finish_last()

    def finish(self, limit_s: float) -> None:
        """Wait until the thread has written, or failed; :meth:`wait` reports a failure."""
        if self._writing is not None:
            try:
                self._writing.exception(limit_s)
            except Unanswered:
                raise PipelineTimeout(
                    f"rank {self._worker.world.rank} has waited {limit_s:g} s for its checkpoint to be written"
                ) from None

    def _finish_last(self) -> None:
        self.finish(self._worker.world.timeout_s)
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self, patience_s: float) -> None:
        """Wait, no longer than ``patience_s``, and release the folders for others."""
        try:
            self.finish(patience_s)
            self._finish_last()
            if self.is_under_way:
                raise CheckpointError(f"{self._nothing_saved}: it was not copied before the end")
        except PipelineTimeout:
            self._end_thread(patience_s)
            raise
        finally:
            self._locks.release()

    def _end_thread(self, patience_s: float) -> None:
        """End a thread that waits for other ranks: one inside gloo would abort the process at its end."""
        if self._threads is not None:
            self._threads.disconnect()
        with suppress(PipelineTimeout):  # it writes to a slow disk
            self.finish(patience_s)

    # ---- loading -----------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint."""
        session = self._session
        spec, worker = session.spec, session.worker
        _refuse_sharded(
            session,
            "load",
            "have torch.distributed.checkpoint.load fill sharded_state_dict(); load_sharded_state_dict() takes it",
        )
        if session.policy.is_new:
            return
        with session.idle(CheckpointError):
            probe.at("load", action="begin", **worker.place)
            self.finish(session.world.timeout_s)
            found = read_checkpoint(folder, spec.model, worker, spec.plan)
        with worker.running():
            probe.at("load", action="restore", **worker.place)
            session.feed.next_batch = restore_checkpoint(found, spec.model, worker)
            session.go_on()

    # ---- torch.distributed.checkpoint --------------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, Any]:
        """Return this rank's part of the state."""
        session = self._session
        _refuse_several(session.spec.plan, "sharded_state_dict")
        with session.idle(CheckpointError):
            return sharded_state(session.spec.model, session.worker, session.feed.next_batch)

    def load_sharded_state(self, state: Mapping[str, Any]) -> None:
        """Resume from such a state."""
        session = self._session
        _refuse_several(session.spec.plan, "load_sharded_state_dict")
        with session.idle():
            session.feed.next_batch = load_sharded_state(state, session.spec.model, session.worker)
            session.world.barrier()
            session.go_on()


def _refuse_several(plan: Plan, method: str) -> None:
    if plan.pipelines > 1:
        raise ValueError(
            f"{method}() is for one pipeline, and the plan has {plan.pipelines}, with a reference beside "
            "their weights: use save(folder) and load(folder)"
        )


def _refuse_sharded(session: Session, method: str, instead: str) -> None:
    if session.worker.is_sharded:
        raise ValueError(f"{method}() needs whole weights, and prepare_stage has sharded stages: {instead}")
