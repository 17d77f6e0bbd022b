"""Which batches of a pipeline are launched as CUDA graphs: those of a form that has run without before.

The first batches of each form run as they would without graphs: libraries choose kernels and initialise themselves, the
checks of a run look at them, and here is found what a graph cannot repeat, and which layers draw random numbers. The
next one is captured, and from then on such a batch is launched; see :mod:`avgpipe.runtime.captured`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.device import free_cached
from avgpipe.errors import StageError, reason
from avgpipe.links.link import described, tensors_of
from avgpipe.model.context import Carry, has_hooks
from avgpipe.runtime.captured import CapturedRow, Item, Segment, segments_of
from avgpipe.runtime.compute import BatchState, Compute, Work
from avgpipe.runtime.draws import Draws, SeenDraws
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.remembered import Remembered, State, first_changed
from avgpipe.runtime.route import Route, Step, StepKind
from avgpipe.schedule.row import Action

if TYPE_CHECKING:
    from avgpipe.runtime.lane import Lane, PipelineRow
    from avgpipe.runtime.spec import Spec

_log = logging.getLogger("avgpipe")
_WARM_UPS = 2  # batches of a form that run without graphs
_FORMS = 4  # whose graphs are kept
_LEAVE = "leave CudaGraphs out"


def form_of(given: Any) -> Any:
    """Return what two batches have in common if one's graph serves the other; None if no graph can serve it."""
    leaves, structure = pytree.tree_flatten(given)
    if any(t.requires_grad or t.layout is not torch.strided for t in tensors_of(leaves)):
        return None  # gradients of the caller's own tensors; memory that is not copied as it is
    strides = [leaf.stride() if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
    try:
        return structure, strides, [(type(leaf), described(leaf)) for leaf in leaves]
    except TypeError:
        return None


@dataclass
class _Form:
    """Batches that one graph serves.

    Attributes:
        seen: by batch that ran without a graph, what layers drew.
        state: what layers and loss function remembered before the newest of these.
        restarts: how often this was another one when a graph was to be captured or launched.
    """

    form: Any
    seen: list[SeenDraws] = field(default_factory=list)
    state: State = field(default_factory=dict)
    restarts: int = 0
    row: CapturedRow | None = None


def graphs_of(
    made: dict[tuple[int, int], RowGraphs], route: Route, spec: Spec, device: torch.device
) -> RowGraphs:
    """Return what launches a pipeline's batches: as a whole if all of it is here, else each worker's part.

    ``made``: those of this process so far, by pipeline and worker.
    """
    placement = route.placement
    place = route.pipeline, placement.worker_of(route.replica) if placement.ranks > 1 else -1
    if place not in made:
        made[place] = RowGraphs(spec.options, device, spec.seed)
    return made[place]


class RowGraphs:
    """The graphs of a pipeline's batches on some lanes of this process.

    The lanes, and the rows of which they are, add themselves. Either they are the whole pipeline, or one row of it.

    Args:
        device: of the lanes.
        seed: of the run.
    """

    def __init__(self, options: TrainingOptions, device: torch.device, seed: int) -> None:
        self._options, self._device, self._seed = options, device, seed
        self.lanes: list[Lane] = []
        self.rows: list[PipelineRow] = []
        self._forms: list[_Form] = []
        self._pool: Any = None
        self._actions: dict[int, list[list[Action]]] = {}  # by batch, the actions of each row
        self._decided: dict[int, CapturedRow | None] = {}  # by batch
        self._begun = 0  # rows that have begun the newest batch
        self._left: list[Segment] = []  # of the batch that is being launched
        self._warming: tuple[int, SeenDraws] | None = None
        self._said: set[str] = set()
        self._has_run = False  # whether code of layers has run since their state was looked at

    def compute(self, *arguments: Any) -> Compute:
        """Return what runs steps without graphs, made with these arguments."""
        return WatchedCompute(self, *arguments)

    # ---- the steps of a row ------------------------------------------------------------------------------------------

    def start(self, row: PipelineRow, batch: int, actions: list[Action]) -> None:
        """Take the actions of a batch in a row; queue what decides how its forwards and backwards run."""
        self._actions.setdefault(batch, []).append(actions)
        lane = next(iter(row.lanes.values()))
        row.computing.add(Step(StepKind.BEGIN_ROW, lane.route.stage, batch, -1, (), begins=True))

    def is_ready(self, lane: Lane, step: Step) -> bool:
        """Whether a step of these kinds, whose messages have arrived, may run."""
        if step.kind is StepKind.LAUNCH:
            return self._begun == len(self.rows)  # no step of another row is left behind
        if lane is not self.lanes[0]:
            return step.batch in self._decided
        for one in self.lanes:
            if one.remote is not None:
                one.remote.collect()  # all at once: nothing rings when the next one is asked
        return all(one.is_flushed(step.batch) for one in self.lanes)

    def perform(self, lane: Lane, step: Step) -> None:
        """Perform a step of these kinds, on the lane's stream."""
        if step.kind is StepKind.LAUNCH:
            self._launch(step)
            return
        row = next(row for row in self.rows if lane in row.lanes.values())
        if lane is self.lanes[0]:
            self._decided, self._begun = {step.batch: self._decide(step.batch)}, 0
        self._begun += 1
        captured = self._decided[step.batch]
        if captured is None:
            actions = self._actions[step.batch][self.rows.index(row)]
            row.computing.put_next([own for _, own in _items(row, actions, step.batch)])
        elif lane is self.lanes[0]:  # the first row launches for all
            self._left = list(captured.segments)
            place = lane.route.stage, step.batch, -1
            row.computing.put_next(
                [Step(StepKind.LAUNCH, *place, _of_batch(s, step.batch)) for s in self._left]
            )
        if self._begun == len(self.rows):
            del self._actions[step.batch]

    def _launch(self, step: Step) -> None:
        captured = self._decided[step.batch]
        assert captured is not None
        segment = self._left.pop(0)
        if segment.graph is None:
            self._guarded(lambda: captured.capture(segment))
            self._pool = captured.pool
        states = {lane: state for lane in self.lanes if (state := lane.state_of(step.batch)) is not None}
        lead, *others = self.lanes
        with ExitStack() as shown:  # the timeline has a launch on each stage, though one lane's stream has it
            for lane in others:
                if lead.stream is None:
                    break
                place = lane.route.replica, lane.pipeline, step.batch, step.micro_batch, step.kind.value
                shown.enter_context(lead.stream.noting(place))
            captured.launch(segment, step.needs, states)

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def warming(self, batch: int) -> SeenDraws | None:
        """Return what notes the draws of a batch, if a graph is captured after it."""
        return self._warming[1] if self._warming is not None and self._warming[0] == batch else None

    def _decide(self, batch: int) -> CapturedRow | None:
        """Return the graphs that run a batch; None if it runs without."""
        state = self.lanes[0].state_of(batch)
        assert state is not None
        work, self._warming = state.work, None
        if work.form is None or work.micro_batches == 0 or work.is_kept:
            return None
        weights = work.weights
        schedule = [row.actions for row in self.rows], work.micro_batches
        carried = [sorted(carry.values) for lane in self.lanes for carry in lane.trained.stage.carries]
        share = weights and (weights.factors, weights.total, weights.scale, weights.shares)
        form = work.form, schedule, carried, share
        found = next((one for one in self._forms if one.form == form), None)
        if found is None:
            if len(self._forms) == _FORMS:
                self._say("batches have more than %d forms: further ones run without CUDA graphs", _FORMS)
                return None
            found = _Form(form)
            self._forms.append(found)
        if len(found.seen) == _WARM_UPS and (changed := self._changed(found)):
            self._restart(found, changed)
        if len(found.seen) < _WARM_UPS:
            found.seen.append(SeenDraws(self._device))
            found.state = self._remembered.all()
            self._warming = batch, found.seen[-1]
            return None
        if found.row is None or not found.row.is_current:
            found.row = self._new_row(found, work)
        return found.row

    def _changed(self, form: _Form) -> str | None:
        """Return what layers or the loss function keep that is another one than it was."""
        has_run, self._has_run = self._has_run, False
        remembered = self._remembered
        now = remembered.all() if has_run or form.row is None else remembered.outside()
        return first_changed(now, form.state)

    def _restart(self, form: _Form, changed: str) -> None:
        """Run without graphs again, as what a form's graph has captured is not true any more."""
        if form.row is None and form.restarts:
            raise StageError(
                f"CudaGraphs(): {changed!r} is assigned in each batch, of which a graph would keep the first value: "
                f"change a tensor in place, as by add_(), keep it in an avgpipe.Carry, draw random numbers on the "
                f"device by its default generator, or {_LEAVE}"
            )
        self._say("%r has changed: batches run without CUDA graphs, and are captured again", changed)
        form.seen, form.row, form.restarts = [], None, form.restarts + 1

    def _new_row(self, form: _Form, work: Work) -> CapturedRow:
        self._check(form)
        if self._pool is None:
            free_cached(self._device)  # graphs cannot use the allocator's cache
        lane = self.lanes[0]
        rows = [
            _items(row, actions, work.batch) for row, actions in zip(self.rows, self._actions[work.batch])
        ]
        segments = segments_of(rows, self.lanes)
        draws = Draws(self._device, self._seed, lane.pipeline, form.seen[-1].drawings)
        return CapturedRow(self.lanes, segments, work, self._options, draws, self._pool)

    def _guarded(self, capture: Any) -> None:
        try:
            capture()
        except (RuntimeError, StageError) as error:
            stages = ", ".join(str(lane.route.stage) for lane in self.lanes)
            raise StageError(
                f"stage {stages} cannot be captured as a CUDA graph: {reason(error)}; {_LEAVE}"
            ) from error

    # ---- what a graph cannot repeat ----------------------------------------------------------------------------------

    def _check(self, form: _Form) -> None:
        """Refuse layers that do something else in each batch, as far as two batches show it."""
        elsewhere = sorted(set().union(*(seen.elsewhere for seen in form.seen)))
        if elsewhere:
            raise StageError(
                f"CudaGraphs(): a layer draws from a generator of the host ({', '.join(elsewhere)}), whose draws a "
                f"graph would repeat: draw on the device, or {_LEAVE}"
            )
        if any(seen.drawings != form.seen[0].drawings for seen in form.seen):
            raise StageError(
                f"CudaGraphs(): layers draw random numbers in some batches and not in others, which a graph cannot: "
                f"{_LEAVE}"
            )
        hooked = [name for lane in self.lanes for name, module in _modules(lane) if has_hooks(module)]
        if hooked:
            self._say(
                "modules with hooks (%s): in batches that are launched as CUDA graphs no code of a hook runs, only the "
                "work on the device that it issued when the graph was captured",
                hooked[0],
            )

    @cached_property
    def _remembered(self) -> Remembered:
        has_last = any(lane.route.last for lane in self.lanes)
        modules = (
            (f"stage {lane.route.stage}: {name}", m) for lane in self.lanes for name, m in _modules(lane)
        )
        return Remembered(modules, {"loss_fn": self._options.loss_fn} if has_last else {})

    def note_run(self) -> None:
        """Note that code of layers runs, which may change what they keep."""
        self._has_run = True

    def _say(self, text: str, *values: Any) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, *values)


