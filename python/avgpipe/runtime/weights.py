"""The unsplit model's weights and buffers: gathered from the stages, averaged over pipelines, and frozen midway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from avgpipe.elastic.flat import Layout
from avgpipe.model.model import Entry, Model
from avgpipe.runtime.worker import Worker


def gather_state(model: Model, worker: Worker, which: str | int) -> dict[str, torch.Tensor]:
    """Copy all under the unsplit model's names, in its order, on every rank. Buffers of the reference are averages."""
    found: dict[str, torch.Tensor] = {}
    pipeline = which if isinstance(which, int) else worker.placement.evaluates
    for k in range(model.stages):
        replica = worker.placement.replicas_of(k, pipeline)[0]
        with worker.trained[replica, pipeline].evaluated() if replica in worker.held else nullcontext():
            found |= _gather_stage(model, worker, which, k, replica)
    state: Any = OrderedDict(
        (name, found[name] if name in found else model.unused[name].clone()) for name in model.names
    )
    # Some modules refuse to load what does not say of which version it is. A copy, as load_state_dict writes in it.
    state._metadata = {name: dict(version) for name, version in model.versions.items()}
    return state  # type: ignore[no-any-return]


def _gather_stage(
    model: Model, worker: Worker, which: str | int, k: int, replica: int
) -> dict[str, torch.Tensor]:
    """Copy all of a stage, whose flat weights ``replica`` has."""
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
    """Return :func:`stage_state` of a stage of a pipeline, on every rank; who holds it gives some ``instead``."""
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

    Counters and other whole numbers are those of the first. Values that agree stay what they are, and tensors with more
    infinities and NaN than others have do not count.
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
    """Return floating-point buffers of the reference of a stage, by their names in it, if they are averages.

    Empty where the stage is not. Every rank calls this: dedicated pipelines must tell each other.
    """
    placement = worker.placement
    if worker.others is not None:
        replica = placement.replicas_of(k)[0]
        return told_average(worker, replica) if replica in worker.held else {}
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


def told_average(worker: Worker, replica: int) -> dict[str, torch.Tensor]:
    """Return the averages of what isolated pipelines have told last of a stage's buffers, by their names in it."""
    assert worker.others is not None
    states = worker.others.buffers(replica)
    return {name: average([told[name] for told in states]).to(worker.device) for name in states[0]}


_DIFFERENCES = "missing", "unexpected"
_EXTRA = "_extra_state"  # what modules tell beside tensors, which no stage dict has


class LoadedKeys(NamedTuple):
    """The names in which a loaded state dict differs from the model's; of the names of torch's own."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def load_state(
    model: Model, worker: Worker, state: Mapping[str, torch.Tensor], strict: bool, sets: bool = True
) -> LoadedKeys:
    """Set weights and buffers of all pipelines and the reference; no batch is in flight. Every rank calls this.

    ``sets``: else what there is is only looked at.

    ValueError, on every rank and before anything has changed, for what does not fit.
    """
    keys = LoadedKeys(
        [name for name in model.names if name not in state],
        [name for name in state if name not in model.names and not name.endswith(_EXTRA)],
    )
    entries = {k: _found_in(state, model.entries[k]) for k in map(worker.placement.stage_of, worker.held)}
    problems = [f"{what}: {', '.join(names)}" for what, names in zip(_DIFFERENCES, keys) if strict and names]
    problems += [
        f"{name} has shape {tuple(state[name].shape)} and not {tuple(entry.shape)}"
        for found in entries.values()
        for name, entry in found
        if state[name].shape != entry.shape
    ]
    if any(trained.keeps_weights for trained in worker.trained.values()):
        problems.append(
            "the optimizer keeps weights in its state, which would not fit others: load them into the model before the "
            "Pipeline is made"
        )
    everywhere = dict.fromkeys(problem for of_one in worker.world.gather(problems) for problem in of_one)
    if everywhere:
        raise ValueError(f"the state dict does not load into the model: {'; '.join(everywhere)}")
    if sets:
        if keys.missing_keys:
            _share_averages(worker)
        _set_values(model, worker, state, entries)
    return keys


def _share_averages(worker: Worker) -> None:
    """Let isolated pipelines have for their own the averages of buffers, which are the reference's, as others may stay.

    They are of what was told last, and are forgotten when weights are replaced.
    """
    if worker.others is not None:
        for (replica, _), trained in worker.trained.items():
            own = trained.buffers()
            for name, value in told_average(worker, replica).items():
                own[name].copy_(value)


def _found_in(state: Mapping[str, torch.Tensor], entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    """Return the entries of a stage that are there, with the name to read each by: as in torch, a tied one's last."""
    named = ((next((n for n in reversed(e.names) if n in state), None), e) for e in entries)
    return [(name, entry) for name, entry in named if name is not None]


