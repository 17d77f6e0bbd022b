"""Writing a checkpoint: every rank writes the files of its stage replicas, then the first rank the manifest."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.folder import FolderLocks, NotFinite, agreed
from avgpipe.checkpoint.manifest import NAME, Manifest, crc_of, file_name
from avgpipe.elastic import Layout, Reference
from avgpipe.errors import CheckpointError
from avgpipe.plan import Plan
from avgpipe.runtime.context import Carry
from avgpipe.runtime.model import Model
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.weights import stage_state
from avgpipe.runtime.worker import Worker


def save_checkpoint(
    directory: Path, model: Model, worker: Worker, plan: Plan, batches: int, locks: FolderLocks
) -> None:
    """Write a checkpoint; where one rank fails, CheckpointError on every rank, and the folder keeps what it has."""
    world = worker.world
    # all ranks name their files alike, and never as the files of the checkpoint that is there now
    token = int(world.broadcast(torch.tensor(secrets.randbits(48)), 0))
    replicas = worker.placement.replicas
    written: list[Path] = []
    held = ExitStack()

    def write_own() -> list[list[int]]:
        directory.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            held.enter_context(locks.saving(directory))
        rows = []
        for number in worker.held:
            content = _content_of(model, worker, number)
            _refuse_nonfinite(content, worker, number)
            path = directory / file_name(replicas[number], token)
            written.append(path)
            _write(path, content)
            rows.append([number, path.stat().st_size, crc_of(path)])
        return rows

    def write_manifest() -> None:
        if world.rank == 0:
            files = [[file_name(replicas[number], token), size, crc] for number, size, crc in table]
            Manifest(asdict(plan), batches, model.bounds, model.signature(), files).write(directory)
            _remove_others(directory, {name for name, _, _ in files})

    what = f"nothing was saved to {directory}"
    with held:
        try:
            table = sorted(row for rows in agreed(world, what, write_own) for row in rows)
            agreed(world, what, write_manifest)  # nobody goes on, or ends, before the checkpoint is there
        except CheckpointError:
            _remove(written)
            raise


def _refuse_nonfinite(content: dict[str, Any], worker: Worker, number: int) -> None:
    """A run that has come to infinities or NaN must not replace the checkpoint from which it could go on."""
    if "reference" not in content:
        return
    source = content["reference"] or next(iter(content["replicas"].values()))
    bad = next((name for name, value in source["weights"].items() if not bool(value.isfinite().all())), None)
    if bad is not None:
        raise NotFinite(
            f"{bad!r} on {worker.placement.name(number)} has infinities or NaN; load an earlier checkpoint, and train "
            "with skip_nonfinite=True, clip_grad_norm or a lower learning rate"
        )


class _Disk:
    """A file that remembers why it could not be written: torch.save says that in words of its own."""

    def __init__(self, path: Path) -> None:
        self._file, self._path = path.open("wb"), path
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        return int(self._tried(lambda: self._file.write(data)))

    def flush(self) -> None:
        self._tried(self._file.flush)

    def end(self) -> None:
        """Bring all of it to the disk."""
        self._tried(self._file.flush)
        self._tried(lambda: os.fsync(self._file.fileno()))

    def close(self) -> None:
        self._tried(self._file.close)

    def _tried(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            error.filename = error.filename or str(self._path)
            self.error = self.error or error
            raise


def _write(path: Path, content: dict[str, Any]) -> None:
    disk = _Disk(path)
    try:
        try:
            torch.save(content, disk)  # type: ignore[arg-type]  # it only writes
            disk.end()
        finally:
            disk.close()
    except Exception:
        if disk.error is not None:
            raise disk.error from None
        raise


def _remove_others(directory: Path, keep: set[str]) -> None:
    """Delete the files of earlier checkpoints, and of any save that was cut off."""
    shards = directory.glob("stage-*-????????????.pt")  # whatever the placement was
    _remove([*(path for path in shards if path.name not in keep), *directory.glob(f".{NAME}.*.tmp")])


def _remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # the next save tries again


def _content_of(model: Model, worker: Worker, number: int) -> dict[str, Any]:
    """Return plain containers and tensors only, so that they load with ``weights_only=True``. Names are first names.

    The workers of a replicated stage hold the same, but for what they carry from batch to batch: the first one's file
    has all, the others' that alone.
    """
    k, copy, _ = worker.placement.replicas[number]
    replicas = {i: worker.trained[number, i] for i in worker.placement.pipelines_of(number)}
    if copy > 0:
        return {"replicas": {i: {"carry": _carried(r)} for i, r in replicas.items()}}
    layout = next(iter(replicas.values())).arena.layout
    reference = worker.references[number]
    return {
        "reference": None if reference is None else _reference_content(model, reference, layout, k),
        "replicas": {i: _replica_content(model, worker, number, r) for i, r in replicas.items()},
    }


def _carried(trained: TrainedStage) -> dict[str, dict[int, Any]]:
    return {place: dict(carry.values) for place, carry in carries(trained).items()}


def _reference_content(model: Model, reference: Reference, layout: Layout, k: int) -> dict[str, Any]:
    views = layout.tensors(reference.parameters)
    return {"weights": dict(zip(model.trainable[k], views)), "state": reference.state_dict()}


def _replica_content(model: Model, worker: Worker, number: int, trained: TrainedStage) -> dict[str, Any]:
    k = worker.placement.stage_of(number)
    names = model.trainable[k]
    rest = stage_state(worker, number, trained.pipeline)
    content: dict[str, Any] = {
        "weights": dict(zip(names, trained.arena.layout.tensors(trained.arena.weights))),
        "rest": {e.names[0]: rest[e.local] for e in model.entries[k] if e.arena is None},
        "carry": _carried(trained),
        "older": {},  # versions that the next batches run on, by how many updates they lie behind
        "optimizer": None,
        "lr_scheduler": None,
        "loss_scale": trained.loss_scale.state_dict() if trained.loss_scale is not None else None,
    }
    if trained.versions is not None:
        layout = trained.arena.layout
        content["older"] = {
            behind: dict(zip(names, layout.tensors(flats)))
            for behind, flats in trained.versions.older().items()
        }
    if trained.optimizer is not None:
        content["optimizer"] = {
            "state": trained.optimizer.state_dict(),
            "names": parameter_names(trained, names),
        }
    if trained.lr_scheduler is not None:
        content["lr_scheduler"] = trained.lr_scheduler.state_dict()
    return content


def carries(trained: TrainedStage) -> dict[str, Carry]:
    """Carried states by place in the unsplit model: layer number, and number within the layer."""
    found = {}
    for number, layer in enumerate(trained.stage.layers, trained.stage.first):
        for n, carry in enumerate(m for m in layer.modules() if isinstance(m, Carry)):
            found[f"{number}.{n}"] = carry
    return found


def parameter_names(trained: TrainedStage, names: list[str]) -> list[str]:
    """First names of the optimizer's parameters, in the order in which its ``state_dict`` numbers them."""
    assert trained.optimizer is not None
    by_id = {id(p): name for p, name in zip(trained.arena.parameters, names)}
    return [by_id[id(p)] for group in trained.optimizer.param_groups for p in group["params"]]
