"""Train a model as pipelines of stages: the public face of the runtime."""

from __future__ import annotations

import atexit
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from avgpipe.device import has_streams, select
from avgpipe.errors import PipelineError
from avgpipe.model.batch import LossFn, pair, plain, sample_count, split
from avgpipe.model.context import CallerModes, Modes, is_evaluated, tells_modes_apart
from avgpipe.model.outside import warn_of_graphs
from avgpipe.plan import Plan
from avgpipe.ranks.environment import GENERATION, SPARE, STORE_FILE, keep_freed_memory, named, pipeline_here
from avgpipe.ranks.world import World
from avgpipe.runtime.evaluate import (
    EvaluationResult,
    MetricFn,
    MetricSums,
    result_of,
    run_evaluation,
)
from avgpipe.runtime.feed import BatchResult
from avgpipe.runtime.inspection import Inspection
from avgpipe.runtime.keeping import Keeping
from avgpipe.runtime.options import Extension, OptimizerFn, SchedulerFn, TrainingOptions
from avgpipe.runtime.policy import Policy
from avgpipe.runtime.session import LOST, Session, recovering
from avgpipe.runtime.spec import Spec

if TYPE_CHECKING:  # slow to import, or unused by most pipelines
    import avgpipe.fault.membership
    import avgpipe.planning.advance
    import avgpipe.planning.costs
    import avgpipe.runtime.distances
    import avgpipe.timeline.timeline

_log = logging.getLogger("avgpipe")
_PATIENCE_S, _FAILED_PATIENCE_S = 60.0, 0.5  # for the other workers to receive the last messages


