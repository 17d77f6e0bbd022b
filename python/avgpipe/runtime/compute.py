"""The forwards and backwards of micro-batches on one stage: what they receive, save and send."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from avgpipe.device import ReadyOnEvent, has_streams
from avgpipe.errors import PipelineError, StageError, reason
from avgpipe.links.link import Message, detached, tensors_of, wanting_gradients
from avgpipe.model.batch import LossWeights, sample_count, to_device
from avgpipe.model.compiled import is_compiled
from avgpipe.model.context import Position
from avgpipe.model.parts import extract_skips, insert_skips
from avgpipe.ranks.environment import named
from avgpipe.runtime.branches import Branches
from avgpipe.runtime.loss import Metrics, from_message, is_mean_by_kind, loss_of, to_message, wide
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.route import Port, Route, Step, StepKind
from avgpipe.runtime.stage import shown_shapes
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.schedule.row import Version

if TYPE_CHECKING:
    from avgpipe.runtime.group_sum import GroupSum
    from avgpipe.runtime.loss_check import LossCheck
    from avgpipe.runtime.split_backward import Deferred

_KEPT_SEEDS = 64


class Collector(Protocol):
    """Turns the last stage's outputs of an evaluated batch into its result."""

    def add(self, output: Any, target: Any, samples: int, given: Any) -> None:
        """Add the output of a micro-batch. ``given``: the loader's target, which may be on the host."""

    def result(self) -> Any:
        """Return the result that is sent to every rank."""


@dataclass
class Work:
    """A batch that a stage trains on, or evaluates.

    Attributes:
        micro_batches: how many the pipeline has of the batch; 0 if other pipelines have all of them.
        inputs: of the micro-batches; used on the first stage.
        targets: of the micro-batches; used, like ``weights``, on the last stage.
        copied: inputs and targets while they are being copied to a device.
        collector: takes an evaluation's outputs, on the last stage.
        draws: the position that seeds the first micro-batch's random numbers; None: its own position.
        idles: whether this pipeline has no batch in this step; isolated pipelines report it to each other.
        is_step: whether this counts as a step of the run, as it does if other pipelines have a batch in it.
        names: of isolated pipelines, what each publishes of it, by name.
        is_kept: whether stages keep the input of one of their micro-batches, to run it again.
        form: shapes and plain values of the whole batch, equal if its micro-batches' are; None: unknown.
    """

    batch: int
    micro_batches: int
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: LossWeights | None = None
    copied: ReadyOnEvent | None = None
    trains: bool = True
    collector: Collector | None = None
    draws: Position | None = None
    idles: bool = False
    is_step: bool = True
    names: Any = None
    is_kept: bool = False
    form: Any = None

    def place(self, pipeline: int, micro_batch: int) -> Position:
        """Return the position of a micro-batch of a ``pipeline`` in the run."""
        if self.draws is None:
            return Position(pipeline, self.batch, micro_batch)
        return self.draws._replace(micro_batch=self.draws.micro_batch + micro_batch)


class SavedForward(NamedTuple):
    """What a forward leaves for its backward.

    Without the outputs themselves: autograd keeps what it needs of them.

    Attributes:
        inputs: inputs that require gradients.
        outputs: the edges that the gradients of the outputs enter.
        grads: of the outputs, if this stage knows them, as the last one does.
        arrived: inputs that skipped stages, by arrival; see :class:`avgpipe.model.model.Skips`.
        departed: the edges that the gradients of outputs that skip stages enter, in the order of departures.
    """

    inputs: list[torch.Tensor]
    outputs: list[GradientEdge]
    grads: list[torch.Tensor] | None = None
    arrived: Sequence[list[torch.Tensor]] = ()
    departed: Sequence[GradientEdge] = ()


