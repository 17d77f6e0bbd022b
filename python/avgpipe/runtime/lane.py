"""One pipeline on one worker: its stages' steps, queued in the order of the schedule's row.

A row's forwards and backwards are one queue. Updates have another queue on each stage: they may have to wait
for other stages, as for the norm of all gradients, while forwards and backwards of later batches run if no
batch needs the update at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from avgpipe.elastic.flat import Arena
from avgpipe.links.link import Key, Message
from avgpipe.runtime.compute import BatchState, Compute, Work
from avgpipe.runtime.loss import end_message
from avgpipe.runtime.route import Port, Route, Step, StepKind
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.update import SCALING, Update
from avgpipe.schedule import Action, Kind, Row, RowCursor
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.between import SharedBatches
    from avgpipe.runtime.graphs import RowGraphs
    from avgpipe.runtime.policy import Peers
    from avgpipe.runtime.streams import LaneStream

_STEPS = {kind: StepKind(kind.value) for kind in Kind}
WHOLE_ROWS = StepKind.BEGIN_ROW, StepKind.LAUNCH


class Lane:
    """One pipeline's part of one stage replica: what it computes, its updates, and the batches in flight.

    Args:
        overlaps: whether forwards and backwards may run while an update waits, as no batch in flight needs
            it.
        remote: pipelines of other processes, dedicated or isolated; None without any.
        stream: where the steps run; None for a CPU.
        shared: the other pipelines' part of batches that they share; None if each has its own batches.
        graphs: launches whole batches; None without that option.
    """

    def __init__(
        self,
        trained: TrainedStage,
        route: Route,
        port: Port,
        compute: Compute,
        update: Update,
        overlaps: bool,
        remote: Peers | None = None,
        stream: LaneStream | None = None,
        shared: SharedBatches | None = None,
        graphs: RowGraphs | None = None,
    ) -> None:
        self.trained, self.route, self.port = trained, route, port
        self.compute, self.update, self.remote, self.stream = compute, update, remote, stream
        self.pipeline = route.pipeline
        self.updates = Queue({route.stage: self})
        self._planned: deque[int] = deque()  # batches whose update is not queued yet
        self._overlaps = overlaps
        self._in_flight: dict[int, BatchState] = {}  # by batch, oldest first
        self.next_versions = [Version(0)]  # of the next batches, as far as a version may exist already
        self._place = route.replica, route.pipeline
        self._shared, self.graphs = shared, graphs
        if graphs is not None:
            graphs.lanes.append(self)
        if shared is not None:
            shared.lanes.append(self)
            update.share_factor = partial(shared.factor, self)
            update.squared_norm = partial(shared.squared_norm, self)
        # Called just before each step of training.
        self.watchers: tuple[Callable[[Lane, Step], None], ...] = ()

    # ---- batches -------------------------------------------------------------------------------------------------

    @property
    def oldest_batch(self) -> int | None:
        return next(iter(self._in_flight), None)

    def start(self, work: Work, version: Version, backwards: int, computing: int) -> None:
        """Begin a batch on a ``version`` of the weights, with its numbers of backwards and of all steps."""
        state = self._in_flight[work.batch] = BatchState(work, version, backwards, computing)
        if work.trains:
            self.compute.begin()
        if work.micro_batches == 0:  # other pipelines have the whole batch
            state.outcome = torch.zeros((), dtype=torch.float64)
        if self.stream is not None:
            self.stream.begin(work.copied)

    def has_ended(self, batch: int) -> bool:
        return self._in_flight[batch].has_ended

    def finish(self, batch: int) -> BatchState:
        """Remove a batch that has ended, and return its state."""
        state = self._in_flight.pop(batch)
        if self.stream is not None:
            self.stream.end(state.issued)
        return state

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self, kind: StepKind, batch: int, micro_batch: int) -> Step:
        """Return a step of training."""
        route = self.route
        begins = kind is StepKind.FORWARD and micro_batch <= len(route.peers)
        return Step(kind, route.stage, batch, micro_batch, route.needs(kind, batch, micro_batch), begins)

    def plan_update(self, batch: int) -> None:
        """Queue the update after the last forward or backward of a batch, and after earlier updates."""
        self._planned.append(batch)
        self._queue_updates()

    def _queue_updates(self) -> None:
        while self._planned and self._in_flight[self._planned[0]].computing_left == 0:
            batch = self._planned.popleft()
            for kind in self.route.update_steps:
                self.updates.add(self.step(kind, batch, -1))

    def missing(self, step: Step) -> list[Key]:
        """Return the messages that a step still waits for."""
        found = [k for k in step.needs if k not in self.port.messages]
        return found if found or self.remote is None else self.remote.missing()

    def is_ready(self, step: Step) -> bool:
        for key in step.needs:
            if key not in self.port.messages:
                return False
        if self.remote is not None:
            self.remote.collect()
        if step.micro_batch < 0:
            if step.kind in WHOLE_ROWS:
                return self.graphs is not None and self.graphs.is_ready(self, step)
            if self._shared is not None and not self._knows_enough(step, self._shared):
                return False
            if step.kind not in (StepKind.PUBLISH, StepKind.UPDATE):
                return True
            may = step.kind is StepKind.PUBLISH or (self.trained.settled and self.trained.ready)
            return may and (self.remote is None or self.remote.may_perform(step))
        due = self.updates.head
        if due is not None and due.batch < step.batch and not self._overlaps:
            return False  # the earlier batch's update goes first
        if not step.begins:
            return True
        versions = self.trained.versions
        is_made = versions is None or self._in_flight[step.batch].version.number <= versions.newest
        return self.trained.settled and is_made

    def advance(self, step: Step) -> None:
        """Perform a step; the messages that it needs must have arrived."""
        state = self._in_flight[step.batch]
        self.port.sent_at = None
        if self.stream is None:
            self._perform(state, step)
        else:
            is_shown = state.work.trains and step.kind is not StepKind.BEGIN_ROW
            place = (*self._place, step.batch, step.micro_batch, step.kind.value) if is_shown else None
            receive = partial(self.port.receive, step.needs)
            with self.stream.step(place, step.begins, step.kind is StepKind.UPDATE, receive):
                self._perform(state, step)
                if state.has_ended:
                    state.issued = self.stream.issued()

    def _perform(self, state: BatchState, step: Step) -> None:
        kind = step.kind
        for watch in self.watchers:
            watch(self, step)
        if step.micro_batch < 0:
            if step.kind in WHOLE_ROWS:
                assert self.graphs is not None
                self.graphs.perform(self, step)
                return
            with self._gradients_of(state):
                others = [s.version for s in self._in_flight.values() if not s.updated and s is not state]
                self.update.perform(state, step, [*others, *self.next_versions])
        elif not state.work.trains:
            self.compute.evaluate(state, step)
            state.computing_left -= 1
        else:
            if self.trained.versions is not None:
                self.trained.versions.show(state.version)
            if kind is StepKind.FORWARD:
                if step.begins and self.trained.loss_scale is not None:
                    state.loss_scale = self.trained.loss_scale.at(state.version.number)
                self.compute.forward(state, step)
            elif kind is StepKind.BACKWARD_WEIGHT:
                self.compute.backward_weight(state, step)
            else:
                self.compute.backward(state, step)
            state.computing_left -= 1
            if state.computing_left == 0:
                if self._overlaps:
                    state.grads = self.trained.take_grads()  # before the next batch adds its own
                self._queue_updates()
        if state.outcome is not None and not state.outcome_is_sent:
            self._send_outcome(state)
        if step.kind is StepKind.UPDATE and state.outcome is not None:
            for to in self.route.result_receivers:
                end = end_message(state.outcome, state.metrics, state.norm, state.lr)
                self.port.send(Message.LOSS, to, step.batch, -1, end)

    def _send_outcome(self, state: BatchState) -> None:
        state.outcome_is_sent = True
        for to in self.route.loss_receivers:
            self.port.send(Message.LOSS, to, state.work.batch, -1, state.message())

    # ---- whole rows --------------------------------------------------------------------------------------------------

    def is_flushed(self, batch: int) -> bool:
        """Whether a batch may begin that runs as a whole: the earlier ones are done."""
        due = self.updates.head
        return (due is None or due.batch >= batch) and self.trained.settled

    def end_computing(self, state: BatchState) -> None:
        """Continue as after the last backward of a batch, whose forwards and backwards have run as a whole."""
        state.backwards_left = state.computing_left = 0
        state.has_graph = True
        if state.outcome is not None:
            self._send_outcome(state)
        self._queue_updates()

    # ---- batches that pipelines share --------------------------------------------------------------------------------

    def _knows_enough(self, step: Step, shared: SharedBatches) -> bool:
        """Whether a step of an update has what it needs to know of the other pipelines' part of the batch."""
        if step.kind is StepKind.ADD_NORM and not shared.has_gradients(step.batch):
            return False
        state = self._in_flight[step.batch]
        waits = step.kind in SCALING and not state.grads_are_scaled
        is_divided = state.outcome is not None and state.outcome.dim() > 0
        return not (waits and is_divided) or shared.knows_counts(step.batch)

    def state_of(self, batch: int) -> BatchState | None:
        return self._in_flight.get(batch)

    def has_gradient(self, batch: int) -> bool:
        """Whether the gradient of a batch is complete here, and not used yet."""
        head = self.updates.head
        return head is not None and head.kind is StepKind.ADD_NORM and head.batch == batch

    def finish_gradient(self, batch: int) -> Arena:
        """Return what holds the gradient of a batch, multiplied by its late factors."""
        self.update.scale(self._in_flight[batch])
        return self.trained.arena

    def wait_for(self, other: Lane) -> None:
        """Order what this lane issues next after what the other lane has issued."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_for(other.stream)

    @contextmanager
    def _gradients_of(self, state: BatchState) -> Iterator[None]:
        """Give parameters this batch's gradients inside, as those of a later batch may already be there."""
        if not self._overlaps:
            yield
            return
        newer = self.trained.take_grads()
        self.trained.put_grads(state.grads)
        yield
        state.grads = self.trained.take_grads()
        self.trained.put_grads(newer)

    def resume(self, batches: int) -> None:
        """Continue with weights that were replaced, after ``batches`` in all; none is in flight."""
        if self.trained.loss_scale is not None:
            self.trained.loss_scale.resume(self.trained.updates)
        if self.remote is not None:
            self.remote.resume(batches)


