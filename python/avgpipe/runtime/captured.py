"""A pipeline's batch on some lanes, captured once as CUDA graphs, and launched again with other values.

The steps of the schedule's row are captured in its order, on the lanes' streams, from one pool: what a step frees, a
later one gets, so the memory is what the schedule needs. The row is one graph, cut only before steps that need a
message from outside of these lanes.

All that changes from batch to batch lies in fixed memory, which the host fills before a launch: inputs, targets and
arrived messages, the loss scale, the seeds of random numbers, and state that layers carry over. Weights are where they
always are. Gradients are where the backwards of the captured batch have left them: each launch writes them again, and
then they become the parameters' own.

What one lane's stream has allocated and another one reads stays until a message says that it was read, as memory that
is freed in a capture may be used by the very next step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from avgpipe.device import ready_on_event
from avgpipe.errors import StageError
from avgpipe.links.link import Key, Message, detached, tensors_of
from avgpipe.model.context import Carry
from avgpipe.runtime.compute import BatchState, Compute, Work
from avgpipe.runtime.draws import Draws, Seeded
from avgpipe.runtime.loss import Metrics
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.route import Step, StepKind
from avgpipe.runtime.streams import captured
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.lane import Lane

Item = tuple["Lane", Step]
Place = tuple["Lane", int]  # a micro-batch on a lane
_OUTCOME = "\0outcome"  # in place of a batch's outcome, in the captured message that carries it


# ---- what follows a launch -------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A last stage's contribution to the loss, in fixed memory."""

    lane: Lane
    loss: torch.Tensor
    metrics: Metrics | None


class Passed(NamedTuple):
    """The batch's outcome goes from one of these lanes to another one."""

    lane: Lane
    target: Lane


class Sent(NamedTuple):
    """A message to another worker, in fixed memory. ``has_outcome``: whether the batch's outcome is added."""

    lane: Lane
    kind: Message
    to: int
    micro_batch: int
    value: Any
    has_outcome: bool


class Arrival(NamedTuple):
    """The fixed memory of a message from another worker, without the batch's outcome."""

    lane: Lane
    room: Any


@dataclass
class Segment:
    """Steps that are one graph.

    Attributes:
        rows: of the captured batch, each in its order.
        needs: messages from outside, which the first step needs.
        results: what follows a launch, in order.
    """

    rows: list[list[Item]]
    needs: tuple[Key, ...] = ()
    graph: Any = None
    draws: list[Seeded] = field(default_factory=list)
    results: list[Part | Passed | Sent] = field(default_factory=list)

    @property
    def items(self) -> list[Item]:
        return list(chain(*self.rows))


def segments_of(rows: Sequence[Sequence[Item]], lanes: Iterable[Lane]) -> list[Segment]:
    """Cut a row before each step that needs a message from outside of these lanes.

    Several rows need none, and are one segment.
    """
    replicas = {lane.route.replica for lane in lanes}
    found = [Segment([[] for _ in rows])]
    for row, items in enumerate(rows):
        for lane, step in items:
            needs = tuple(key for key in step.needs if key.source not in replicas)
            if needs:
                assert len(rows) == 1, "rows that wait for other workers are captured one by one"
                found.append(Segment([[]], needs))
            found[-1].rows[row].append((lane, step))
    return [segment for segment in found if segment.items]


# ---- messages during a capture ---------------------------------------------------------------------------------------


class _Handed(NamedTuple):
    """A message within the lanes. ``after``: how many steps of ``source`` had been captured."""

    value: Any
    event: Any
    source: Lane
    after: int