@dataclass
class BatchState:
    """The progress of an in-flight batch on one stage.

    Attributes:
        version: the version of the weights that the batch runs on.
        backwards_left: micro-batches whose backward has not run.
        computing_left: forwards and backwards, or parts of these, that have not run.
        losses: of micro-batches, with their factors.
        counts: the counts that the losses are sums over, if the loss function returns them.
        without_loss: micro-batches whose loss is the mean over nothing.
        has_graph: whether some loss here depends on a tensor that requires a gradient.
        loss_scale: the factor on the losses' gradients until the update; a tensor if only the device knows it.
        part: this stage replica's contribution to the loss, on the last stage.
        outcome: of the whole batch, float64, known after the last backward: the loss; or, if gradients must
            be multiplied by a factor before anything reads them, three numbers: the loss, that factor, and
            the weight of the loss.
        metrics: of the micro-batches computed here so far, then, like ``outcome``, of the whole batch.
        grads: of parameters, while they wait for the update.
        norm: of the gradients of all stages, float64, if an option needs it.
        lr: the learning rate of the update.
        skips: whether the update is left out, as far as the host knows.
        found_inf: whether it is, where only the device knows.
        issued: the event that a device has completed all steps, once they are issued.
    """

    work: Work
    version: Version
    backwards_left: int
    computing_left: int
    saved: dict[int, SavedForward] = field(default_factory=dict)
    deferred: dict[int, Deferred] = field(default_factory=dict)
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    counts: list[torch.Tensor | float] = field(default_factory=list)
    without_loss: int = 0
    has_graph: bool = False
    loss_scale: float | torch.Tensor = 1.0
    part: torch.Tensor | None = None
    outcome: torch.Tensor | None = None
    outcome_is_sent: bool = False
    metrics: Metrics | None = None
    grads: list[torch.Tensor | None] = field(default_factory=list)
    grads_are_scaled: bool = False
    norm: torch.Tensor | None = None
    lr: Any = None
    skips: bool = False
    found_inf: torch.Tensor | None = None
    updated: bool = False
    issued: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether all steps of the batch have been performed here."""
        if not self.work.trains:
            return self.computing_left == 0
        return self.updated and self.outcome is not None

    def add_metrics(self, given: Mapping[str, Any], factor: float) -> None:
        """Add the metrics of a micro-batch whose loss has this factor."""
        own = Metrics.of(given, factor, self.losses[0][0].device)
        self.metrics = own if self.metrics is None else self.metrics.plus(own)

    def sum_losses(self) -> torch.Tensor:
        """Return this replica's contribution to the loss, on the last stage: the loss, or sum and count."""
        if self.metrics is not None and self.metrics.parts < len(self.losses):
            raise StageError("loss_fn returns metrics for some micro-batches and none for others")
        device = self.losses[0][0].device if self.losses else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.without_loss and not self.losses:
            total.fill_(math.nan)
        for loss, factor in self.losses:
            total.add_(loss, alpha=factor)
        if not self.counts:
            return total
        if len(self.counts) < len(self.losses):
            raise StageError("loss_fn returns (sum, count) for some micro-batches and one number for others")
        count = torch.zeros_like(total)
        for of_one in self.counts:
            count.add_(of_one)
        return torch.stack((total, count))

    def set_outcome(self, part: torch.Tensor) -> None:
        """Set the outcome from the sum of all replicas' contributions to the loss."""
        assert self.work.weights is not None
        weight, self.outcome = self.work.weights.total, part
        is_scaled = isinstance(self.loss_scale, torch.Tensor) or self.loss_scale != 1.0
        if part.dim():
            total, count = part.unbind()
            if self.metrics is not None:
                self.metrics = self.metrics._replace(values=self.metrics.values / count)
            # Where nothing counts, the loss is 0/0 and the gradients are zero, which infinity would make NaN.
            factor = weight / (count * self.loss_scale if is_scaled else count)
            self.outcome = torch.stack((total / count, factor.nan_to_num_(math.nan, 0.0, 0.0), count))
        elif is_scaled:
            scale, device = wide(self.loss_scale, part.device), part.device
            self.outcome = torch.stack((part, scale.reciprocal(), wide(weight, device)))

    def message(self) -> list[Any]:
        """Return the outcome and the metrics as a message to other stages."""
        return to_message(self.outcome, self.metrics)

    def learn(self, message: Sequence[Any]) -> None:
        """Set the outcome and the metrics from a message that :meth:`message` made on another stage."""
        self.outcome, self.metrics = from_message(message)


class Given(NamedTuple):
    """The input of a forward."""

    work: Work
    micro_batch: int
    value: Any


