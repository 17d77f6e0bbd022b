"""Steps of a stage replica, and the messages that they need, send and receive.

A schedule's update is several steps; see :class:`StepKind`. Which of them a plan takes, and where each step's messages
come from, follows from the placement alone, so every rank computes the same channels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from avgpipe.links.link import Channel, Key, Link, Mailbox, Message
from avgpipe.model.parts import NO_SKIPS, Skips
from avgpipe.runtime.placement import Placement


class StepKind(str, Enum):
    """A step of a stage replica: a schedule's action, or a part of an update.

    Attributes:
        SHARE_PART: send this replica's gradients, loss and statistics to the other replicas of the stage.
        SUM_REPLICAS: sum the replicas', in the order of replicas.
        SEND_TIED: send the gradients of parameters that other stages hold too.
        SUM_TIED: receive theirs and sum, in stage order, so that all holders step alike.
        ADD_NORM: add this stage's squared gradient norm to that of the later stages, if an option needs the
            norm; before SUM_TIED if earlier stages count all shared parameters.
        PUBLISH: scale the gradients by the norm of all stages, or drop them; let other processes read them,
            where the step has to wait for what those have published before.
        UPDATE: the former, without PUBLISH; step the optimizer, average.
        RECEIVE_LOSS: receive the batch's loss, if it did not arrive with a gradient.
        BEGIN_ROW: decide whether the forwards and backwards of a batch are launched as graphs.
        LAUNCH: launch them, up to those that need another worker's message.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"
    PUBLISH = "publish"
    SHARE_PART = "share part"
    SUM_REPLICAS = "sum replicas"
    SEND_TIED = "send tied gradients"
    SUM_TIED = "sum tied gradients"
    ADD_NORM = "norm"
    RECEIVE_LOSS = "receive loss"
    BEGIN_ROW = "begin row"
    LAUNCH = "graph"

    __hash__ = str.__hash__  # an Enum's own is slow


class Step(NamedTuple):
    """A step of a stage. ``micro_batch``: -1 if it has none. ``begins``: whether it begins its batch here."""

    kind: StepKind
    stage: int
    batch: int
    micro_batch: int
    needs: tuple[Key, ...]
    begins: bool = False

    @property
    def priority(self) -> tuple[bool, int, int]:
        """The smallest runs first: backwards and updates, then the oldest batch, then the last stage."""
        return self.kind is StepKind.FORWARD, self.batch, -self.stage

    def __str__(self) -> str:
        action = self.kind.value if self.micro_batch < 0 else f"{self.kind.value}{self.micro_batch}"
        return f"{action} of batch {self.batch}"


