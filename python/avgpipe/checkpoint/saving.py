"""Saves and loads the checkpoints of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from avgpipe.checkpoint import read_checkpoint, restore_checkpoint
from avgpipe.checkpoint.folder import NotFinite
from avgpipe.checkpoint.sharded import load_sharded_state, sharded_state
from avgpipe.checkpoint.snapshot import may_run
from avgpipe.checkpoint.writer import Writer
from avgpipe.errors import CheckpointError
from avgpipe.plan import Plan
from avgpipe.ranks import environment as probe
from avgpipe.runtime.session import Session


class Saving:
    """Handles the checkpoints of a session; made when the first one is saved or loaded. See ``Pipeline``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._writer = Writer(session.spec.model, session.worker)

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
                self._writer.save(folders[0], plan, session.feed.next_batch, folders[1:])
        else:
            self._begin_to_save(folders)

    def _begin_to_save(self, folders: Sequence[Path]) -> None:
        session, writer = self._session, self._writer
        batches = session.feed.next_batch
        if not (writer.has_begun and writer.is_done and may_run(session.spec.running, batches)):
            session.feed.drain()
        with session.settling(CheckpointError):
            writer.begin(folders[0], session.spec.plan, batches, folders[1:])
            session.settle()

    def _try_to_save(self, folders: Sequence[Path], plan: Plan) -> dict[str, Any] | None:
        try:
            self._writer.save(folders[0], plan, self._session.feed.next_batch, folders[1:])
        except CheckpointError as error:
            return {"why": str(error), "is_not_finite": isinstance(error, NotFinite)}
        finally:
            self._writer.release()  # the next time another pipeline may save
        return None

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is written."""
        if not self._writer.is_done:
            self._session.feed.drain()
        with self._session.settling(CheckpointError):
            self._writer.wait()

    def settle(self) -> None:
        """Copy the rest of a snapshot that has begun; no batch is in flight."""
        self._writer.settle()

    @property
    def is_under_way(self) -> bool:
        """Whether the last snapshot is not copied yet."""
        return self._writer.is_under_way

    def close(self, patience_s: float) -> None:
        self._writer.close(patience_s)

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
            self._writer.finish(session.world.timeout_s)
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
