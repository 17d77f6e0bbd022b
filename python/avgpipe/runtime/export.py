"""The unsplit model's weights and buffers, gathered from the stages."""

from __future__ import annotations

import torch

from avgpipe.elastic import Layout
from avgpipe.runtime.model import Model
from avgpipe.runtime.worker import Worker


def gather_state(model: Model, worker: Worker, which: str | int) -> dict[str, torch.Tensor]:
    """Copies under the unsplit model's names, in its order, on every rank. Buffers of the reference are averages."""
    found: dict[str, torch.Tensor] = {}
    placement = worker.placement
    pipelines = range(placement.pipelines) if which == "reference" else [int(which)]
    for k, entries in enumerate(model.entries):
        seat = placement.seats_of(k, pipelines[0])[0]
        layout = Layout(model.shapes[k], worker.device)
        flats = worker.weights(seat, which) if seat in worker.seats else layout.zeros().flats
        source = placement.rank_of(seat)
        views = layout.tensors([worker.world.broadcast(flat, source) for flat in flats])
        states = [_told_state(worker, k, i) for i in pipelines]
        for entry in entries:
            if entry.arena is not None:
                tensor = views[entry.arena].detach().clone()
            else:
                tensor = average([state[entry.local] for state in states])
            found.update(dict.fromkeys(entry.names, tensor))
    return {name: found[name] if name in found else model.unused[name].clone() for name in model.names}


def _told_state(worker: Worker, k: int, pipeline: int) -> dict[str, torch.Tensor]:
    """:func:`seat_state` of a stage of a pipeline, on every rank."""
    seat = worker.placement.seats_of(k, pipeline)[0]
    if seat in worker.seats:
        own = seat_state(worker, seat, pipeline)
    else:
        rest = [e for e in worker.model.entries[k] if e.arena is None]
        own = {e.local: torch.empty(e.shape, dtype=e.dtype, device=worker.device) for e in rest}
    source = worker.placement.rank_of(seat)
    return {name: worker.world.broadcast(tensor, source) for name, tensor in own.items()}


def seat_state(worker: Worker, seat: int, pipeline: int) -> dict[str, torch.Tensor]:
    """Copies of frozen parameters and buffers of an owned seat's stage, by their names in it."""
    state = worker.replicas[seat, pipeline].stage.layers.state_dict()
    entries = worker.model.entries[worker.placement.seats[seat].stage]
    return {e.local: state[e.local].detach().clone() for e in entries if e.arena is None}


def average(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their mean; counters and other whole numbers are those of the first. Values that agree stay what they are, and
    tensors with more infinities and NaN than others have do not count.
    """
    if not tensors[0].is_floating_point() or len(tensors) == 1:
        return tensors[0].detach().clone()
    # Without those of replicas that have come to infinities or NaN. A mask has as many in all of them.
    bad = [int(t.detach().isfinite().logical_not().sum()) for t in tensors]
    tensors = [t for t, count in zip(tensors, bad) if count == min(bad)]
    first = tensors[0].detach().clone()
    stacked = torch.stack([t.detach() for t in tensors])
    return torch.where((stacked == first).all(dim=0), first, stacked.mean(dim=0))


def average_buffers(worker: Worker, k: int) -> dict[str, torch.Tensor]:
    """Floating-point buffers of the reference of a stage, by their names in it, if they are averages.

    Empty where the stage is not. Every rank asks: pipelines with seats of their own must tell each other.
    """
    placement = worker.placement
    if placement.pipelines == 1:
        return {}
    if placement.is_spread:
        told = [_told_state(worker, k, i) for i in range(placement.pipelines)]
    seat = placement.seats_of(k)[0]
    if seat not in worker.seats:
        return {}
    own = worker.replicas[seat, 0].buffers()
    if not placement.is_spread:
        told = [worker.replicas[seat, i].buffers() for i in range(placement.pipelines)]
    floating = [name for name, buffer in own.items() if buffer.is_floating_point()]
    return {name: average([buffers[name] for buffers in told]) for name in floating}