def _items(row: PipelineRow, actions: Sequence[Action], batch: int) -> list[Item]:
    """Return the forwards and backwards of a batch, each with its lane."""
    return [
        (lane := row.lanes[action.stage], lane.step(StepKind(action.kind.value), batch, action.micro_batch))
        for action in actions
        if action.micro_batch is not None
    ]


def _modules(lane: Lane) -> Iterator[tuple[str, nn.Module]]:
    return ((n, m) for n, m in lane.trained.stage.layers.named_modules() if not isinstance(m, Carry))


def _of_batch(segment: Segment, batch: int) -> tuple[Any, ...]:
    return tuple(key._replace(batch=batch) for key in segment.needs)


class WatchedCompute(Compute):
    """Runs steps, and notes what layers draw in batches after which a graph is captured."""

    def __init__(self, graphs: RowGraphs, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._graphs = graphs

    def forward(self, state: BatchState, step: Step) -> None:
        self._graphs.note_run()
        seen = self._graphs.warming(step.batch)
        with nullcontext() if seen is None else seen.watching(step):
            super().forward(state, step)

    def backward(self, state: BatchState, step: Step) -> None:
        seen = self._graphs.warming(step.batch)
        with nullcontext() if seen is None else seen.watching(step):
            super().backward(state, step)

    def evaluate(self, state: BatchState, step: Step) -> None:
        self._graphs.note_run()
        super().evaluate(state, step)
