"""The unsplit model's weights and buffers, gathered from the stages."""

from __future__ import annotations

import torch

from avgpipe.runtime.model import Model
from avgpipe.runtime.worker import Worker
from avgpipe.weights import Layout


def gather_state(model: Model, worker: Worker, which: str | int) -> dict[str, torch.Tensor]:
    """Copies under the unsplit model's names, in its order, on every rank. Buffers of the reference are averages."""
    found: dict[str, torch.Tensor] = {}
    for k, entries in enumerate(model.entries):
        seat, source = worker.seat_of(k), worker.rank_of(k)
        own = None if seat is None else seat_state(model, worker, seat, which)
        layout = Layout(model.trainable(k), worker.device)
        flats = layout.zeros().flats if seat is None else worker.weights(seat, which)
        views = layout.tensors([worker.world.broadcast(flat, source) for flat in flats])
        for entry in entries:
            if entry.arena is not None:
                tensor = views[entry.arena].detach().clone()
            elif own is not None:
                tensor = worker.world.broadcast(own[entry.local], source)
            else:
                empty = torch.empty(entry.shape, dtype=entry.dtype, device=worker.device)
                tensor = worker.world.broadcast(empty, source)
            found.update(dict.fromkeys(entry.names, tensor))
    # what no stage holds is never used by the forward, and so unchanged
    return {name: found[name] if name in found else t.detach().clone() for name, t in model.tensors.items()}


def seat_state(model: Model, worker: Worker, seat: int, which: str | int) -> dict[str, torch.Tensor]:
    """Copies of frozen parameters and buffers of an owned seat's stage, by their names in it."""
    pipelines = [i for at, i in worker.replicas if at == seat] if which == "reference" else [int(which)]
    states = [worker.replicas[seat, i].stage.layers.state_dict() for i in pipelines]
    entries = model.entries[worker.placement.seats[seat].stage]
    return {e.local: average([state[e.local] for state in states]) for e in entries if e.arena is None}


def average(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their mean; counters and other whole numbers are those of the first. Values that agree stay what they are."""
    first = tensors[0].detach().clone()
    if not first.is_floating_point() or len(tensors) == 1:
        return first
    stacked = torch.stack([t.detach() for t in tensors])
    return torch.where((stacked == first).all(dim=0), first, stacked.mean(dim=0))


def average_buffers(worker: Worker, seat: int) -> dict[str, torch.Tensor]:
    """Floating-point buffers of the reference of an owned seat, as in :func:`seat_state`, if they are averages."""
    replicas = [replica.buffers() for (at, _), replica in worker.replicas.items() if at == seat]
    if len(replicas) == 1:
        return {}
    return {
        name: average([buffers[name] for buffers in replicas])
        for name, buffer in replicas[0].items()
        if buffer.is_floating_point()
    }
