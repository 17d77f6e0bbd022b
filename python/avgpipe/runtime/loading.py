"""Loads weights, and freezes parameters during training, by the unsplit model's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import torch

from avgpipe.model.model import Entry, Model
from avgpipe.runtime.weights import published_average
from avgpipe.runtime.worker import Worker

_DIFFERENCES = "missing", "unexpected"


_EXTRA = "_extra_state"  # state of modules beside tensors, which a Pipeline's state dict does not have


class LoadedKeys(NamedTuple):
    """The names in which a loaded state dict differs from the model's; named as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def load_state(
    model: Model, worker: Worker, state: Mapping[str, torch.Tensor], strict: bool, sets: bool = True
) -> LoadedKeys:
    """Set weights and buffers of all pipelines and the reference; no batch is in flight. Every rank calls this.

    ``sets``: False only checks the state dict.

    ValueError, on every rank and before anything has changed, if it does not fit.
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
    """Set isolated pipelines' buffers to their averages, which are the reference's, as some may stay.

    The averages are over the buffers published last, which are dropped when weights are replaced.
    """
    if worker.others is not None:
        for (replica, _), trained in worker.trained.items():
            own = trained.buffers()
            for name, value in published_average(worker, replica).items():
                own[name].copy_(value)


def _found_in(state: Mapping[str, torch.Tensor], entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    """Return a stage's entries in ``state``, each with the name to read: of tied ones the last, as torch."""
    named = ((next((n for n in reversed(e.names) if n in state), None), e) for e in entries)
    return [(name, entry) for name, entry in named if name is not None]


def _set_values(
    model: Model,
    worker: Worker,
    state: Mapping[str, torch.Tensor],
    entries: Mapping[int, list[tuple[str, Entry]]],
) -> None:
    for trained in worker.trained.values():
        _ = trained.arena  # performs steps that wait for the other pipelines of a round
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
    """Return, by stage, the indices of the parameters that ``names`` give, or that modules so named hold.

    Raises:
        ValueError: for a name without parameters of an optimizer.
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

    Frozen parameters take the reference's values in every pipeline; otherwise averaging would keep moving
    them.
    """
    frozen = []
    for (replica, _), trained in worker.trained.items():
        here = indices[worker.placement.stage_of(replica)]
        for n in here:
            trained.arena.parameters[n].requires_grad_(flag)
        reference = worker.references[replica]
        if reference is not None and not flag:
            # by now the steps that wait for other pipelines of a round are done
            frozen.append((trained, reference, here))
    for trained, reference, here in frozen:
        reference.align(trained.pipeline, trained.arena.layout, here)