@dataclass(frozen=True)
class Route:
    """One pipeline's stage replica, and the sources and targets of its messages.

    Attributes:
        shared: the other stages that hold parameters of this one.
        norm: whether the norm of all stages' gradients is needed.
        skips: the tensors that skip stages on their way to or from here.
        scales_late: whether factors of the gradients may arrive with the loss.
        publishes: whether gradients are published before their step.
    """

    placement: Placement
    replica: int
    pipeline: int
    shared: tuple[int, ...] = ()
    norm: bool = False
    skips: Skips = NO_SKIPS
    scales_late: bool = False
    publishes: bool = False
    _channels: dict[tuple[StepKind, int], list[Channel]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def stage(self) -> int:
        return self.placement.stage_of(self.replica)

    @cached_property
    def first(self) -> bool:
        return self.stage == 0

    @cached_property
    def last(self) -> bool:
        return self.stage == self.placement.stages - 1

    def at(self, stage: int, micro_batch: int) -> int:
        """Return the replica of another stage that computes a micro-batch of this pipeline."""
        replicas = self._replicas[stage]
        return replicas[micro_batch % len(replicas)]

    @cached_property
    def _replicas(self) -> list[list[int]]:
        """The replicas of every stage that work for this pipeline."""
        return [self.placement.replicas_of(stage, self.pipeline) for stage in range(self.placement.stages)]

    @cached_property
    def peers(self) -> list[int]:
        """The other replicas of this stage."""
        return [n for n in self.placement.replicas_of(self.stage, self.pipeline) if n != self.replica]

    @cached_property
    def evaluates(self) -> bool:
        return self.replica == self.placement.first_replicas(self.pipeline)[self.stage]

    @cached_property
    def learns_the_loss(self) -> bool:
        """Whether the loss has its own message: if several replicas know parts, no gradient carries it."""
        return self.placement.is_replicated and not self.last

    @cached_property
    def loss_source(self) -> int:
        return self.placement.first_replicas(self.pipeline)[-1]

    @cached_property
    def loss_receivers(self) -> list[int]:
        """The replicas of earlier stages that get the loss in a message from here, not with a gradient."""
        if self.replica != self.loss_source or not self.placement.is_replicated:
            return []
        return [n for k in range(self.stage) for n in self.placement.replicas_of(k, self.pipeline)]

    @cached_property
    def result_receivers(self) -> list[int]:
        """One replica of each process without a part in the batch, to which the batch's result is sent."""
        placement = self.placement
        if self.replica != self.loss_source:
            return []
        return [
            placement.held_by(rank)[0]
            for rank in range(placement.ranks)
            if not placement.has_part_in(rank, self.pipeline)
        ]

    @cached_property
    def remote(self) -> list[tuple[int, int]]:
        """Dedicated pipelines of other processes, each with its replica of this stage."""
        placement = self.placement
        if not placement.is_dedicated or placement.ranks == 1:
            return []
        stage, number, own = placement.replicas[self.replica]
        return [(i, placement.replicas_of(stage, i)[number]) for i in placement.pipelines if i != own]

    @cached_property
    def update_steps(self) -> tuple[StepKind, ...]:
        """The steps of an update, in order."""
        K = StepKind
        # An earlier stage counts the norm of what both hold: if it does so for all shared parameters, this
        # stage's part need not wait for the sums, and the first stage, whose backward ends last, need not
        # wait at all.
        early = self.norm and bool(self.shared) and max(self.shared) < self.stage
        norm, tied = [K.ADD_NORM] * self.norm, bool(self.shared)
        learns = [K.RECEIVE_LOSS] * self.learns_the_loss
        return (
            *([K.SHARE_PART, K.SUM_REPLICAS] if self.peers else []),
            *(learns if self.scales_late else []),
            *([K.SEND_TIED] if tied else []),
            *(norm if early else []),
            *([K.SUM_TIED] if tied else []),
            *([] if early else norm),
            *([K.PUBLISH] if self.publishes else []),
            K.UPDATE,
            *([] if self.scales_late else learns),
        )

    # ---- messages ------------------------------------------------------------------------------------------------

    def needs(self, kind: StepKind, batch: int, micro_batch: int) -> tuple[Key, ...]:
        """Return the messages that a step of training consumes; a neighbour's before those that skip stages."""
        channels = self._channels.get((kind, micro_batch))
        if channels is None:  # the same for every batch
            channels = [
                Channel(k, self.pipeline, n, self.replica) for k, n in self._sources(kind, micro_batch)
            ]
            self._channels[kind, micro_batch] = channels
        keys = [Key(*channel, batch, micro_batch) for channel in channels]
        if kind is StepKind.SUM_REPLICAS and self.placement.ranks > 1:
            keys.append(self.sums_key(batch))
        return tuple(keys)

    def sums_key(self, batch: int) -> Key:
        """Return the key of the message that a group's sums of gradients are ready."""
        return Key(Message.SUMS_READY, self.pipeline, self.replica, self.replica, batch, -1)

    def evaluation_needs(self, batch: int, micro_batch: int) -> tuple[Key, ...]:
        """Return the messages that an evaluation's forward consumes."""
        sources = [] if self.first else [self.stage - 1]
        sources += [stage for stage, _ in self.skips.arrivals]
        return tuple(self.evaluation_key(k, self.stage, batch, micro_batch) for k in sources)

    def evaluation_key(self, source: int, target: int, batch: int, micro_batch: int) -> Key:
        """Return the key of an evaluation's activation from one stage to another."""
        replicas = self.placement.first_replicas(self.pipeline)
        pipeline = evaluation_pipeline(self.placement, self.pipeline)
        return Key(Message.EVALUATION, pipeline, replicas[source], replicas[target], batch, micro_batch)

    def _sources(self, kind: StepKind, m: int) -> list[tuple[Message, int]]:
        """Return the kinds of the messages that a step takes, each with its source replica."""
        placement, stage, K = self.placement, self.stage, StepKind
        if kind is K.FORWARD:
            before = [] if self.first else [(Message.ACTIVATION, self.at(stage - 1, m))]
            return before + [
                (Message.SKIP_ACTIVATION, self.at(route.stage, m)) for route in self.skips.arrivals
            ]
        if kind in (K.BACKWARD, K.BACKWARD_INPUT):
            behind = [] if self.last else [(Message.GRADIENT, self.at(stage + 1, m))]
            return behind + [
                (Message.SKIP_GRADIENT, self.at(route.stage, m)) for route in self.skips.departures
            ]
        if kind is K.SUM_REPLICAS:
            return [(Message.REPLICA_PART, n) for n in self.peers]
        if kind is K.SUM_TIED:
            return [
                (Message.TIED_GRADIENTS, placement.source_for(self.replica, other)) for other in self.shared
            ]
        if kind is K.ADD_NORM and not self.last:
            return [(Message.NORM_PART, placement.source_for(self.replica, stage + 1))]
        if kind is (K.PUBLISH if self.publishes else K.UPDATE) and self.norm and not self.first:
            return [(Message.TOTAL_NORM, placement.source_for(self.replica, stage - 1))]
        if kind is K.RECEIVE_LOSS:
            return [(Message.LOSS, self.loss_source)]
        return []

    def channels(self) -> list[Channel]:
        """Return the channels that end here, in an order that every rank computes alike."""
        replicas = [len(self.placement.replicas_of(k, self.pipeline)) for k in range(self.placement.stages)]
        own = self.placement.replicas[self.replica].replica
        # as many micro-batches as it takes to reach every replica
        mine = range(own, lcm(*replicas), replicas[self.stage])
        steps = [(kind, m) for kind in (StepKind.FORWARD, StepKind.BACKWARD) for m in mine]
        steps += [(kind, -1) for kind in self.update_steps]
        found = [
            Channel(message, self.pipeline, source, self.replica)
            for kind, m in steps
            for message, source in self._sources(kind, m)
        ]
        found += [Channel(Message.REFERENCE_UPDATE, i, source, self.replica) for i, source in self.remote]
        if self.evaluates and (self.placement.is_dedicated or self.pipeline == self.placement.evaluates):
            found += [Channel.of(key) for key in self.evaluation_needs(0, 0)]
        return list(dict.fromkeys(found))


class Port:
    """Receives and sends a stage replica's messages. ``sent_at``: when the step began to send, in seconds."""

    def __init__(self, route: Route, mailbox: Mailbox, links: dict[int, Link]) -> None:
        self.take, self.receive, self.messages = mailbox.take, mailbox.receive, mailbox.messages
        self.links, self._pipeline, self._replica = links, route.pipeline, route.replica
        self.sent_at: float | None = None

    def send(self, message: Message, to: int, batch: int, micro_batch: int, value: Any) -> None:
        self.send_as(Key(message, self._pipeline, self._replica, to, batch, micro_batch), value)

    def send_as(self, key: Key, value: Any) -> None:
        if self.sent_at is None:
            self.sent_at = time.perf_counter()
        self.links[key.target].send(key, value)


def loss_key(placement: Placement, rank: int, pipeline: int, batch: int) -> Key:
    """Return the key of the message with a batch's loss to a process that has no part in the batch."""
    source, target = placement.first_replicas(pipeline)[-1], placement.held_by(rank)[0]
    return Key(Message.LOSS, pipeline, source, target, batch, -1)


def result_key(placement: Placement, rank: int, pipeline: int, batch: int) -> Key:
    """Return the key of the message with an evaluation's result to a process."""
    source, target = placement.first_replicas(pipeline)[-1], placement.held_by(rank)[0]
    return Key(Message.RESULT, evaluation_pipeline(placement, pipeline), source, target, batch, -1)


def copy_key(placement: Placement, rank: int, number: int) -> Key:
    """Return the key of the message that begins a copy of the state of the process before this one.

    ``number``: of the copy, as batch numbers are repeated after a checkpoint is loaded.
    """
    before = (rank - 1) % placement.ranks
    source, target = placement.held_by(before)[0], placement.held_by(rank)[0]
    return Key(Message.COPY, placement.evaluates, source, target, number, 0)


def evaluation_pipeline(placement: Placement, pipeline: int) -> int:
    """Return the pipeline that an evaluation's messages name: one for all that share their replicas."""
    return pipeline if placement.is_dedicated else placement.evaluates


def channels_into(
    rank: int, placement: Placement, routes: Sequence[Route], copies: bool = False
) -> list[Channel]:
    """Return the channels from other processes into ``rank``, with these routes, in a global order."""
    found = [channel for route in routes for channel in route.channels()]
    evaluated = placement.pipelines if placement.is_dedicated else [placement.evaluates]
    found += [Channel.of(result_key(placement, rank, i, 0)) for i in evaluated]
    if copies:
        found.append(Channel.of(copy_key(placement, rank, 0)))
    absent = [i for i in placement.pipelines if not placement.has_part_in(rank, i)]
    found += [Channel.of(loss_key(placement, rank, i, 0)) for i in absent]
    return [channel for channel in found if placement.rank_of(channel.source) != rank]