class Compute:
    """Runs one stage's forwards and backwards. ``group_sum``: sums gradients over the ranks of the stage's replicas.

    Attributes:
        measures: whether the next forward counts what is saved for its backward.
        saved_bytes: what one micro-batch saves, as counted.
        kept: the input of the first forward of a batch with ``is_kept``.
    """

    def __init__(
        self,
        trained: TrainedStage,
        route: Route,
        options: TrainingOptions,
        port: Port,
        group_sum: GroupSum | None,
    ) -> None:
        self._trained, self._route, self._options = trained, route, options
        self._port, self._group_sum = port, group_sum
        self._device, self._on_cpu = trained.stage.device, not has_streams(trained.stage.device)
        self._prepared = trained.prepared
        # A prepared stage is called as a module, so that the hooks it was given run.
        run = trained.stage.forward if self._prepared is None else trained.stage
        self._layers: Callable[..., Any] = run
        if options.fuses_gradients:
            from avgpipe.runtime.fused_gradients import SummedProducts

            self._layers = SummedProducts(trained.stage, options.autocast)
        self._arrivals, self._departures = route.skips
        self._check: LossCheck | None = None
        if route.last and not is_mean_by_kind(options.loss_fn):
            from avgpipe.runtime.loss_check import LossCheck

            self._check = LossCheck(
                options.loss_fn, options.batch_dims, options.loss_kind_is_unknown, options.callers
            )
        self._seeds: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # most micro-batches share one
        self._branches = Branches()
        # A torch function mode would make compiled layers compile again.
        is_compiled_here = any(map(is_compiled, trained.stage.modules()))
        self._branches.done = options.check == "off" or is_compiled_here
        self._has_learnt = False
        self.measures = False
        self.saved_bytes = 0
        self.kept: Given | None = None

    def begin(self) -> None:
        """Begin a batch to train on, whatever its number of micro-batches here."""
        if self._group_sum is not None:
            self._group_sum.begin()

    # ---- forwards ------------------------------------------------------------------------------------------------

    def forward(self, state: BatchState, step: Step) -> None:
        m, route, batch = step.micro_batch, self._route, step.batch
        value, inputs, arrived = self._take_input(state, step)
        if state.work.is_kept and self.kept is None:
            self.kept = Given(state.work, m, detached(value))
        measures = self.measures and self._trained.stage.inputs.known  # the first forward saves copies
        run = self._measured_run if measures else self._run
        if self._options.autocast is None:
            output = run(state, m, value)
        else:
            with self.autocast():
                output = run(state, m, value)
        del value  # so that the message's memory is freed once nothing needs it
        if route.last:
            edges = edges_of(output)
            state.has_graph |= bool(edges)
            state.saved[m] = SavedForward(
                inputs, edges, [self._seed(state, m, output)] if edges else [], arrived
            )
            return
        output, parts = extract_skips(output, self._departures) if self._departures else (output, [])
        state.saved[m] = SavedForward(
            inputs, edges_of(output), None, arrived, edges_of(parts) if parts else ()
        )
        self._port.send(Message.ACTIVATION, route.at(route.stage + 1, m), batch, m, output)
        for skip, values in zip(self._departures, parts):
            self._port.send(Message.SKIP_ACTIVATION, route.at(skip.stage, m), batch, m, values)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self._options.autocast
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype)

    def evaluate(self, state: BatchState, step: Step) -> None:
        """Run a forward without a backward, and send its output on, or give it to the collector."""
        m, route, work, stage = step.micro_batch, self._route, state.work, self._trained.stage
        value, _, _ = self._take_input(state, step)
        output = stage(to_device(value, self._device), Position(route.pipeline, step.batch, m))
        if route.last:
            if work.collector is not None:
                target = to_device(work.targets[m], self._device)
                dims = self._options.batch_dims
                samples = sample_count(work.inputs[m], is_whole=work.micro_batches == 1, dims=dims)
                work.collector.add(output, target, samples, work.targets[m])
            return
        output, parts = extract_skips(output, self._departures) if self._departures else (output, [])
        self._port.send_as(route.evaluation_key(route.stage, route.stage + 1, step.batch, m), output)
        for skip, values in zip(self._departures, parts):
            self._port.send_as(route.evaluation_key(route.stage, skip.stage, step.batch, m), values)

    def _take_input(
        self, state: BatchState, step: Step
    ) -> tuple[Any, list[torch.Tensor], list[list[torch.Tensor]]]:
        """Return a micro-batch's input, its tensors that require gradients, and those of each skip."""
        if self._route.first:
            value = to_device(state.work.inputs[step.micro_batch], self._device)
        else:
            value = self._port.take(step.needs[0])
        inputs = wanting_gradients(value)
        if not self._arrivals:
            return value, inputs, []
        parts = [self._port.take(key) for key in step.needs[1:]]
        return (
            insert_skips(value, self._arrivals, parts),
            inputs,
            [wanting_gradients(values) for values in parts],
        )

    def _run(self, state: BatchState, m: int, value: Any) -> Any:
        position = state.work.place(self._route.pipeline, m)
        run = self._trained.stage.recomputed if self.recomputes(state.work, m) else self._layers
        if self._branches.done or not state.work.trains:
            output = run(value, position)
        else:
            with self._branches.looking(position.batch):
                output = run(value, position)
        return self._loss(state, m, output) if self._route.last else output

    def _measured_run(self, state: BatchState, m: int, value: Any) -> Any:
        """Run a forward and count what the micro-batch saves until its backward."""
        self.measures = False
        saved = named("avgpipe.measure.memory:SavedBytes")(
            w.untyped_storage().data_ptr() for w in self._trained.arena.weights
        )
        with saved.counting():
            output = self._run(state, m, value)
            for tensor in () if self._route.first else tensors_of(value):
                saved.count(tensor)  # held in any case: its gradient is needed
        self.saved_bytes = saved.bytes
        return output

    def recomputes(self, work: Work, m: int) -> bool:
        how = self._options.recompute
        return how == "always" or (how == "except-last" and m < work.micro_batches - 1)

    def _loss(self, state: BatchState, m: int, output: Any) -> torch.Tensor | None:
        """Return this micro-batch's loss; None when nothing in it counts."""
        work = state.work
        assert work.weights is not None
        factor = work.weights.factors[m]
        if factor == 0.0:  # a mean over nothing is 0/0, and so is its gradient
            return self._no_loss(output)
        target = to_device(work.targets[m], self._device)
        check = self._check
        try:
            if check is None or check.has_called:
                loss, count, metrics = loss_of(self._options.loss_fn, output, target)
            else:
                loss, count, metrics = check.call(output, target)
        except (PipelineError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            given = " and targets ".join(map(shown_shapes, (output, target)))
            raise StageError(
                f"loss_fn failed on micro-batch {m} of batch {work.batch}, with outputs {given}: {reason(error)}"
            ) from error
        if count is not None:
            if self._prepared is not None:
                self._prepared.refuse_late_factors()
            if self._options.loss_weight is not None:
                raise StageError(
                    "loss_fn returns (sum, count), which gives its weight: leave out Source(loss_weight)"
                )
            state.counts.append(count)
            factor = 1.0
        # Checked on the CPU alone: on a device, the host would have to wait for the answer.
        elif check is not None and self._on_cpu and check.counts_nothing(loss, output):
            state.without_loss += 1
            return self._no_loss(output)
        if check is not None and (count is not None or work.micro_batches > 1 or work.draws is not None):
            check.look(work.batch, output, target, count is not None)
        state.losses.append((loss.detach(), factor))
        if metrics:
            state.add_metrics(metrics, factor)
        return loss

    def _no_loss(self, output: Any) -> torch.Tensor | None:
        """Return the loss of a micro-batch in which nothing counts.

        In a prepared stage it has gradients of zero: other ranks wait for the collectives of the last
        backward.
        """
        parts = [] if self._prepared is None else [t.sum() for t in wanting_gradients(output)]
        return sum(parts[1:], parts[0]) * 0.0 if parts else None

    def _seed(self, state: BatchState, m: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the batch's loss by a micro-batch's, as far as it is known, times the scale."""
        weights = state.work.weights
        assert weights is not None
        # A sum over what all micro-batches count is divided by the number of samples until the count is
        # known.
        factor = 1 / weights.total if state.counts else weights.factors[m]
        factor *= weights.scale
        if isinstance(state.loss_scale, torch.Tensor):  # a power of 2: the product is as exact as the factor
            wider = torch.promote_types(loss.dtype, torch.float32)
            return (state.loss_scale.to(wider) * factor).to(loss.dtype)
        factor *= state.loss_scale
        seed = self._seeds.get((factor, loss.dtype))
        if seed is None:
            if len(self._seeds) == _KEPT_SEEDS:
                self._seeds.clear()
            seed = torch.full((), factor, dtype=loss.dtype, device=loss.device)
            self._seeds[factor, loss.dtype] = seed
        return seed

    # ---- backwards -----------------------------------------------------------------------------------------------

    def backward(self, state: BatchState, step: Step) -> None:
        """Run a micro-batch's backward, or its part for the inputs, and send the gradients of the inputs."""
        m, route = step.micro_batch, self._route
        saved = state.saved.pop(m)
        roots, grads = saved.outputs, saved.grads
        if grads is None:
            roots, grads = self._take_gradients(state, step, saved)
        state.backwards_left -= 1
        is_last = state.backwards_left == 0
        if is_last and self._group_sum is not None:
            self._group_sum.arm()
        if self._prepared is not None:
            self._prepared.begin_backward(is_last)
        try:
            if step.kind is StepKind.BACKWARD_INPUT:
                from avgpipe.runtime.split_backward import input_backward  # only for schedules that split

                state.deferred[m] = input_backward(roots, grads, [*saved.inputs, *chain(*saved.arrived)])
            elif roots:
                run_backward(roots, grads)
        except RuntimeError as error:
            _explain(error, step)
            raise
        if is_last and self._prepared is not None:
            self._trained.arena.settle_grads()
        if is_last and route.last:
            self._end_losses(state)
        if not route.first:
            message = [x.grad for x in saved.inputs]
            if is_last and not route.placement.is_replicated:
                # the batch's loss travels with its last gradient, so every stage gets it without another
                # message
                message += self._outcome_message(state)
            self._port.send(Message.GRADIENT, route.at(route.stage - 1, m), step.batch, m, message)
        for skip, tensors in zip(self._arrivals, saved.arrived):
            to = route.at(skip.stage, m)
            self._port.send(Message.SKIP_GRADIENT, to, step.batch, m, [x.grad for x in tensors])

    def _end_losses(self, state: BatchState) -> None:
        """Add up the losses of a batch, after its last backward on the last stage."""
        self._check_learns(state)
        state.part = state.sum_losses()
        if not self._route.peers:
            state.set_outcome(state.part)

    def _outcome_message(self, state: BatchState) -> list[Any]:
        """Return what is sent of a batch's outcome to the stage before."""
        return state.message()

    def backward_weight(self, state: BatchState, step: Step) -> None:
        """Run the part of a micro-batch's backward that is for the weights."""
        try:
            state.deferred.pop(step.micro_batch).run()
        except RuntimeError as error:
            _explain(error, step)
            raise

    def _check_learns(self, state: BatchState) -> None:
        """Refuse a batch whose losses give no gradient; for a share, one in an earlier batch is enough."""
        self._has_learnt |= state.has_graph
        is_share = state.work.draws is not None or self._group_sum is not None
        if state.losses and not (self._has_learnt if is_share else state.has_graph):
            raise StageError(
                "the loss leads back to no parameter that requires a gradient, so nothing would be trained: loss_fn or "
                "a layer has detached it (by detach(), item(), argmax or no_grad), or everything is frozen"
            )

    def _take_gradients(
        self, state: BatchState, step: Step, saved: SavedForward
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return the edges that the outputs' gradients enter, and these; the last message has the outcome."""
        roots = saved.outputs
        received = self._port.take(step.needs[0])
        if len(received) > len(roots):
            state.learn(received[len(roots) :])
            received = received[: len(roots)]
        if self._departures:
            roots = [*roots, *saved.departed]
            received = [*received, *chain(*(self._port.take(key) for key in step.needs[1:]))]
        pairs = [(edge, grad) for edge, grad in zip(roots, received) if grad is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]


def _explain(error: RuntimeError, step: Step) -> None:
    """Raise an error in plain words for one that torch does not explain."""
    if "a second time" in str(error):
        raise StageError(
            f"the backward of {step} reaches a graph whose backward has run: the loss, or a layer, uses a tensor of an "
            "earlier forward, such as one kept by a hook or in an attribute. Each micro-batch has a forward and a "
            "backward of its own: detach() what is kept, or let the model return it"
        ) from error


def edges_of(value: Any) -> list[GradientEdge]:
    """Return the edges that the gradients of a value's tensors enter."""
    return [get_gradient_edge(t) for t in wanting_gradients(value)]


def run_backward(edges: Sequence[GradientEdge], grads: Sequence[torch.Tensor]) -> None:
    """Run ``torch.autograd.backward`` without its shape checks, as slow as a small layer's backward.

    Autograd itself computed the gradients for these very outputs, so they fit. ``_engine_run_backward`` is
    torch's own entry for this, and private: the tests run it under the oldest and the newest torch that is
    supported.
    """
    _engine_run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
