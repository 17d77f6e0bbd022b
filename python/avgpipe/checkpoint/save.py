"""Writing a checkpoint: every rank writes the files of its stage replicas, then the first rank the manifest."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from avgpipe import faults
from avgpipe.checkpoint.content import content_of
from avgpipe.checkpoint.folder import FolderLocks, NotFinite, agreed
from avgpipe.checkpoint.manifest import NAME, Manifest, crc_of, file_name
from avgpipe.errors import CheckpointError
from avgpipe.faults.disk import writing, written
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.runtime.worker import Worker


def save_checkpoint(
    directory: Path, model: Model, worker: Worker, plan: Plan, batches: int, locks: FolderLocks
) -> None:
    """Write a checkpoint; where one rank fails, CheckpointError on every rank, and the folder keeps what it has."""
    world, place = worker.world, {**worker.place, "batch": batches}
    faults.at("save", action="begin", **place)
    # All ranks name their files alike, and never as the files of the checkpoint that is there now.
    token = int(world.broadcast(torch.tensor(secrets.randbits(48)), 0))
    names = [file_name(replica, token) for replica in worker.placement.replicas]
    held = ExitStack()

    def write_own() -> list[list[int]]:
        directory.mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            held.enter_context(locks.saving(directory))
        return [
            [number, *_write(directory / names[number], model, worker, number, batches)]
            for number in worker.held
        ]

    def write_manifest() -> None:
        if world.rank == 0:
            faults.at("save", action="manifest", **place)
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


def _write(path: Path, model: Model, worker: Worker, number: int, batches: int) -> tuple[int, int]:
    """Write the file of a stage replica; return its size and CRC-32."""
    stage, pipelines = worker.placement.stage_of(number), worker.placement.pipelines_of(number)
    place = {"rank": worker.world.rank, "stage": stage, "pipeline": pipelines, "batch": batches}
    content = content_of(model, worker, number)
    _refuse_nonfinite(content, worker, number)
    try:
        with path.open("wb") as file:
            torch.save(content, writing(file, **place))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        # torch.save raises an error of its own behind the one of a file that cannot be written.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None
    size, crc = path.stat().st_size, crc_of(path)
    written(path, **place)
    return size, crc


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