class Exchange:
    """The messages of a capture: within the lanes by events, and with other workers by fixed memory.

    Args:
        items: all that will be captured.
    """

    def __init__(self, lanes: Sequence[Lane], items: Iterable[Item]) -> None:
        self._lanes = {lane.route.replica: lane for lane in lanes}
        self._ready: dict[Key, _Handed] = {}
        self.arrived: dict[Key, Any] = {}
        self.results: list[Part | Passed | Sent] = []
        self._left = Counter((lane, step.micro_batch) for lane, step in items)
        self._captured: Counter[Lane] = Counter()  # steps so far
        self._newest: dict[Place, int] = {}
        self._sent: dict[Lane, list[tuple[Place, Any]]] = defaultdict(list)  # what its targets may read

    def has(self, step: Step) -> bool:
        """Whether all messages that a step needs are there."""
        return all(key in self._ready or key in self.arrived for key in step.needs)

    def begin(self, lane: Lane, step: Step) -> None:
        """Count a step that is captured next."""
        place = lane, step.micro_batch
        self._captured[lane] += 1
        self._left[place] -= 1
        self._newest[place] = self._captured[lane]

    def is_over(self, place: Place, after: float = math.inf) -> bool:
        """Whether the first ``after`` steps of a lane include all of a micro-batch."""
        return not self._left[place] and self._newest[place] <= after

    def send(self, lane: Lane, key: Key, value: Any) -> None:
        has_outcome = isinstance(value, list) and bool(value) and value[-1] is _OUTCOME
        value = detached(value[:-1] if has_outcome else value)
        target = self._lanes.get(key.target)
        if target is None:
            self.results.append(Sent(lane, key.kind, key.target, key.micro_batch, value, has_outcome))
            return
        event = None if lane.stream is None else lane.stream.issued()
        self._ready[key] = _Handed(value, event, lane, self._captured[lane])
        self._sent[lane].append(((target, key.micro_batch), value))
        if has_outcome:
            self.results.append(Passed(lane, target))

    def take(self, lane: Lane, key: Key) -> Any:
        found = self._ready.pop(key, None)
        if found is None:
            return self.arrived.pop(key)
        if lane.stream is not None:
            lane.stream.wait_event(found.event)
        # By this message its source has done these steps: it reads no more of what they needed.
        self._sent[lane] = [
            (place, value)
            for place, value in self._sent[lane]
            if place[0] is not found.source or not self.is_over(place, found.after)
        ]
        return found.value


class CapturePort:
    """A lane's port during a capture."""

    sent_at = None

    def __init__(self, lane: Lane, exchange: Exchange) -> None:
        self._lane, self._exchange = lane, exchange

    def take(self, key: Key) -> Any:
        return self._exchange.take(self._lane, key)

    def send(self, message: Message, to: int, batch: int, micro_batch: int, value: Any) -> None:
        route = self._lane.route
        key = Key(message, route.pipeline, route.replica, to, batch, micro_batch)
        self._exchange.send(self._lane, key, value)


class CapturingCompute(Compute):
    """Runs steps whose work is captured: without what needs the host, which follows each launch."""

    def __init__(self, lane: Lane, options: TrainingOptions, exchange: Exchange) -> None:
        port: Any = CapturePort(lane, exchange)
        super().__init__(lane.trained, lane.route, options, port, None)
        self._check, self._on_cpu = None, False
        self._branches.done = True
        self._lane, self._exchange = lane, exchange

    def _end_losses(self, state: BatchState) -> None:
        self._check_learns(state)
        self._exchange.results.append(Part(self._lane, state.sum_losses(), state.metrics))

    def _outcome_message(self, state: BatchState) -> list[Any]:
        return [_OUTCOME]


# ---- fixed memory ----------------------------------------------------------------------------------------------------


