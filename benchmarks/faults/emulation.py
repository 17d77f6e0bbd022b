"""What isolated pipelines train, turn by turn, if their history is known: in one process, with no runtime at all.

The history alone says who has which micro-batches. Steps and rounds are those of ``avgpipe.elastic``, whose rules the
tests check against plain torch in float64; so what comes out is equal in every bit, or something was lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from avgpipe import Plan
from avgpipe.elastic.flat import Arena
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.fault.roster import Roster, Term
from avgpipe.model.batch import loss_weights, share_out, sizes_of
from benchmarks.faults import job
from benchmarks.overlap.models import loss

Part = tuple[job.Batch, list[slice]]  # a batch, and micro-batches of it


def terms_of(history: dict[str, Any], pipelines: int) -> list[Term]:
    """Return who was a member when, of what ``Supervisor.history`` tells."""
    found = [Term(i, i, 0) for i in range(pipelines)]
    changes = [(one["step"], "lost", one) for one in history["lost"]]
    changes += [(one["step"], "joined", one) for one in history["joined"]]
    roster = Roster(found)
    for step, what, one in sorted(changes, key=lambda change: change[0]):
        if what == "lost":
            roster.leave(one["pipeline"], step, step + one["steps_lost"])
        else:
            roster.enter(Term(one["pipeline"], len(roster.terms), step))
    return roster.terms


@dataclass
class Turn:
    """What is trained on in one turn.

    Attributes:
        parts: Of each member; micro-batches, or none of a batch that others have all of.
        counting: The members that have a part in the update.
    """

    number: int
    parts: dict[int, Part]
    counting: list[int]


class History:
    """Shares out batches as pipelines do that share each of them."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.roster = Roster(terms)
        self._given: dict[int, dict[int, Part]] = {}
        self.next = 0  # turn

    def turns(self, batches: Sequence[job.Batch]) -> Iterator[Turn]:
        """Yield the turns of an epoch: what was lost comes before the next batch."""
        waiting = [(batch, micro_batches(len(batch[0]))) for batch in batches]
        lost: list[Part] = []
        while True:
            lost += self._lost()
            source = lost or waiting
            if not source:
                return
            batch, slices = source.pop(0)
            members = self.roster.members(self.next)
            bounds = list(accumulate(sizes_of(len(slices), len(members)), initial=0))
            parts = {i: (batch, slices[a:b]) for i, (a, b) in zip(members, pairwise(bounds))}
            self._given[self.next] = parts
            yield Turn(self.next, parts, list(self.roster.counting(self.next)))
            self.next += 1

    def _lost(self) -> list[Part]:
        """Return what those had who are no members any more from this turn on, and did not count."""
        gone = [term for term in self.roster.terms if term.end == self.next]
        turns = [
            (term.pipeline, self._given.get(t, {})) for term in gone for t in range(term.published, term.end)
        ]
        found = [parts[pipeline] for pipeline, parts in turns if pipeline in parts]
        return [part for part in found if part[1]]


def micro_batches(samples: int) -> list[slice]:
    ends = list(accumulate(sizes_of(samples, job.MICRO_BATCHES), initial=0))
    return [slice(a, b) for a, b in pairwise(ends)]


class _Stage:
    """One pipeline's layers of a stage, and its optimizer."""

    def __init__(self, layers: nn.Module, reference: Reference, pipeline: int) -> None:
        self.layers = copy.deepcopy(layers)
        self.arena = Arena(self.layers.parameters())
        torch._foreach_copy_(self.arena.weights, reference.z.flats)
        inner = job.optimizer(self.arena.parameters)
        self.elastic = ElasticAveraging(inner, reference, pipeline, parameters=self.arena.weights)


def _reference(arena: Arena, plan: Plan) -> Reference:
    def steps(flats: list[torch.Tensor]) -> torch.optim.Optimizer:
        return job.optimizer([nn.Parameter(view) for view in arena.layout.tensors(flats)])

    rule, staleness = plan.rule or "", plan.staleness
    return Reference(arena.weights, plan.pipelines, rule=rule, staleness=staleness, outer=steps, open=True)


class Emulation:
    """Replicas and their reference, as a run's history has them."""

    def __init__(self, stages: int, pipelines: int, terms: Sequence[Term]) -> None:
        self.history = History(terms)
        layers, plan = job.layers(), job.plan(stages, pipelines)
        bounds = [0, *job.cut(stages), len(layers)]
        self._layers = [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]
        self._arenas = [Arena(copy.deepcopy(layers).parameters()) for layers in self._layers]
        self._references = [_reference(arena, plan) for arena in self._arenas]
        self._replicas: dict[int, list[_Stage]] = {}

    def train(self, epoch: int) -> None:
        """Train on an epoch's batches."""
        for turn in self.history.turns(job.batches(epoch)):
            self._let_come_and_go(turn.number)
            self._step(turn)

    def digests(self) -> dict[int | None, str]:
        """Name the weights of the reference (None), and those of each pipeline."""
        layouts = [arena.layout for arena in self._arenas]
        whole = [t for layout, r in zip(layouts, self._references) for t in layout.tensors(r.z.flats)]
        found: dict[int | None, str] = {None: job.digest(whole)}
        for i, stages in self._replicas.items():
            found[i] = job.digest(t for stage in stages for t in stage.arena.tensors())
        return found

    def _let_come_and_go(self, turn: int) -> None:
        roster = self.history.roster
        members = roster.members(turn)
        entering = {term.pipeline for term in roster.terms if term.first == turn}
        for i in [i for i in self._replicas if i not in members or i in entering]:
            del self._replicas[i]
            for reference in self._references:
                reference.release(i)
        for i in sorted(entering):
            pairs = zip(self._layers, self._references)
            self._replicas[i] = [_Stage(layers, reference, i) for layers, reference in pairs]

    def _step(self, turn: Turn) -> None:
        (x, y), _ = next(iter(turn.parts.values()))
        every = micro_batches(
            len(x)
        )  # each keeps its weight in the batch, in whichever turn it is trained on
        whole = loss_weights(loss, [y[of] for of in every], [of.stop - of.start for of in every], None)
        factors = dict(zip([of.start for of in every], whole.factors))
        for i, (_, slices) in turn.parts.items():
            if i not in turn.counting:
                continue
            own = replace(whole, factors=[factors[of.start] for of in slices])
            share = replace(share_out(own, [len(slices)], False)[0], shares=len(turn.parts))
            stages = self._replicas[i]
            for of, factor in zip(slices, share.factors):
                output = x[of]
                for stage in stages:
                    output = stage.layers(output)
                value = loss(output, y[of])
                torch.autograd.backward(value, torch.tensor(factor * share.scale, dtype=value.dtype))
            for stage in stages:
                for p in stage.arena.parameters if not slices else ():
                    p.grad = torch.zeros_like(p) if p in stage.elastic.state else None
                for grad in stage.arena.grads:
                    grad.mul_(share.shares)
                stage.elastic.step()
                stage.arena.drop_grads()
        for k, reference in enumerate(self._references):
            updates = {i: self._replicas[i][k].elastic.update for i in turn.counting}
            published = [update for update in updates.values() if update is not None]
            if published:
                without = {i: reference.without_gradient(i) for i in updates}
                reference.complete(published, without, len(turn.parts))
