"""Parameters that stop training, or train again, while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import torch

from avgpipe.elastic import Reference
from avgpipe.runtime.model import Model
from avgpipe.runtime.replica import Replica
from avgpipe.runtime.worker import Worker


def places_of(model: Model, names: Sequence[str]) -> list[list[int]]:
    """By stage, the places in its arena of the parameters that ``names`` mean, by their own names or those of modules
    that hold them. ValueError for a name of something that no optimizer has.
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
        for k, place in trainable:
            found[k].add(place)
    return [sorted(places) for places in found]


@torch.no_grad()
def set_requires_grad(worker: Worker, places: Sequence[Sequence[int]], flag: bool) -> None:
    """Of all replicas of the stages; no batch is under way. ``places``: by stage, as :func:`places_of` gives them.

    What is frozen takes the reference's values in every pipeline, or averaging would go on moving it.
    """
    frozen = []
    for (seat, _), replica in worker.replicas.items():
        here = places[worker.placement.seats[seat].stage]
        for n in here:
            replica.arena.parameters[n].requires_grad_(flag)
        reference = worker.references[seat]
        if reference is not None and not flag:
            frozen.append(
                (replica, reference, here)
            )  # by now the steps that wait for a round's others are done
    for replica, reference, here in frozen:
        _agree(replica, reference, here)


def _agree(replica: Replica, reference: Reference, places: Sequence[int]) -> None:
    layout, rounds = replica.arena.layout, reference.rounds
    z = layout.tensors(reference.parameters)
    started = rounds.replicas[replica.pipeline].before
    for flats in [replica.arena.weights] + ([started.flats] if started is not None else []):
        values = layout.tensors(flats)
        for n in places:
            values[n].copy_(z[n])
    for update in rounds.updates.values():  # what is told already in an unfinished round
        values = layout.tensors(update.flats)
        for n in places:
            values[n].zero_()