class Queue:
    """Steps of one pipeline that run in turn, on the stages of ``lanes``. ``head``: the next one."""

    def __init__(self, lanes: Mapping[int, Lane]) -> None:
        self._lanes = lanes
        self.head: Step | None = None
        self._rest: deque[Step] = deque()

    def add(self, step: Step) -> None:
        if self.head is None:
            self.head = step
        else:
            self._rest.append(step)

    def put_next(self, steps: Iterable[Step]) -> None:
        """Insert steps behind the head."""
        self._rest.extendleft(reversed(list(steps)))

    def pop(self) -> None:
        self.head = self._rest.popleft() if self._rest else None

    def lane_of(self, step: Step) -> Lane:
        return self._lanes[step.stage]

    @property
    def next(self) -> tuple[Lane, Step]:
        """The next step, which must exist, and its lane."""
        assert self.head is not None
        return self._lanes[self.head.stage], self.head


class PipelineRow:
    """One pipeline's row of the schedule on one worker.

    Args:
        lanes: of the worker's stages.
        row: what the worker runs in turn.
        weights: which version of the weights a batch runs on; see :class:`avgpipe.schedule.RowCursor`.
        first_row: of the first stage's worker.
        warmup: batches at the beginning that run on the newest weights.
    """

    def __init__(
        self, lanes: Sequence[Lane], row: Row, weights: str, first_row: Row, warmup: int = 0
    ) -> None:
        self.pipeline = lanes[0].pipeline
        self.lanes = {lane.route.stage: lane for lane in lanes}
        self._graphs = lanes[0].graphs
        if self._graphs is not None:
            self._graphs.rows.append(self)
        self.computing = Queue(self.lanes)
        self._weights, self._warmup = weights, warmup
        self.follow(row, first_row)

    def follow(self, row: Row, first_row: Row) -> None:
        """Switch to another row; no batch is in flight."""
        self._cursor = RowCursor(row, self._weights, first_row, self._warmup)
        self.actions = row
        self._counted: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def queues(self) -> list[Queue]:
        return [self.computing, *(lane.updates for lane in self.lanes.values())]

    def start(self, work: Work) -> None:
        """Begin a batch, and queue the steps whose order is fixed now."""
        for stage, lane in self.lanes.items():
            lane.start(work, self._next_versions(stage)[0], *self._counts(stage, work.micro_batches))
        actions = self._cursor.begin(work.batch, work.micro_batches)
        if self._graphs is None:
            self._enqueue(actions)
            return
        self._enqueue([pair for pair in actions if pair[0].micro_batch is None])
        self._graphs.start(self, work.batch, [action for action, _ in actions])

    def _counts(self, stage: int, micro_batches: int) -> tuple[int, int]:
        """Count the backwards, and all forwards and parts of backwards, that a batch has on a stage."""
        found = self._counted.get((stage, micro_batches))
        if found is None:  # most batches have the same number
            kinds = [
                a.kind for a in self.actions if a.stage == stage and a.micro_batch in range(micro_batches)
            ]
            found = self._counted[stage, micro_batches] = kinds.count(Kind.FORWARD), len(kinds)
        return found

    def drain(self) -> None:
        """Queue the remaining steps, as no other batch follows for now."""
        self._enqueue(self._cursor.end())

    def evaluate(self, work: Work) -> None:
        """Queue the forwards of an evaluated batch, on the stages that this worker evaluates."""
        lanes = [lane for lane in self.lanes.values() if lane.route.evaluates]
        for lane in lanes:
            lane.start(work, Version(0), backwards=0, computing=work.micro_batches)
        for m in range(work.micro_batches):
            for lane in lanes:
                needs = lane.route.evaluation_needs(work.batch, m)
                self.computing.add(Step(StepKind.FORWARD, lane.route.stage, work.batch, m, needs))

    def resume(self, batches: int) -> None:
        """Continue with weights that were replaced, after ``batches`` in all; none is in flight."""
        updates = max(lane.trained.updates for lane in self.lanes.values())
        self._cursor.resume(updates, max(0, self._warmup - batches))
        for lane in self.lanes.values():
            lane.resume(batches)

    def _enqueue(self, actions: Iterable[tuple[Action, int]]) -> None:
        for action, batch in actions:
            lane, m = self.lanes[action.stage], action.micro_batch
            if m is None:
                lane.plan_update(batch)
            else:
                self.computing.add(lane.step(_STEPS[action.kind], batch, m))
        for stage, lane in self.lanes.items():
            lane.next_versions = self._next_versions(stage)

    def _next_versions(self, stage: int) -> list[Version]:
        """Return the next batches' versions; those of later ones do not exist before this one begins."""
        cursor = self._cursor
        return [
            Version(cursor.version(stage, n), cursor.delay(stage, n))
            for n in range(1 + cursor.steady_delay(stage))
        ]
