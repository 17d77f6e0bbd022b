"""The unsplit model's weights and buffers: gathered from the stages, and averaged over pipelines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch

from avgpipe.elastic.flat import Layout
from avgpipe.model.model import Model
from avgpipe.runtime.worker import Worker


def gather_state(model: Model, worker: Worker, which: str | int) -> dict[str, torch.Tensor]:
    """Copy all tensors, in the model's order, on every rank. The reference's buffers are averages."""
    found: dict[str, torch.Tensor] = {}
    pipeline = which if isinstance(which, int) else worker.placement.evaluates
    for k in range(model.stages):
        replica = worker.placement.replicas_of(k, pipeline)[0]
        with worker.trained[replica, pipeline].evaluated() if replica in worker.held else nullcontext():
            found |= _gather_stage(model, worker, which, k, replica)
    state: Any = OrderedDict(
        (name, found[name] if name in found else model.unused[name].clone()) for name in model.names
    )
    # Some modules refuse to load a state without their version. A copy, as load_state_dict writes in it.
    state._metadata = {name: dict(version) for name, version in model.versions.items()}
    return state  # type: ignore[no-any-return]


def _gather_stage(
    model: Model, worker: Worker, which: str | int, k: int, replica: int
) -> dict[str, torch.Tensor]:
    """Copy all tensors of a stage, whose flat weights ``replica`` has."""
    placement = worker.placement
    layout, source = Layout(model.shapes[k], worker.device), placement.rank_of(replica)
    held = replica in worker.held
    flats = worker.whole_weights(replica, which, layout) if held else layout.zeros().flats
    views = layout.tensors([worker.world.broadcast(flat, source) for flat in flats])
    pipelines = [which] if isinstance(which, int) else placement.pipelines
    averaged = {} if isinstance(which, int) or worker.others is None else average_buffers(worker, k)
    states = [_broadcast_state(worker, k, i, averaged) for i in pipelines]
    found: dict[str, torch.Tensor] = {}
    for entry in model.entries[k]:
        if entry.arena is not None:
            tensor = views[entry.arena].detach().clone()
        else:
            tensor = average([state[entry.local] for state in states])
        found.update(dict.fromkeys(entry.names, tensor))
    return found


def _broadcast_state(
    worker: Worker, k: int, pipeline: int, instead: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Return a pipeline's :func:`stage_state`, on every rank; its holder replaces some by ``instead``."""
    replica = worker.placement.replicas_of(k, pipeline)[0]
    if replica in worker.held:
        own = {**stage_state(worker, replica, pipeline), **instead}
    else:
        rest = [e for e in worker.model.entries[k] if e.arena is None]
        own = {e.local: torch.empty(e.shape, dtype=e.dtype, device=worker.device) for e in rest}
    source = worker.placement.rank_of(replica)
    return {name: worker.world.broadcast(tensor, source) for name, tensor in own.items()}


def stage_state(worker: Worker, replica: int, pipeline: int) -> dict[str, torch.Tensor]:
    """Copy frozen parameters and buffers of a stage replica of this process, by their names in the stage."""
    trained = worker.trained[replica, pipeline]
    state = trained.stage.layers.state_dict()
    entries = worker.model.entries[worker.placement.stage_of(replica)]
    return {e.local: trained.arena.whole(state[e.local]).clone() for e in entries if e.arena is None}


def average(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of replicas' values.

    Integers, such as counters, are those of the first. Values that agree stay unchanged, and tensors with
    more infinities and NaN than others do not count.
    """
    if not tensors[0].is_floating_point() or len(tensors) == 1:
        return tensors[0].detach().clone()
    # Leave out replicas that have reached infinities or NaN. A mask has equally many in all of them.
    bad = [int(t.detach().isfinite().logical_not().sum()) for t in tensors]
    tensors = [t for t, count in zip(tensors, bad) if count == min(bad)]
    first = tensors[0].detach().clone()
    stacked = torch.stack([t.detach() for t in tensors])
    return torch.where((stacked == first).all(dim=0), first, stacked.mean(dim=0))


def average_buffers(worker: Worker, k: int) -> dict[str, torch.Tensor]:
    """Return floating-point buffers of the reference of a stage, by their names in it, if they are averages.

    Empty on ranks without the stage. Every rank calls this: dedicated pipelines must exchange their buffers.
    """
    placement = worker.placement
    if worker.others is not None:
        replica = placement.replicas_of(k)[0]
        return published_average(worker, replica) if replica in worker.held else {}
    if len(placement.pipelines) == 1:
        return {}
    if placement.is_dedicated:
        states = [_broadcast_state(worker, k, i) for i in placement.pipelines]
    replica = placement.replicas_of(k)[0]
    if replica not in worker.held:
        return {}
    own = worker.trained[replica, placement.evaluates].buffers()
    if not placement.is_dedicated:
        states = [worker.trained[replica, i].buffers() for i in placement.pipelines]
    floating = [name for name, buffer in own.items() if buffer.is_floating_point()]
    return {name: average([buffers[name] for buffers in states]) for name in floating}


def published_average(worker: Worker, replica: int) -> dict[str, torch.Tensor]:
    """Return the averages of the stage's buffers that isolated pipelines published last, by local name."""
    assert worker.others is not None
    states = worker.others.buffers(replica)
    return {name: average([buffers[name] for buffers in states]).to(worker.device) for name in states[0]}
