"""The state of a Pipeline: weights, checkpoints, and what trains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from avgpipe.plan import Plan
from avgpipe.ranks.environment import named
from avgpipe.runtime.session import Session, recovering
from avgpipe.runtime.spec import Spec
from avgpipe.runtime.weights import gather_state

if TYPE_CHECKING:
    from avgpipe.runtime.loading import LoadedKeys


class Keeping:
    """The part of a Pipeline that gives its state away and takes it back."""

    plan: Plan
    _spec: Spec
    _session: Session

    @recovering
    def state_dict(self, weights: str | int = "reference") -> dict[str, torch.Tensor]:
        """Return weights and buffers under the unsplit model's names; they load into it with ``strict=True``.

        ``weights``: as in :meth:`evaluate`. Buffers are not averaged over time: with "ema" they are the reference's.
        """
        which = self._which(weights)
        session = self._session
        session.policy.come_in(session)
        with session.idle():
            return gather_state(self._spec.model, session.worker, which)

    @recovering
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadedKeys:
        """Set weights and buffers, of all pipelines and the reference, from the next batch on; every rank calls it.

        Optimizers, learning-rate schedules, and state that layers carry from batch to batch stay unchanged;
        a ``MovingAverage`` starts again. A plan without a flush fills its pipeline again.

        Args:
            state_dict: by the unsplit model's names, on any device. A rank reads the tensors of its own stages only,
                so the mapping may read its files on access.
            strict: whether missing and unexpected names are refused. Otherwise what is missing stays
                unchanged.

        Returns:
            The names that are missing, and those that are unexpected.

        Raises:
            ValueError: on every rank, with nothing changed, for names or shapes that are not the model's, and for
                optimizers that keep weights in their state.
        """
        session = self._session
        session.policy.come_in(session)
        is_new = session.policy.is_new
        with session.idle(ValueError):
            load = named("avgpipe.runtime.loading:load_state")
            found: LoadedKeys = load(self._spec.model, session.worker, state_dict, strict, sets=not is_new)
        if not is_new:
            session.go_on()
        return found

    @property
    def _saving(self) -> Any:
        """The object that saves and loads checkpoints."""
        session = self._session
        if session.saving is None:
            session.saving = named("avgpipe.checkpoint.saving:Saving")(session)
        return session.saving

    @recovering
    def save(self, directory: str | Path, *, wait: bool = True, also: Sequence[str | Path] = ()) -> None:
        """Write a checkpoint that loads under any plan. Its folder appears, or replaces another, in one step.

        Args:
            directory: of the checkpoint.
            wait: False: the state is copied in main memory, which is kept for the next time, and a thread writes it
                while training goes on; batches in flight go on, too, each stage copying its state between
                two. If it cannot be written, :meth:`wait_for_save` raises the error; else the next save,
                which then has saved nothing, or :meth:`close`. A save waits for the one before. Isolated
                pipelines always wait.
            also: other folders that get the same checkpoint, by links to its files if the file system has
                them.

        Raises:
            CheckpointError: on every rank, if it cannot be written, if another run saves there, and for
                weights with infinities or NaN: the old checkpoint stays, and training may go on.
            ValueError: for sharded stages: see :meth:`sharded_state_dict`.
        """
        self._saving.save([Path(folder) for folder in (directory, *also)], wait)

    @recovering
    def wait_for_save(self) -> None:
        """Wait until the checkpoint that ``save(folder, wait=False)`` has begun is written.

        CheckpointError, on every rank, if it cannot be. If a rank is replaced meanwhile, it may be missing: a
        warning reports it.
        """
        self._saving.wait()

    @recovering
    def load(self, directory: str | Path) -> None:
        """Resume from a checkpoint: bit for bit under the same plan, else from weights and optimizer states.

        An isolated pipeline that joins others in training gets their state, and loads nothing before its
        first batch.

        CheckpointError, on every rank, if it is missing, damaged or another model's: nothing has changed
        then. ValueError for sharded stages: see :meth:`sharded_state_dict`.
        """
        self._saving.load(Path(directory))

    @recovering
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state for ``torch.distributed.checkpoint``, under any sharding.

        ``dcp.save(pipeline.sharded_state_dict(), checkpoint_id=folder)`` on all ranks of the mesh writes weights,
        buffers, optimizer states, learning-rate schedule and loss scale. To resume, also with other numbers
        of stages, shards or replicas: let ``dcp.load`` fill what this returns, then call
        :meth:`load_sharded_state_dict`. Tensors are not copied; the names below "model" are those of
        ``state_dict()``. A ``MovingAverage`` starts again.

        Raises:
            ValueError: for several pipelines: use :meth:`save`.
            CheckpointError: for optimizers with ``train()`` and ``eval()`` modes: use :meth:`save`.
        """
        return self._saving.sharded_state()  # type: ignore[no-any-return]

    @recovering
    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, on every rank, from a :meth:`sharded_state_dict` that ``dcp.load`` has filled.

        CheckpointError if it is no such state; the pipeline may have a part of it then.
        """
        self._saving.load_sharded_state(state)

    @recovering
    def requires_grad_(self, names: str | Sequence[str], flag: bool = True) -> None:
        """Freeze parameters (``flag`` False), or let them train again, from the next batch on; on every rank alike.

        With several pipelines all of them get the reference's values of frozen parameters. A checkpoint does
        not record which are frozen.

        Args:
            names: of parameters, or of modules that hold them, as in ``state_dict()``.
            flag: whether they train.

        Raises:
            ValueError: for parameters that did not require a gradient when the Pipeline was made.
        """
        names = [names] if isinstance(names, str) else list(names)
        if self._spec.options.prepare is not None:
            raise ValueError(
                "prepare_stage has set up which gradients are averaged: freeze parameters before the Pipeline is made"
            )
        indices = named("avgpipe.runtime.loading:find_parameters")(self._spec.model, names)
        with self._session.idle():
            self._session.world.require_same("argument of requires_grad_", json.dumps([names, flag]))
            named("avgpipe.runtime.loading:set_requires_grad")(self._session.worker, indices, flag)
        self._session.policy.froze(names, flag)

    @property
    def has_copies(self) -> bool:
        """Whether a lost process may be replaced from a copy of its state: see ``avgpipe.Copies``."""
        return self._spec.options.copies is not None

    def loader_state(self, loader: Any) -> Any:
        """Return ``loader.state_dict()`` after the batches that were trained on, to be saved beside :meth:`save`.

        The loader itself may be a batch ahead. ``loader`` is the one given to :meth:`train`, and has a
        ``state_dict``, like torchdata's StatefulDataLoader. Batches in flight are finished first.
        """
        self._session.drain()
        return self._session.loader.state(loader)

    def _which(self, weights: str | int) -> str | int:
        if weights == "ema" and self._spec.options.ema_decay is None:
            raise ValueError("weights='ema' needs a Pipeline with extensions=[avgpipe.MovingAverage(0.999)]")
        here = self._session.worker.placement.pipelines
        if weights in ("reference", "ema") or (type(weights) is int and weights in here):
            return weights
        average = "" if self._spec.options.ema_decay is None else ", 'ema'"
        whose = f"a pipeline from 0 to {self.plan.pipelines - 1}"
        if self.plan.isolate:
            whose = f"{here[0]}, the pipeline of this process"
        raise ValueError(f"weights must be 'reference'{average} or {whose}, not {weights!r}")