def _set_values(
    model: Model,
    worker: Worker,
    state: Mapping[str, torch.Tensor],
    entries: Mapping[int, list[tuple[str, Entry]]],
) -> None:
    for trained in worker.trained.values():
        _ = trained.arena  # does the steps that wait for a round's others
    for (replica, _), trained in worker.trained.items():
        layout, buffers = trained.arena.layout, trained.stage.layers.state_dict(keep_vars=True)
        reference = worker.references[replica]
        places = [
            trained.arena.tensors(),
            *([layout.tensors(reference.parameters)] if reference is not None else []),
        ]
        for name, entry in entries[worker.placement.stage_of(replica)]:
            value = state[name]
            number = entry.arena
            targets = [buffers[entry.local].data] if number is None else [place[number] for place in places]
            for target in targets:
                trained.arena.fill(target, value)
        trained.replaced()
    for replica, ema in worker.emas.items():
        ema.restart(worker.weights(replica, "reference"))
    for name, own in model.unused.items():
        if name in state:
            own.copy_(state[name])


def find_parameters(model: Model, names: Sequence[str]) -> list[list[int]]:
    """Return, by stage, the indices of the parameters that ``names`` mean: their own names, or modules that hold them.

    Raises:
        ValueError: for a name of something that no optimizer has.
    """
    found: list[set[int]] = [set() for _ in range(model.stages)]
    for name in names:
        entries = [
            (k, entry)
            for k, stage in enumerate(model.entries)
            for entry in stage
            if any(f"{full}.".startswith(f"{name}.") for full in entry.names)
        ]
        if not entries:
            close = get_close_matches(name, [first for stage in model.trainable for first in stage], n=1)
            hint = f"did you mean {close[0]!r}" if close else "names are those of state_dict()"
            raise ValueError(
                f"the model has no parameter, and no module with parameters, named {name!r}: {hint}"
            )
        trainable = [(k, entry.arena) for k, entry in entries if entry.arena is not None]
        if not trainable:
            raise ValueError(
                f"{name!r} did not require a gradient when this Pipeline was made, so no optimizer has it: make the "
                "Pipeline with it trainable and freeze it by requires_grad_(names, False), or save(), make another "
                "Pipeline and load()"
            )
        for k, index in trainable:
            found[k].add(index)
    return [sorted(indices) for indices in found]


@torch.no_grad()
def set_requires_grad(worker: Worker, indices: Sequence[Sequence[int]], flag: bool) -> None:
    """Freeze parameters of all pipelines, or let them train; no batch is in flight.

    What is frozen takes the reference's values in every pipeline, or averaging would go on moving it.
    """
    frozen = []
    for (replica, _), trained in worker.trained.items():
        here = indices[worker.placement.stage_of(replica)]
        for n in here:
            trained.arena.parameters[n].requires_grad_(flag)
        reference = worker.references[replica]
        if reference is not None and not flag:
            # by now the steps that wait for a round's others are done
            frozen.append((trained, reference, here))
    for trained, reference, here in frozen:
        reference.align(trained.pipeline, trained.arena.layout, here)
