"""The steps of a lane: what it does next, and which messages it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from avgpipe.links.message import Channel, Key
from avgpipe.runtime.order import Urgency
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.skips import NO_SKIPS, Skips
from avgpipe.schedule.stream import Step as Act


class Step(NamedTuple):
    kind: str
    micro_batch: int  # -1: none
    batch: int
    needs: tuple[Key, ...]
    begins: bool  # the first of its batch
    urgency: Urgency  # of what could run, the least runs

    def __str__(self) -> str:
        action = self.kind if self.micro_batch < 0 else f"{self.kind}{self.micro_batch}"
        return f"{action} of batch {self.batch}"


@dataclass(frozen=True)
class Place:
    """Where a lane sits, and who its messages come from.

    shared: the other stages that hold parameters of this one. norm: whether the norm of all stages' gradients
    is asked for. skips: what comes and goes past other stages. scales: whether what gradients must be multiplied with
    may come with the loss.
    """

    placement: Placement
    seat: int
    pipeline: int
    shared: tuple[int, ...]
    norm: bool
    skips: Skips = NO_SKIPS
    scales: bool = False

    @cached_property
    def stage(self) -> int:
        return self.placement.seats[self.seat].stage

    @cached_property
    def first(self) -> bool:
        return self.stage == 0

    @cached_property
    def last(self) -> bool:
        return self.stage == self.placement.stages - 1

    def at(self, stage: int, m: int) -> int:
        """The seat of another stage that has to do with a micro-batch of this pipeline."""
        return self.placement.at(stage, m, self.pipeline)

    @cached_property
    def peers(self) -> list[int]:
        """The other replicas of this stage."""
        return [seat for seat in self.placement.seats_of(self.stage, self.pipeline) if seat != self.seat]

    @cached_property
    def learns_the_loss(self) -> bool:
        """By a message of its own: it cannot ride on the last gradient where several seats know parts of it."""
        return self.placement.is_replicated and not self.last

    @cached_property
    def tells_the_loss(self) -> list[int]:
        """The seats that learn the loss by a message, if it is for this one to tell them: those of stages before whose
        gradients do not bring it, and one of each process that has no part in the batch.
        """
        placement, i = self.placement, self.pipeline
        if self.seat != self._knows_the_loss:
            return []
        before = (
            [s for k in range(self.stage) for s in placement.seats_of(k, i)]
            if placement.is_replicated
            else []
        )
        return before + [
            placement.held_by(rank)[0]
            for rank in range(placement.ranks)
            if not any(i in placement.pipelines_of(seat) for seat in placement.held_by(rank))
        ]

    @cached_property
    def others(self) -> list[tuple[int, int]]:
        """Spread pipelines and the seats of theirs, of other processes, that hold the same as this one."""
        placement = self.placement
        if not placement.is_spread or placement.ranks == 1:
            return []
        stage, replica, own = placement.seats[self.seat]
        return [(i, placement.seats_of(stage, i)[replica]) for i in range(placement.pipelines) if i != own]

    @property
    def _knows_the_loss(self) -> int:
        return self.placement.speakers(self.pipeline)[-1]

    def steps(self, acts: Iterable[Act], urgency: Callable[[Act], Urgency]) -> Iterator[Step]:
        """The steps that actions are made of: an update has others around it."""
        for act in acts:
            kind, batch, m = act
            begins = kind == "F" and m < len(self.peers) + 1
            for part in self._update if kind == "U" else kind:
                yield Step(part, m, batch, self._needs(part, m, batch), begins, urgency(act))

    @cached_property
    def _update(self) -> str:
        # An earlier stage counts the norm of what both hold: where that is so of all that is shared, this stage's part
        # need not wait for the sums, and the first stage, whose backward ends last, need not wait for anybody.
        early = self.norm and bool(self.shared) and max(self.shared) < self.stage
        learns, before = self.learns_the_loss, self.scales
        return (
            ("AG" if self.peers else "")
            + ("L" if learns and before else "")
            + ("TNS" if early else ("TS" if self.shared else "") + ("N" if self.norm else ""))
            + "U"
            + ("L" if learns and not before else "")
        )

    def _needs(self, kind: str, m: int, batch: int) -> tuple[Key, ...]:
        """Messages that a step consumes."""
        message, sources = self._sources(kind, m)
        keys = [Key(message, self.pipeline, source, self.seat, batch, m) for source in sources]
        if self.skips.arrivals or self.skips.departures:
            message, sources = self._skipped(kind, m)
            keys += [Key(message, self.pipeline, source, self.seat, batch, m) for source in sources]
        if kind == "G" and self.placement.ranks > 1:
            keys.append(Key("Z", self.pipeline, self.seat, self.seat, batch, m))
        return tuple(keys)

    def _skipped(self, kind: str, m: int) -> tuple[str, list[int]]:
        """As ``_sources``, of what comes past other stages."""
        message, routes = ("X", self.skips.arrivals) if kind == "F" else ("Y", self.skips.departures)
        return message, [self.at(route.stage, m) for route in routes if kind in "FBI"]

    def _sources(self, kind: str, m: int) -> tuple[str, list[int]]:
        placement, stage = self.placement, self.stage
        if kind == "F" and not self.first:
            return "F", [self.at(stage - 1, m)]
        if kind in "BI" and not self.last:
            return "B", [self.at(stage + 1, m)]
        if kind == "G":
            return "A", self.peers
        if kind == "S":
            return "T", [placement.informant(self.seat, other) for other in self.shared]
        if kind == "N" and not self.last:
            return "N", [placement.informant(self.seat, stage + 1)]
        if kind == "U" and self.norm and not self.first:
            return "C", [placement.informant(self.seat, stage - 1)]
        if kind == "L":
            return "L", [self._knows_the_loss]
        return kind, []

    def channels(self) -> list[Channel]:
        """Those that end here, in an order that all find alike."""
        replicas = [len(self.placement.seats_of(k, self.pipeline)) for k in range(self.placement.stages)]
        own = self.placement.seats[self.seat].replica
        mine = range(
            own, lcm(*replicas), replicas[self.stage]
        )  # as many micro-batches as it takes to meet everybody
        steps = [*(("F", m) for m in mine), *(("B", m) for m in mine), *((part, -1) for part in self._update)]
        found = [
            Channel(message, self.pipeline, source, self.seat)
            for kind, m in steps
            for message, sources in [self._sources(kind, m), self._skipped(kind, m)]
            for source in sources
        ]
        return list(dict.fromkeys(found))


def loss_key(placement: Placement, seat: int, pipeline: int, batch: int) -> Key:
    """Of the message by which a process that has no part in a batch learns its loss, at its first ``seat``."""
    return Key("L", pipeline, placement.speakers(pipeline)[-1], seat, batch, -1)


def channels_into(rank: int, placement: Placement, places: Sequence[Place]) -> list[Channel]:
    """All that end at a process, in an order that all find alike. ``places``: of its lanes."""
    seats = placement.held_by(rank)
    found = [channel for place in places for channel in place.channels()]
    found += [Channel("V", i, other, place.seat) for place in places for i, other in place.others]
    for i in range(placement.pipelines):
        # Evaluation goes through the first replicas, and the last one tells every process the result.
        speakers = placement.speakers(i)
        if i == 0 or placement.is_spread:
            found += [Channel("E", i, a, b) for a, b in pairwise(speakers) if b in seats]
            found += [
                Channel("E", i, speakers[route.stage], place.seat)
                for place in places
                if place.pipeline == i and place.seat == speakers[place.stage]
                for route in place.skips.arrivals
            ]
            found.append(Channel("R", i, speakers[-1], seats[0]))
        if not any(i in placement.pipelines_of(seat) for seat in seats):
            found.append(Channel("L", i, speakers[-1], seats[0]))
    return [channel for channel in found if channel.source not in seats]