class Pipeline(Inspection, Keeping):
    """Trains ``plan.pipelines`` replicas of a model together, each cut into ``plan.stages`` stages.

    Every rank builds the same model and Pipeline. With a default process group, or torchrun's environment, there
    must be one rank per worker of the plan; alone, the process runs all stages. ``model`` is copied, not changed:
    ``state_dict`` returns the trained weights.

    Args:
        model: ``nn.Sequential``, a list of modules, an unchanged model of most families of transformers (see
            ``avgpipe.model.transformers``), a module that torch.fx can trace, or, with ``example_inputs``, one that
            torch.export can; or one of these in a PeftModel whose adapters are in the layers, such as LoRA's:
            frozen parameters stay frozen, and names are the PeftModel's.
        plan: how to cut, schedule and average.
        loss_fn: ``loss_fn(output, target)`` returns a scalar, the mean over samples, or a sum if its
            attribute ``reduction`` is "sum"; or ``(sum, count)``, a scalar and its divisor over the whole
            batch, such as the number of targets that are not ignored. A scalar of unknown kind is taken for a
            mean over samples; if the first batch shows that it is none, there is a warning. Either may have
            metrics, ``(loss, {"name": value})``, numbers or tensors without a dimension, which are combined
            as the loss is: means if it is a mean, sums if it is a sum, and beside ``(sum, count)`` sums that
            the same count divides.
        optimizer: ``optimizer(params)`` returns a torch optimizer of a stage's parameters, or a list of several, each
            parameter in exactly one, which step in turn. If its first parameter is called ``named_params`` or
            ``named_parameters``, it gets pairs (name, parameter) instead, as torch's optimizers accept too;
            names are those of the unsplit model, as in ``state_dict``, of a tied parameter the first.
            Optimizers with ``train()`` and ``eval()``, such as schedule-free ones, require a single pipeline:
            evaluation uses their weights for it.
        lr_scheduler: ``lr_scheduler(optimizer)`` is stepped after every batch of a pipeline; each of several
            optimizers has one.
        clip_grad_norm: limit of the norm of a batch's gradient over all stages; ``math.inf`` measures it alone, for
            ``result.grad_norm``. Pipelines that share a batch wait for each other's gradients of it.
            Pipelines that are isolated, or have workers of their own, do not: there it limits each one's
            share.
        accumulate: how many batches of the loader make one update, like one batch of all their samples. The
            plan's ``micro_batches`` count those of each, so activations take no more memory, except with
            schedules that keep all of a batch, such as "gpipe"; and shapes may differ between the batches. At
            the end of a loader, the rest makes an update. ``batch`` then means all of them, in results too.
        device: by default that of the model's parameters. "cuda", or another accelerator without a number:
            under torchrun the device with this rank's local number, else the current one. It becomes the
            calling thread's current device.
        seed: of the layers' random numbers, which depend on it, the pipeline, batch, micro-batch and layer
            alone.
        timeout_s: the limit of every wait for another worker, in seconds. At the start it is longer, by as long as this
            process has taken to get here (at most 300 s), as others may take longer under load.
        link: how tensors are sent between workers: "auto" (shared memory between processes of one host,
            device memory if they share a CUDA device, NCCL if each has one, torch.distributed between hosts),
            or the name of one.
        example_inputs: one batch's inputs, as the loader yields them. With these torch.export traces models
            that torch.fx cannot, layers of a traced model are proved to compute what it does, the default cut
            balances the computation of forward and backward, and ``print(pipeline)`` shows the sizes of
            messages between stages. Shapes must be the same on all ranks. Later batches may have other batch
            sizes, and other sizes as far as the model's code allows. The example also decides which arguments
            of a traced model
            batches give: without it, a model whose forward checks whether an argument is None is called without
            those that are None by default.
        extensions: further options, each an object, given at most once: ``avgpipe.Precision``, ``Compile``,
            ``CudaGraphs``, ``MovingAverage``, ``BitChecks``, ``Copies``, ``Audit``, ``Source``, ``WeightsFrom``,
            ``Ranks``, ``MemoryLimit``, and those of classes of your own, see ``avgpipe.Extension``.

    Raises:
        ValueError: if the plan does not fit the model or the ranks. Failures of a run are ``PipelineError``.
    """

    @torch.inference_mode(False)  # modes of the caller in which weights could not train
    @torch.enable_grad()
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        plan: Plan,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        lr_scheduler: SchedulerFn | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout_s: float = 300,
        link: str = "auto",
        example_inputs: Any = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        if SPARE in os.environ:
            named("avgpipe.fault.generation:become_a_rank")(first=_import_late)
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be an avgpipe.Plan, not {plan!r}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
        options = TrainingOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            clip_grad_norm=clip_grad_norm,
            recompute=plan.recompute,
            link=link,
            measures=plan.advance == "auto",
            accumulate=accumulate,
            keeps_modes=not is_evaluated([model] if isinstance(model, nn.Module) else model),
            loss_modes=Modes(loss_fn) if isinstance(loss_fn, nn.Module) else None,
            extensions=tuple(extensions),
        )
        if extensions:
            options = named("avgpipe.options:configured")(options, plan)
        policy = _policy(plan, options.copies)
        spec = Spec.of(
            model,
            plan,
            options,
            device=device,
            seed=seed,
            timeout_s=timeout_s,
            example_inputs=plain(example_inputs),
        )
        policy.check(spec)
        _prepare_process(spec)
        self._stepped = self._predicted = 0  # calls of step and predict
        self.plan, self._spec = plan, spec
        self._session = Session(spec, policy)
        self._warn_of_model()
        if plan.advance == "auto":
            self._session.auto = named("avgpipe.measure.running:AutoAdvance")(options.memory_limit_bytes)
        atexit.register(_close, weakref.ref(self))
        policy.begin(self._session)

    def _warn_of_model(self) -> None:
        """Warn of what is seen of the model alone."""
        spec, options = self._spec, self._spec.options
        if self.world.rank:
            return
        if not options.keeps_modes and tells_modes_apart(spec.layers):
            _log.warning(
                "the model is in evaluation mode as a whole, like one that was just loaded, and is trained in training "
                "mode, with its dropout and batch statistics: call model.train() to confirm, and eval() of the modules "
                "that must stay in evaluation mode"
            )
        if options.check != "off" and spec.plan.stages > 1:
            warn_of_graphs(module for layer in spec.layers for module in layer.modules())

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, loader: Iterable[Any]) -> Iterator[BatchResult]:
        """Train on the batches of ``loader`` and yield their results in order.

        A batch is a pair (inputs, targets), or a mapping with the targets as "labels", as collators of transformers
        make it, and all else as inputs.

        The pipelines share each batch, or take turns: see ``Plan.batch``. They stream: when the result of batch j is
        yielded, the next one is in flight, of batches taken in turn the next N - 1, and on an accelerator at
        least one. Calls between results (``evaluate``, ``save``) finish these first.

        The loader is a batch ahead: the one after batch j is fetched before the result of j is yielded. So
        settings of the loader that the loop's body changes then, such as a difficulty, apply a batch later
        than in a plain loop, and if both draw from one generator, the loader draws first.
        """
        session = self._session
        session.drain()
        self._forget_results()  # of batches that an abandoned loop left in flight
        session.loader.open(loader)
        session.worker.alike.begin_anew()
        while True:
            try:
                ended = session.train_on()
            except LOST as loss:
                session.policy.recover(session, loss)
                continue
            if ended:
                return
            if session.feed.results:  # otherwise a replaced rank lost them, and they are trained on again
                result, _ = session.feed.results.popleft()
                yield result

    def step(self, inputs: Any, targets: Any) -> float:
        """Train on a batch for a round: every pipeline on its share of the samples. Wait, and return the mean loss.

        It is one update by itself, whatever ``accumulate`` is. The loss is NaN if nothing counts, as with all
        targets ignored.
        """
        session = self._session
        n = self.plan.batches_per_round if session.policy.pipeline is None else 1
        session.drain()
        self._forget_results()
        if session.auto is not None:
            session.auto.look(session)
        inputs, targets = plain(inputs), plain(targets)
        dims = self._spec.options.batch_dims
        samples = sample_count(inputs, targets, n == self.plan.micro_batches == 1, dims)
        if samples < n:
            raise ValueError(
                f"{samples} samples are too few for {n} pipelines, each of which trains on a share of them"
            )
        shares = split(inputs, n, samples, dims.inputs), split(targets, n, samples, dims.targets)
        session.loader.give([[share] for share in zip(*shares)])
        self._stepped += 1
        with session.worker.alike.loop("step", seen=self._stepped - 1):
            session.until_done(session.train_on_given)
        counted = [(result.loss, weight) for result, weight in session.feed.results if weight]
        self._forget_results()
        if session.is_due:
            session.verify()
        weight = sum(weight for _, weight in counted)
        return sum(loss * weight for loss, weight in counted) / weight if counted else math.nan

    def _forget_results(self) -> None:
        self._session.feed.results.clear()

    def drain(self) -> None:
        """Finish the batches that are in flight."""
        self._session.drain()

    def enter(self) -> int:
        """Join a run of isolated pipelines before the first batch; otherwise train() joins it.

        If others train already, it returns once this pipeline has their state; they then wait for its first
        batch, which is number ``batches``.

        Returns:
            How many results they have had, each of a batch or of what was left of it; 0 at the beginning of a run.
        """
        return self._session.policy.enter(self._session)

    @recovering
    def once(self, what: str, find: Callable[[], Any]) -> Any:
        """Return, on every rank of all pipelines, what ``find()`` returns on one of them, sent as JSON.

        For values that decide how training goes on, and may differ between ranks, such as from a clock or a
        file. Batches in flight are finished first. Every rank calls it, after the same batch, with the same
        name ``what``.
        """
        session = self._session
        session.drain()

        def find_here() -> Any:
            return session.world.gather(find())[0]

        with session.worker.running():
            return session.policy.once(session, what, find_here)

    # ---- using the model -----------------------------------------------------------------------------------------

    @recovering
    def evaluate(
        self, loader: Iterable[Any], metric_fn: MetricFn | None = None, *, weights: str | int = "reference"
    ) -> EvaluationResult:
        """Return the mean loss, and mean of ``metric_fn(output, target)`` per sample; batches may have any size.

        ``metric_fn`` is the mean over the samples of its arguments, a number or a dict of numbers by name.
        ``weights``: "reference", "ema" (see ``avgpipe.MovingAverage``), or the index of a pipeline. Training continues
        unchanged afterwards.
        """
        session, options = self._session, self._spec.options
        session.drain()
        which = self._which(weights)
        batches = map(pair, _not_empty(loader))
        loss_modes = options.loss_modes
        evaluating: AbstractContextManager[None] = (
            nullcontext() if loss_modes is None else loss_modes.evaluating()
        )

        def evaluate(modes: CallerModes) -> dict[str, Any]:
            sums, given = partial(MetricSums, options, metric_fn), modes.made_outside(batches)
            with session.worker.alike.loop(f"evaluation {session.worker.evaluated}"):
                parts = list(run_evaluation(session.worker, self.plan.micro_batches, which, given, sums))
                session.worker.alike.end(session.worker.evaluated)
            return asdict(result_of(parts, options.sums_loss, metric_fn is not None))

        if isinstance(which, int):
            session.policy.come_in(session)
            with evaluating, session.settling() as modes:
                return EvaluationResult(**evaluate(modes))
        with evaluating, session.settling() as modes:
            found = session.policy.once(session, f"evaluation of {which}", partial(evaluate, modes))
            # Reads the loader to its end, so that a generator it draws from is the same in all pipelines.
            deque(modes.made_outside(batches), maxlen=0)
        return EvaluationResult(**found)

    @recovering
    def predict(self, inputs: Any, *, weights: str | int = "reference") -> Any:
        """Return the model's output for a batch of any size, in evaluation mode, on every rank.

        ``inputs`` are those of a pair; of a collator's mapping, all but "labels". ``weights``: as in
        :meth:`evaluate`.
        """
        session = self._session
        which, inputs = self._which(weights), plain(inputs)
        # Raises for wrong inputs before the pipeline starts.
        dims = self._spec.options.batch_dims
        named("avgpipe.runtime.outputs:check_inputs")(inputs, self.plan.micro_batches, dims)
        session.policy.come_in(session)
        self._predicted += 1
        with session.idle(), session.worker.alike.loop("predict", seen=self._predicted - 1):
            outputs_of = named("avgpipe.runtime.outputs:outputs_of")
            output, refusal = outputs_of(session.worker, self.plan.micro_batches, which, inputs, dims)
        if refusal is not None:
            raise ValueError(refusal)
        return output

    @property
    def world(self) -> World:
        """The ranks of this pipeline."""
        return self._session.world

    @property
    def launcher(self) -> avgpipe.fault.membership.Membership | None:
        """The connection to the launcher of isolated pipelines; None elsewhere."""
        return self._session.policy.launcher  # type: ignore[no-any-return]

    @property
    def batches(self) -> int:
        """Batches begun so far, over all pipelines; of batches taken in turn the next is pipeline ``batches % N``'s."""
        return self._session.feed.count_batches()

    # ---- what a run does -----------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Announce that this process will end soon; also from a signal handler or thread. See ``preempted``."""
        if self.launcher is not None:
            self.launcher.stop()
        self._session.worker.preemption.notice()

    @property
    def preempted(self) -> bool:
        """Whether a rank has called :meth:`preempt`: True on all ranks from the same batch on, within seconds.

        Every rank must read it after every batch, or after the same ones, and not in the middle of an
        evaluation::

            signal.signal(signal.SIGTERM, lambda *_: pipeline.preempt())
            for result in pipeline.train(loader):
                if pipeline.preempted:
                    break
            pipeline.save(folder)

        Isolated pipelines all stop after the same step.
        """
        if self.launcher is not None:
            return self.launcher.has_stopped
        worker = self._session.worker
        with worker.running():
            return worker.preemption.is_due(self._session.feed.next_batch)

    # ---- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the last messages, and end the threads. The process group stays.

        CheckpointError if ``save(folder, wait=False)`` has failed and the error was not raised yet.
        """
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        """``error``: the reason, which matters more than a checkpoint that was not written."""
        session, worker = self._session, self._session.worker
        failed, limit_s = worker.failure is not None, session.world.timeout_s
        patience_s = _FAILED_PATIENCE_S if failed else min(limit_s, _PATIENCE_S)
        try:
            if session.saving is not None:
                if session.saving.is_under_way and not failed and error is None:
                    with session.idle():  # copies it
                        pass
                session.saving.close(patience_s if failed or error is not None else limit_s)
        except PipelineError as unsaved:
            if error is None and not failed:
                raise
            _log.warning("%s", unsaved)
        finally:
            worker.close(patience_s)
            for extension in self._spec.options.extensions:
                extension.closed()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._close(error)


def _prepare_process(spec: Spec) -> None:
    """Set up what belongs to the whole process: its allocator, signals and device."""
    if not has_streams(spec.device):
        keep_freed_memory()
    if os.environ.get(STORE_FILE):  # a launcher of ours has started it
        named("avgpipe.ranks.process:report_lost_peers")()
    if has_streams(spec.device):
        named("avgpipe.ranks.queues:ask_for_queues")(spec.device, spec.plan.pipelines)
    select(spec.device)
    if isinstance(spec.options.loss_fn, nn.Module):
        spec.options.loss_fn.to(spec.device)


def _policy(plan: Plan, copies: Any) -> Policy:
    """Return the policy for lost processes."""
    if plan.isolate or pipeline_here() is not None:
        return cast(Policy, named("avgpipe.fault.isolation:Isolation")(plan))
    if copies is not None:
        return cast(Policy, named("avgpipe.fault.recovery:Recovery")(copies))
    if GENERATION in os.environ:
        named("avgpipe.fault.generation:refuse_without_copies")()
    return Policy()


def _import_late() -> None:
    """Import the modules that torch imports when the first optimizer is made."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _close(pipeline: weakref.ref[Pipeline]) -> None:
    """Close a Pipeline at the end of the program, if the caller did not."""
    alive = pipeline()
    if alive is not None:
        alive.close()


def _not_empty(loader: Iterable[Any]) -> Iterator[Any]:
    source = iter(loader)
    try:
        first = next(source)
    except StopIteration:
        raise ValueError("evaluate needs at least one batch: the loader is empty") from None
    return chain([first], source)
