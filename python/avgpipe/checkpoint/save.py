"""Writing a checkpoint: every rank writes the files of its seats, then the first rank the manifest."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from avgpipe.averaging import Reference
from avgpipe.checkpoint.manifest import Manifest, crc_of
from avgpipe.plan import Plan
from avgpipe.runtime.context import Carry
from avgpipe.runtime.export import seat_state
from avgpipe.runtime.model import Model
from avgpipe.runtime.placement import Seat
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.worker import Worker
from avgpipe.weights import Layout


def save_checkpoint(directory: Path, model: Model, worker: Worker, plan: Plan, batches: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    world = worker.world
    # all ranks name their files alike, and never as the files of the checkpoint that is there now
    token = int(world.broadcast(torch.tensor(secrets.randbits(48)), 0))
    rows = []
    seats = worker.placement.seats
    for seat in worker.seats:
        path = directory / _file_name(seats[seat], token)
        _write(path, _seat_content(model, worker, seat))
        rows.append([seat, path.stat().st_size, crc_of(path)])
    table = world.gather_rows(torch.tensor(rows, dtype=torch.float64)).tolist()
    if world.rank == 0:
        files = [(_file_name(seats[int(s)], token), int(size), int(crc)) for s, size, crc in sorted(table)]
        Manifest(asdict(plan), batches, model.bounds, model.signature(), files).write(directory)
        _remove_others(directory, {name for name, _, _ in files})
    world.barrier()  # nobody goes on, or ends, before the checkpoint is there


def _file_name(seat: Seat, token: int) -> str:
    return f"stage-{seat.stage}-{seat.replica}-{seat.group}-{token:012x}.pt"


def _write(path: Path, content: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _remove_others(directory: Path, keep: set[str]) -> None:
    """Delete the files of earlier checkpoints, and of any that was cut off before its manifest."""
    for path in directory.glob("stage-*-????????????.pt"):  # whatever the placement was
        if path.name not in keep:
            path.unlink(missing_ok=True)


def _seat_content(model: Model, worker: Worker, seat: int) -> dict[str, Any]:
    """Plain containers and tensors only, so that it loads with ``weights_only=True``. Names are first names.

    The workers of a replicated stage hold the same, but for what they carry from batch to batch: the first one's file
    has all, the others' that alone.
    """
    k, number, _ = worker.placement.seats[seat]
    replicas = {i: worker.replicas[seat, i] for i in worker.placement.pipelines_of(seat)}
    if number > 0:
        return {"replicas": {i: {"carry": _carried(r)} for i, r in replicas.items()}}
    layout = next(iter(replicas.values())).arena.layout
    reference = worker.references[seat]
    return {
        "reference": None if reference is None else _reference_content(model, reference, layout, k),
        "replicas": {i: _replica_content(model, worker, seat, r) for i, r in replicas.items()},
    }


def _carried(replica: Replica) -> dict[str, dict[int, Any]]:
    return {place: dict(carry.values) for place, carry in carries(replica).items()}


def _reference_content(model: Model, reference: Reference, layout: Layout, k: int) -> dict[str, Any]:
    views = layout.tensors(reference.parameters)
    return {"weights": dict(zip(model.trainable[k], views)), "state": reference.state_dict()}


def _replica_content(model: Model, worker: Worker, seat: int, replica: Replica) -> dict[str, Any]:
    k = worker.placement.seats[seat].stage
    names = model.trainable[k]
    rest = seat_state(worker, seat, replica.pipeline)
    content: dict[str, Any] = {
        "weights": dict(zip(names, replica.arena.layout.tensors(replica.arena.weights))),
        "rest": {e.names[0]: rest[e.local] for e in model.entries[k] if e.arena is None},
        "carry": _carried(replica),
        "older": {},  # versions that the next batches run on, by how many updates they lie behind
        "optimizer": None,
        "lr_scheduler": None,
        "loss_scale": replica.loss_scale.state_dict() if replica.loss_scale is not None else None,
    }
    if replica.versions is not None:
        layout = replica.arena.layout
        content["older"] = {
            behind: dict(zip(names, layout.tensors(flats)))
            for behind, flats in replica.versions.older().items()
        }
    if replica.optimizer is not None:
        content["optimizer"] = {
            "state": replica.optimizer.state_dict(),
            "names": parameter_names(replica, names),
        }
    if replica.lr_scheduler is not None:
        content["lr_scheduler"] = replica.lr_scheduler.state_dict()
    return content


def carries(replica: Replica) -> dict[str, Carry]:
    """Carried states by place in the unsplit model: layer number, and number within the layer."""
    found = {}
    for number, layer in enumerate(replica.stage.layers, replica.stage.first):
        for n, carry in enumerate(m for m in layer.modules() if isinstance(m, Carry)):
            found[f"{number}.{n}"] = carry
    return found


def parameter_names(replica: Replica, names: list[str]) -> list[str]:
    """First names of the optimizer's parameters, in the order in which its ``state_dict`` numbers them."""
    assert replica.optimizer is not None
    by_id = {id(p): name for p, name in zip(replica.arena.parameters, names)}
    return [by_id[id(p)] for group in replica.optimizer.param_groups for p in group["params"]]
