"""Writing a checkpoint: every rank writes the files of its stage replicas, then the first rank the manifest."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.folder import FolderLocks, NotFinite, agreed
from avgpipe.checkpoint.manifest import NAME, Manifest, crc_of, file_name
from avgpipe.checkpoint.subclasses import taken_apart
from avgpipe.errors import CheckpointError
from avgpipe.model.context import Carry
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.weights import stage_state, told_average
from avgpipe.runtime.worker import Worker


def save_checkpoint(
    directory: Path, model: Model, worker: Worker, plan: Plan, batches: int, locks: FolderLocks
) -> None:
    """Write a checkpoint; where one rank fails, CheckpointError on every rank, and the folder keeps what it has."""
    world = worker.world
    # All ranks name their files alike, and never as the files of the checkpoint that is there now.
    token = int(world.broadcast(torch.tensor(secrets.randbits(48)), 0))
    names = [file_name(replica, token) for replica in worker.placement.replicas]
    held = ExitStack()

    def write_own() -> list[list[int]]:
        directory.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            held.enter_context(locks.saving(directory))
        return [[number, *_write(directory / names[number], model, worker, number)] for number in worker.held]

    def write_manifest() -> None:
        if world.rank == 0:
            files = [[names[number], size, crc] for number, size, crc in table]
            Manifest(asdict(plan), batches, model.bounds, model.signature(), files).write(directory)
            shards = directory.glob("stage-*-????????????.pt")  # whatever the placement was
            _remove([*(path for path in shards if path.name not in names), *directory.glob(f".{NAME}.*.tmp")])

    what = f"nothing was saved to {directory}"
    with held:
        try:
            table = sorted(row for rows in agreed(world, what, write_own) for row in rows)
            agreed(world, what, write_manifest)  # nobody goes on, or ends, before the checkpoint is there
        except CheckpointError:
            _remove([directory / names[number] for number in worker.held])
            raise


def _write(path: Path, model: Model, worker: Worker, number: int) -> tuple[int, int]:
    """Write the file of a stage replica; return its size and CRC-32."""
    content = _content_of(model, worker, number)
    _refuse_nonfinite(content, worker, number)
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # torch.save raises an error of its own behind the one of a file that cannot be written.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None
    return path.stat().st_size, crc_of(path)


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


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # the next save tries again
            path.unlink(missing_ok=True)


def _content_of(model: Model, worker: Worker, number: int) -> dict[str, Any]:
    """Return plain containers and tensors only, so that they load with ``weights_only=True``. Names are first names.

    The workers of a replicated stage hold the same, but for what they carry from batch to batch: the first one's file
    has all, the others' that alone.
    """
    k, copy, _ = worker.placement.replicas[number]
    replicas = {i: worker.trained[number, i] for i in worker.placement.pipelines_of(number)}
    if worker.exchange is not None:  # what another run goes on with has one pipeline's optimizer
        replicas = dict(enumerate(replicas.values()))
    if copy > 0:
        return {"replicas": {i: {"carry": _carried(trained)} for i, trained in replicas.items()}}
    reference = worker.references[number]
    content: dict[str, Any] = {"reference": None, "replicas": {}}
    if reference is not None:
        views = next(iter(replicas.values())).arena.layout.tensors(reference.parameters)
        weights = dict(zip(model.trainable[k], views))
        state = reference.state_dict()
        content["reference"] = {"weights": weights, "state": {**state, "outer": taken_apart(state["outer"])}}
    if (ema := worker.emas.get(number)) is not None:
        views = next(iter(replicas.values())).arena.layout.tensors(ema.flats)
        content["ema"] = {"weights": dict(zip(model.trainable[k], views)), "updates": ema.updates}
    for i, trained in replicas.items():
        rest = stage_state(worker, number, trained.pipeline)
        if worker.exchange is not None:
            rest |= told_average(worker, number)
        content["replicas"][i] = {
            **_state_of(trained, model.trainable[k]),
            "rest": {e.names[0]: rest[e.local] for e in model.entries[k] if e.arena is None},
        }
    return content


def _state_of(trained: TrainedStage, names: list[str]) -> dict[str, Any]:
    arena, optimizer = trained.arena, trained.optimizer

    def by_name(flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(names, arena.layout.tensors(flats)))

    state = {
        "weights": by_name(arena.weights),
        "older": {},  # versions that the next batches run on, by how many updates they lie behind
        "carry": _carried(trained),
        "optimizer": None,
        "lr_scheduler": None if trained.lr_scheduler is None else trained.lr_scheduler.state_dict(),
        "loss_scale": None if trained.loss_scale is None else trained.loss_scale.state_dict(),
    }
    if trained.has_modes:
        with trained.evaluated():
            state["evaluated"] = by_name([flat.clone() for flat in arena.weights])
    if trained.versions is not None:
        state["older"] = {behind: by_name(flats) for behind, flats in trained.versions.older().items()}
    if optimizer is not None:
        order = parameter_names(trained, optimizer, names)
        of_all = optimizer.state_dict()
        state["optimizer"] = {"state": {**of_all, "state": taken_apart(of_all["state"])}, "names": order}
    return state


def _carried(trained: TrainedStage) -> dict[str, dict[int, Any]]:
    return {place: dict(carry.values) for place, carry in carries(trained).items()}


def carries(trained: TrainedStage) -> dict[str, Carry]:
    """Carried states by place in the unsplit model: layer number, and number within the layer."""
    return {
        f"{number}.{n}": carry
        for number, layer in enumerate(trained.stage.layers, trained.stage.first)
        for n, carry in enumerate(m for m in layer.modules() if isinstance(m, Carry))
    }


def parameter_names(trained: TrainedStage, optimizer: torch.optim.Optimizer, names: list[str]) -> list[str]:
    """First names of the optimizer's parameters, in the order in which its ``state_dict`` numbers them."""
    by_id = {id(p): name for p, name in zip(trained.arena.parameters, names)}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]