def _copies(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def _copy(fixed: Any, value: Any) -> None:
    """Copy the tensors of a pytree to those of another one, of the same form."""
    # As ``data``: what later segments' backwards have saved of it is meant to change, for autograd as for a graph.
    here, there = [t.data for t in tensors_of(fixed)], tensors_of(value)
    if [(t.shape, t.dtype) for t in here] != [(t.shape, t.dtype) for t in there]:
        raise StageError(
            f"a stage got {_shown(there)}, and {_shown(here)} when a batch of the same form was captured as a CUDA "
            "graph: shapes depend on values, so leave CudaGraphs out"
        )
    if here:
        torch._foreach_copy_(here, there)


def _plain_parts(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if not isinstance(leaf, torch.Tensor)]


def _shown(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{list(t.shape)} {str(t.dtype)[6:]}" for t in tensors) or "no tensor"


class _Carried:
    """What a layer carries from batch to batch, in fixed memory."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self._fixed = {m: _copies(value) for m, value in carry.values.items()}
        self._made: dict[int, Any] = {}  # of micro-batches that had none before
        carry.values.update(self._fixed)

    def put(self) -> None:
        """Copy the newest values to the fixed memory, where they are others: of a capture, or a batch without."""
        for m, fixed in self._fixed.items():
            if (value := self._carry.values[m]) is not fixed:
                if _plain_parts(value) != _plain_parts(fixed):
                    raise StageError(
                        "a Carry holds a number that changes, which a graph cannot: carry tensors only"
                    )
                _copy(fixed, value)
                self._carry.values[m] = fixed

    def captured(self) -> None:
        """Note what the captured batch has set where nothing was."""
        self._made = {m: value for m, value in self._carry.values.items() if m not in self._fixed}

    def launched(self) -> None:
        """Show what a launch has set where nothing was."""
        self._carry.values.update(self._made)


class _Rooms:
    """Fixed memory for messages from other workers, used again once a micro-batch is over."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = defaultdict(list)  # by shape and dtype
        self._used: dict[Place, list[torch.Tensor]] = defaultdict(list)

    def take(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        free = self._free[like.shape, like.dtype]
        room = free.pop() if free else torch.empty_like(like, requires_grad=False)
        self._used[place].append(room)
        return room

    def give_back(self, place: Place) -> None:
        for room in self._used.pop(place, ()):
            self._free[room.shape, room.dtype].append(room)


# ---- the captured row ------------------------------------------------------------------------------------------------


class CapturedRow:
    """The graphs of one batch on some lanes of a pipeline.

    Args:
        lanes: the first one's stream launches the graphs.
        segments: what they run.
        work: the captured batch; later ones have the same form.
        draws: which layers draw random numbers.
        pool: of memory, shared with other rows of these lanes, as they never run at the same time; None: a new one.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        segments: list[Segment],
        work: Work,
        options: TrainingOptions,
        draws: Draws,
        pool: Any,
    ) -> None:
        self.segments, self.pool = segments, pool
        self._lanes, self._lead, self._draws = lanes, lanes[0], draws
        device = self._lead.trained.stage.device
        has_first, has_last = any(lane.route.first for lane in lanes), any(lane.route.last for lane in lanes)
        self._inputs = _copies(work.inputs) if has_first else []
        self._targets = _copies(work.targets) if has_last else []
        self._scale: torch.Tensor | None = None
        if options.loss_scale == "dynamic":
            self._scale = torch.ones((), device=device)
        self._carried = [_Carried(carry) for lane in lanes for carry in lane.trained.stage.carries]
        self._captured_weights = self._weights()
        items = [item for segment in segments for item in segment.items]
        self._exchange, self._rooms = Exchange(lanes, items), _Rooms()
        static = replace(work, inputs=self._inputs, targets=self._targets, copied=None)
        self._computes: dict[Lane, CapturingCompute] = {}
        self._states: dict[Lane, BatchState] = {}
        for lane in lanes:
            self._computes[lane] = CapturingCompute(lane, options, self._exchange)
            own = [step.kind for of, step in items if of is lane]
            state = BatchState(static, Version(0), own.count(StepKind.FORWARD), len(own))
            state.loss_scale = float(options.loss_scale or 1) if self._scale is None else self._scale
            self._states[lane] = state
        self._arrivals: dict[tuple[Message, int, int], Arrival] = {}
        self._grads: dict[Lane, list[torch.Tensor | None]] = {}
        self._moments: dict[Place, list[Any]] = {}

    def _weights(self) -> list[tuple[int, bool]]:
        of_lanes = (lane.trained.stage.parameters() for lane in self._lanes)
        return [(p.data_ptr(), p.requires_grad) for p in chain(*of_lanes)]

    @property
    def is_current(self) -> bool:
        """Whether the weights are where the graphs read them, and the same of them are trained."""
        return self._captured_weights == self._weights()

    # ---- capture -----------------------------------------------------------------------------------------------------

    def capture(self, segment: Segment) -> None:
        """Capture the next segment, whose messages have arrived; nothing is computed.

        Raises:
            RuntimeError: a step does what a graph cannot.
        """
        if segment is self.segments[0]:
            for lane in self._lanes:
                lane.trained.arena.drop_grads()
        for key in segment.needs:
            self._make_room(key, next(item for item in segment.items if key in item[1].needs))
        is_last = segment is self.segments[-1]
        self._exchange.results = segment.results
        segment.draws = self._draws.of(step for _, step in segment.items)
        states = [of.state for of in segment.draws]
        with captured(self._lead.trained.stage.device, self.pool, states) as segment.graph:
            for lane in self._lanes[1:]:
                lane.wait_for(self._lead)
            for lane, step in self._in_order(segment):
                self._capture_step(lane, step)
            for lane in self._lanes[1:]:
                self._lead.wait_for(lane)
            for carried in self._carried if is_last else ():
                carried.put()
        self.pool = segment.graph.pool()
        if is_last:
            self._end_capture()

    def _make_room(self, key: Key, item: Item) -> None:
        """Give a message that has arrived fixed memory, and the captured steps this memory instead of it."""
        lane, step = item
        value = lane.port.messages[key]
        if key.kind is Message.GRADIENT:  # behind its tensors may be the batch's outcome
            value = value[: len(self._states[lane].saved[step.micro_batch].outputs)]
        place = lane, step.micro_batch
        room = pytree.tree_map_only(torch.Tensor, lambda t: self._rooms.take(place, t), value)
        self._exchange.arrived[key] = pytree.tree_map(_leaf, room, value)
        self._arrivals[key.kind, key.source, key.micro_batch] = Arrival(lane, room)

    def _in_order(self, segment: Segment) -> Iterator[Item]:
        """Yield the steps of the rows, each once its messages are there, the most urgent first."""
        rows = [list(reversed(row)) for row in segment.rows]
        while any(rows):
            ready = [row for row in rows if row and self._exchange.has(row[-1][1])]
            yield min(ready, key=lambda row: row[-1][1].priority).pop()

    def _capture_step(self, lane: Lane, step: Step) -> None:
        compute, state = self._computes[lane], self._states[lane]
        self._exchange.begin(lane, step)
        with _on(lane), self._draws.capturing(step):
            if step.kind is StepKind.FORWARD:
                compute.forward(state, step)
            elif step.kind is StepKind.BACKWARD_WEIGHT:
                compute.backward_weight(state, step)
            else:
                compute.backward(state, step)
        place = lane, step.micro_batch
        if self._exchange.is_over(place):
            self._rooms.give_back(place)

    def _end_capture(self) -> None:
        for carried in self._carried:
            carried.captured()
        for lane in self._lanes:
            arena = lane.trained.arena
            self._grads[lane] = [p.grad for p in arena.parameters]
            if any(grad is not None and grad.is_sparse for grad in self._grads[lane]):
                raise RuntimeError("a gradient is sparse")
            arena.drop_grads()
        for lane, step in (item for segment in self.segments for item in segment.items):
            statistics, place = lane.trained.stage.statistics, self._states[lane].work.place
            if statistics is not None and step.kind is StepKind.FORWARD:
                noted = statistics.of(place(lane.pipeline, step.micro_batch))
                self._moments[lane, step.micro_batch] = noted
        del self._computes, self._states, self._exchange, self._rooms

    # ---- launch ------------------------------------------------------------------------------------------------------

    def launch(self, segment: Segment, needs: Iterable[Key], states: Mapping[Lane, BatchState]) -> None:
        """Launch a segment's graph for a batch, on the current stream, that of the first lane.

        Args:
            needs: the batch's messages for it, which have arrived.
            states: of the batch, on each lane.
        """
        work = states[self._lead].work
        if self._lead.stream is not None:
            for lane in self._lanes[1:]:
                assert lane.stream is not None
                self._lead.stream.begin_for(lane.stream)
        if segment is self.segments[0]:
            self._begin(work, states)
        for key in needs:
            self._receive(key, states)
        self._draws.seed(work, segment.draws)
        segment.graph.replay()
        self._draws.check()
        for lane in self._lanes[1:]:
            lane.wait_for(self._lead)
        for result in segment.results:
            self._follow(result, states)
        if segment is self.segments[-1]:
            self._end(work, states)

    def _begin(self, work: Work, states: Mapping[Lane, BatchState]) -> None:
        for fixed, given in ((self._inputs, work.inputs), (self._targets, work.targets)):
            if fixed:
                _copy(fixed, given)
        for carried in self._carried:
            carried.put()
        for lane, state in states.items():
            if lane.trained.loss_scale is not None:
                self._set_scale(lane.trained.loss_scale.at(state.version.number), state)

    def _set_scale(self, scale: float | torch.Tensor, state: BatchState) -> None:
        state.loss_scale = scale
        if isinstance(scale, torch.Tensor) and self._scale is not None:
            self._scale.data.copy_(scale)
        elif not isinstance(scale, torch.Tensor) and self._scale is not None:
            self._scale.data.fill_(scale)

    def _receive(self, key: Key, states: Mapping[Lane, BatchState]) -> None:
        lane, room = self._arrivals[key.kind, key.source, key.micro_batch]
        value = lane.port.take(key)
        if key.kind is Message.GRADIENT and len(value) > len(room):
            states[lane].learn(value[len(room) :])
            value = value[: len(room)]
        _copy(room, value)

    def _follow(self, result: Part | Passed | Sent, states: Mapping[Lane, BatchState]) -> None:
        lane, state = result.lane, states[result.lane]
        with _on(lane):
            if isinstance(result, Part):
                # Copies: they are read after the next launch.
                state.part, metrics = result.loss.clone(), result.metrics
                state.metrics = metrics and metrics._replace(values=metrics.values.clone())
                if not lane.route.peers:
                    state.set_outcome(state.part)
                return
            if isinstance(result, Sent):
                value = [*result.value, *state.message()] if result.has_outcome else result.value
                lane.port.send(result.kind, result.to, state.work.batch, result.micro_batch, value)
                return
            message = state.message()
            handed = None if lane.stream is None else ready_on_event(message, lane.trained.stage.device)
        with _on(result.target):
            states[result.target].learn(message if handed is None else handed.received())

    def _end(self, work: Work, states: Mapping[Lane, BatchState]) -> None:
        for carried in self._carried:
            carried.launched()
        for lane in self._lanes:
            lane.trained.put_grads(self._grads[lane])
            lane.end_computing(states[lane])
        for (lane, m), noted in self._moments.items():
            assert lane.trained.stage.statistics is not None
            lane.trained.stage.statistics.put(work.place(lane.pipeline, m), noted)


def _leaf(room: Any, value: Any) -> Any:
    return room.detach().requires_grad_(value.requires_grad) if isinstance(room, torch.Tensor) else room


def _on(lane: Lane) -> AbstractContextManager[Any]:
    """Return the context that issues work on a lane's stream."""
    return nullcontext() if lane.stream is None else lane.stream.issuing()
