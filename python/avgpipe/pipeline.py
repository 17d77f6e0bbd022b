"""Train a model as pipelines of stages: the public face of the runtime."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import logging
import math
import os
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial, wraps
from html import escape
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.checkpoint import read_checkpoint, restore_checkpoint
from avgpipe.checkpoint.folder import NotFinite
from avgpipe.checkpoint.sharded import load_sharded_state, sharded_state
from avgpipe.checkpoint.snapshot import may_run
from avgpipe.checkpoint.writer import Writer
from avgpipe.device import ReadyOnEvent, generators_of, has_streams, own_device, select
from avgpipe.errors import CheckpointError, PeerLost, PipelineError, PipelineTimeout
from avgpipe.fault.copies import StateCopies
from avgpipe.fault.generation import become_a_rank, next_generation, restored, waited_for
from avgpipe.fault.handover import check_state, give_state, take_state
from avgpipe.fault.membership import Membership
from avgpipe.fault.turn_feed import Counts, TurnFeed
from avgpipe.measure.cut_picture import plot_cut
from avgpipe.measure.running import gather_busy, gather_timeline, measured_costs
from avgpipe.model.batch import BatchDims, LossFn, pair, plain, sample_count, split
from avgpipe.model.compiled import Compiler, compile_options, described
from avgpipe.model.context import CallerGenerators, CallerModes
from avgpipe.model.cut import Cut, expected_traffic, sent
from avgpipe.model.estimate import Estimate
from avgpipe.model.model import Model, layers_of, learning_tensors, outside_of
from avgpipe.model.modes import Modes, evaluated_in, is_evaluated, tells_modes_apart
from avgpipe.model.outside import warn_of_graphs
from avgpipe.plan import Plan
from avgpipe.planning import AdvanceChoice, Costs, choose_advance
from avgpipe.ranks import probe
from avgpipe.ranks.mesh import members_of
from avgpipe.ranks.process import (
    generation,
    is_replaceable,
    keep_freed_memory,
    pipeline_here,
    tell_of_lost_peers,
    warn_of_threads,
)
from avgpipe.ranks.rendezvous import private_store
from avgpipe.ranks.world import World
from avgpipe.runtime.alike import check_weights
from avgpipe.runtime.audit import Audit
from avgpipe.runtime.distances import Distances, gather_distances
from avgpipe.runtime.evaluate import (
    EvaluationResult,
    MetricFn,
    MetricSums,
    OutputCollector,
    result_of,
    run_evaluation,
)
from avgpipe.runtime.feed import BatchResult, Feed, Prefetch
from avgpipe.runtime.initial import InitialWeights
from avgpipe.runtime.integrity import Verification
from avgpipe.runtime.loss_check import callers
from avgpipe.runtime.options import OptimizerFn, SchedulerFn, TrainingOptions, preparing
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.requirements import (
    check_carries,
    check_copies,
    check_correction,
    check_device,
    check_dtypes,
    check_memory,
    check_model,
    check_names,
    check_options,
    check_prepared,
    warn_of_hooks,
    warn_of_waits,
)
from avgpipe.runtime.together import groups_of_whole, warn_of_steps
from avgpipe.runtime.weights import LoadedKeys, find_parameters, gather_state, load_state, set_requires_grad
from avgpipe.runtime.worker import Worker
from avgpipe.timeline.timeline import Timeline

if TYPE_CHECKING:  # they take long to import, and who uses them has done so
    from matplotlib.figure import Figure
    from torch.distributed.device_mesh import DeviceMesh

    from avgpipe.runtime.prepared import PrepareStage

_log = logging.getLogger("avgpipe")
_LOST = PeerLost, PipelineTimeout
_LOST_PATIENCE_S = 0.0  # with those that are lost
# For the launcher to say whether a process is lost, or stands still; else a line was lost, and nobody is replaced.
_LOST_NOTICE_S, _STOPPED_NOTICE_S = 5.0, 2.0
_PATIENCE_S, _FAILED_PATIENCE_S = 60.0, 0.5  # for which the other workers may need what was sent last
_MEASURED_BATCHES = 4  # per pipeline, before advance="auto" chooses; the first of them does not count


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _recovering(call: _Call) -> _Call:
    """Make a method go on when a rank has been replaced: it begins anew, with training where it was."""

    @wraps(call)
    def again(self: Pipeline, *args: Any, **options: Any) -> Any:
        # What is asked again draws again: a loader its seed.
        begin = [] if self._copies is None else [(g, g.get_state()) for g in generators_of(self._device)]
        while True:
            try:
                found = call(self, *args, **options)
            except _LOST as loss:
                if any(isinstance(given, Iterator) for given in (*args, *options.values())):
                    raise  # a part of it is used up
                self._recover(loss, in_call=True)
                for generator, state in begin:
                    generator.set_state(state)
            except CheckpointError:  # on every rank, which go on
                self._note_call()
                raise
            else:
                self._note_call()
                return found

    return cast(_Call, again)


def _in_own_modes(call: _Call) -> _Call:
    """Run a method outside of the caller's ``no_grad`` or ``inference_mode``, in which weights could not train."""

    @wraps(call)
    def apart(*args: Any, **options: Any) -> Any:
        with CallerModes():
            return call(*args, **options)

    return cast(_Call, apart)


class Pipeline:
    """Trains ``plan.pipelines`` replicas of a model together, each cut into ``plan.stages`` stages.

    Every rank builds the same model and Pipeline. With a default process group, or torchrun's environment, there
    must be one rank per worker of the plan; alone, the process runs all stages. ``model`` is copied, not changed:
    ``state_dict`` returns what was learnt.

    Args:
        model: ``nn.Sequential``, a list of modules, a model of most families of transformers as it is (see
            ``avgpipe.model.transformers``), a module that torch.fx can trace, or, with ``example_inputs``, one that
            torch.export can; or one of these in a PeftModel whose adapters are in the layers, such as LoRA's: what is
            frozen stays so, and names are the PeftModel's.
        plan: how to cut, schedule and average.
        loss_fn: ``loss_fn(output, target)`` returns a scalar, the mean over samples, or a sum if it says so by
            ``reduction = "sum"``; or ``(sum, count)``, a scalar and what to divide it by over the whole batch, such as
            the targets that are not ignored. A scalar of unknown kind is taken for a mean over samples; where the first
            batch shows that it is none, a warning says so. Either may come with metrics, ``(loss, {"name": value})``,
            numbers or tensors without a dimension, which are put together as the loss is: means where it is a mean,
            sums where it is a sum, and beside ``(sum, count)`` sums that the same count divides.
        optimizer: ``optimizer(params)`` returns a torch optimizer of a stage's parameters, or a list of several, each
            parameter in exactly one, which step in turn. Where its first parameter is called ``named_params`` or
            ``named_parameters``, it gets pairs (name, parameter) instead, as torch's optimizers take them too; names
            are those of the unsplit model, as in ``state_dict``, of a tied parameter the first. Optimizers with
            ``train()`` and ``eval()``, as schedule-free ones, are for one pipeline: evaluation has their weights for
            it.
        device: by default where the model's parameters are. "cuda", or another accelerator without a number: under
            torchrun the device of this rank's place on its host, else the current one. It becomes the calling thread's
            current device.
        seed: what the layers draw follows from it, the pipeline, batch, micro-batch and layer alone.
        timeout_s: no wait for another worker lasts longer.
        lr_scheduler: ``lr_scheduler(optimizer)`` is stepped after every batch of a pipeline; of several optimizers each
            has one.
        clip_grad_norm: limit of the norm of a batch's gradient over all stages; ``math.inf`` measures it alone, for
            ``result.grad_norm``. Where pipelines share a batch, they wait for each other's gradients of it. Pipelines
            that are isolated, or have workers of their own, do not: there it is of each one's share.
        skip_nonfinite: a batch whose gradients have infinities or NaN, on whichever stage, changes neither weights nor
            statistics, and ``skipped_updates`` counts it. On an accelerator every update then waits for the device, as
            it does where losses are scaled.
        autocast: dtype for ``torch.autocast`` in training; evaluation and prediction are in the dtype of the weights.
        loss_scale: what losses are multiplied with for the backward, so that small gradients of float16 are not lost:
            "dynamic", by the rule and the defaults of ``torch.amp.GradScaler``, for each pipeline; a number; None:
            "dynamic" under ``autocast=torch.float16``, else none. An update whose scaled gradients overflow on
            whichever stage is left out, and ``skipped_updates`` counts it.
        loss_weight: ``loss_weight(target)``, what a micro-batch weighs in its batch's mean loss; by default its
            samples, or the elements that ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` count.
        link: how tensors travel between workers: "auto" (shared memory between processes of one host, their device's
            memory where they share a CUDA device, NCCL where each has one, torch.distributed between hosts), or the
            name of one.
        wire_dtype: torch.bfloat16 or torch.float16 halves what travels between stages of different workers, for less
            exact activations and gradients; None sends them as they are. Gradients of tied weights, exchanged after all
            backwards, travel as bfloat16 only.
        cuda_graphs: on CUDA, launch a stage's forward, or backward, of a micro-batch as one. For plans that flush, and
            stages whose layers launch the same kernels every time: no random numbers, no waiting for the device,
            nothing carried from batch to batch. What has another shape than the first batch, as a short last one, runs
            without.
        compile: True, or a dict of keyword arguments of ``torch.compile``, runs every layer through it, each by itself:
            let a layer be a whole block. What comes compiled, by its ``compile()`` or ``torch.compile``, stays so in
            any case, with its own options. Dropout draws the same for any number of stages, but with the default
            backend not what plain layers draw, unless ``torch._inductor.config.fallback_random`` is set. With
            recomputation the default is ``dynamic=False``. The first batches wait for the compiler, which ``timeout_s``
            must allow for.
        weights_from: for a model on the meta device, where its values come from: a folder or file of safetensors; a
            mapping from names to tensors, of which each rank asks for those of its stages; or a function that fills
            the modules of a stage, as by ``module.apply(...)``. Each rank makes what its stages hold and no more, so
            that a model may be larger than a host. Names in a folder that ``save_pretrained`` wrote may have, or lack,
            the prefix of the model's body.
        mesh: the dimension of a device mesh along which the stages lie, such as ``device_mesh["pp"]``: its ranks are
            this pipeline's, and the other ranks of the whole mesh make pipelines of their own, of the same model.
        group: likewise the torch.distributed group of this pipeline's ranks, by whose numbers in it messages name
            them. Without both, the pipeline has all ranks.
        prepare_stage: ``prepare_stage(module, stage, mesh)`` makes a stage of this rank parallel over the other
            dimensions of ``mesh``, which is the whole one here: by ``fully_shard`` or ``parallelize_module`` on
            ``module``, whose ``layers`` are the stage's, or by returning ``DistributedDataParallel(module, ...)``. It
            changes the pipeline's copy, before the optimizer is made. Needs ``mesh``. Every pipeline must train on
            batches of as many samples; a batch's loss is that of the pipeline's own. Ranks with different data
            should get a ``seed`` each, those that share layers' work the same one.
        memory_limit_bytes: of a worker, for the weights of all pipelines and the activations in flight; what
            ``advance="auto"`` must keep to.
        example_inputs: one batch's inputs, as the loader yields them. With these torch.export traces what torch.fx
            cannot, layers of a traced model are proved to compute what it does, the default cut balances what forward
            and backward compute, and ``print(pipeline)`` shows what stages send. Shapes must be alike on all
            ranks. The runs that follow may have other batch sizes, and other sizes as far as
            the model's code allows. The example says, too, which arguments of a traced model batches give: without it,
            a model whose forwards ask whether something is None goes without those that are None by default.
        names_of: the model that a list of layers is made of: names of parameters are this model's.
        accumulate: how many batches of the loader make one update, that of one batch of all their samples. The plan's
            ``micro_batches`` are of each, so that activations take no more memory but for schedules that keep all of
            a batch, such as "gpipe"; and shapes may differ between them. The end of a loader makes an update of what is
            left. ``batch`` then means all of them, in results too.
        verify_wire: give each message between processes a checksum, which the receiver checks: a bit that was flipped
            on the way ends the run with an error that names both, and the message. On devices, for links through the
            host's memory. What torch.distributed sums and broadcasts is not checked.
        verify_every: after so many batches, or a few more so that all pipelines have had their turn, finish what is in
            flight and compare bit for bit what must be equal: copies of tied weights, replicas of a stage, the
            references of dedicated pipelines; and a micro-batch on each stage with itself when it runs twice, on an
            accelerator only with ``torch.use_deterministic_algorithms(True)``. What differs ends the run with an error
            that names it, and where it is. Training goes on as if nothing had happened.
        copies_every_s: keep copies of each process's state in its neighbour's memory, taken between two batches, so
            that a process which is killed is replaced, and training goes on from the last copy without a disk; for
            ranks that ``avgpipe run --spares`` has started. About so many seconds of work are lost at most: the next
            copy is taken after three quarters of them, as one counts once it has come. Each process holds two
            copies of its own state (weights, optimizer states, reference) and two of its neighbour's, and the inputs
            and targets since. The script of the new process runs from its beginning, finds in ``batches`` where to go
            on, and gives ``train`` a loader that begins there. A loader that is an iterator cannot be evaluated again.
        ema_decay: keep an exponential moving average of the reference, or of a lone pipeline's weights, taken after
            each of its updates: ``average = decay average + (1 - decay) weights``, which the first update sets. Each
            stage keeps its own, in one more copy of the weights, for ``weights="ema"`` in :meth:`evaluate`,
            :meth:`predict` and :meth:`state_dict`; checkpoints have it. Buffers are not averaged over time.
        check: "first-batch": before the first batch trains, look whether training is what was asked for, and raise or
            warn where it is not. Ranks must be given the same batches, of which some are compared, and loaders must end
            with the same one. The first rank runs the model as it was given and as its stages run it, on samples of the
            batch: outputs, gradients and buffers must be equal, also in evaluation and with recomputation. That takes
            the time of some batches, and memory for a copy of the whole model and for its gradients, twice; its code
            and hooks run a few times more, on copies of its modules. A model that computes something else of a batch in
            micro-batches than of the whole one, as its layers mix samples or count forwards, is warned of. What has no
            gradient is named. An optimizer must give all parameters together, as the script's model has them, the same
            options as stage by stage; one of the caller's own class tries steps on small tensors. A loss function is
            called a few times more, to see whether it is the mean that it is taken for. "every": compare stages with
            the model in every hundredth batch, too, on the weights that it was given with; "full": in all batches, on
            all samples; "off": nothing of it.
        batch_dim: along which dimension tensors have the samples of a batch: a number for all of them, such as 1 for
            layers that want [length, batch, ...]; or one for the inputs and one for the targets, ``(1, 0)``, and if
            need be a third for the model's outputs, 0 otherwise. Where tensors differ, in place of a number tuples,
            lists and dicts as a batch has them, with None for what goes whole to every micro-batch, as a mask that all
            samples share: ``({"x": 0, "mask": None}, 0)``.

    Raises:
        ValueError: for a plan that the model or the ranks do not fit. Failures of a run are ``PipelineError``.
    """

    @_in_own_modes
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        plan: Plan,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout_s: float = 300,
        lr_scheduler: SchedulerFn | None = None,
        clip_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        autocast: torch.dtype | None = None,
        loss_scale: float | str | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        link: str = "auto",
        wire_dtype: torch.dtype | None = None,
        cuda_graphs: bool = False,
        compile: bool | dict[str, Any] = False,
        weights_from: Any = None,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        prepare_stage: PrepareStage | None = None,
        memory_limit_bytes: int | None = None,
        example_inputs: Any = None,
        names_of: nn.Module | None = None,
        accumulate: int = 1,
        verify_wire: bool = False,
        verify_every: int | None = None,
        ema_decay: float | None = None,
        copies_every_s: float | None = None,
        check: str = "first-batch",
        batch_dim: Any = 0,
    ) -> None:
        become_a_rank(first=_import_late)
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be an avgpipe.Plan, not {plan!r}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
        if memory_limit_bytes is not None and (plan.advance != "auto" or not memory_limit_bytes > 0):
            raise ValueError(
                f"memory_limit_bytes={memory_limit_bytes!r}: a number of bytes above 0, for a plan with "
                f'advance="auto" (this one has {plan.advance!r}); leave it out elsewhere'
            )
        members = members_of(mesh, group)
        compiling = compile_options(compile, plan.recompute)
        options = TrainingOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            recompute=plan.recompute,
            cuda_graphs=cuda_graphs,
            skip_nonfinite=skip_nonfinite,
            loss_weight=loss_weight,
            loss_scale="dynamic" if loss_scale is None and autocast is torch.float16 else loss_scale,
            compiler=Compiler(compiling, model),
            link=link,
            wire_dtype=wire_dtype,
            measures=plan.advance == "auto",
            accumulate=accumulate,
            batch_dims=BatchDims.of(batch_dim),
            verify_wire=verify_wire,
            verify_every=verify_every,
            ema_decay=ema_decay,
            copies=copies_every_s is not None,
            prepare=None if prepare_stage is None else preparing(prepare_stage, mesh),
            check=check,
            keeps_modes=not is_evaluated([model] if isinstance(model, nn.Module) else model),
            loss_modes=Modes(loss_fn) if isinstance(loss_fn, nn.Module) else None,
        )
        check_options(options)
        if copies_every_s is not None:
            check_copies(options, plan, copies_every_s, members is not None)
        may_be_meta, example_inputs = weights_from is not None, plain(example_inputs)
        check_model(model, may_be_meta=may_be_meta)
        check_memory(model)
        self.plan, layers = plan, layers_of(model, example_inputs)
        if names_of is not None:
            check_model(names_of, may_be_meta=may_be_meta)
            check_names(layers, names_of)
        named = model if names_of is None else names_of
        estimate = Estimate.of(layers, example_inputs, plan.micro_batches, counts=plan.stages > 1)
        self._model = Model.cut(named, layers, plan.stages, plan.partition, estimate)
        self._cut = Cut.of(named, layers, self._model.bounds, estimate)
        if example_inputs is not None:
            expected = expected_traffic(self._model, layers, example_inputs, plan.micro_batches)
            self._cut = replace(self._cut, traffic=expected)
        in_layers = set(chain.from_iterable(self._model.trainable))
        learning = {name: p for name, p in learning_tensors(named).items() if name in in_layers}
        warn_of_hooks(plan, learning)
        if check != "off":
            # Before the optimizers that train: a script may keep the last one that it has made.
            groups = groups_of_whole(optimizer, learning)
            options = replace(options, groups=groups, callers=callers(learning))
            if plan.stages > 1 and os.environ.get("RANK", "0") == "0":
                warn_of_steps(optimizer, self._model.trainable, learning)
        initial = None if weights_from is None else InitialWeights.of(weights_from, named, self._model)
        self._device = _device(device, layers)
        check_carries(options, layers)
        check_dtypes(options, layers)
        check_device(options, plan.weights, self._device, layers)
        if not has_streams(self._device):
            keep_freed_memory()
        tell_of_lost_peers()
        select(self._device)
        self._options = options
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(self._device)
        self._timeout_s, self._members, self._compiling = timeout_s, members, compiling
        self._layers, self._seed, self._initial = layers, seed, initial
        self._copies = None if copies_every_s is None else StateCopies(copies_every_s)
        self._stepped = self._predicted = 0  # how often step and predict were called
        self._called = 0  # batches before the last call that is not made again
        self._set_flags: list[tuple[list[str], bool]] = []  # by requires_grad_
        self._connect()
        if not (options.keeps_modes or self.world.rank) and tells_modes_apart(layers):
            _log.warning(
                "the model is in evaluation mode as a whole, as one that was loaded, and is trained in training mode, "
                "with its dropout and batch statistics: call model.train() to say so, and eval() of the modules that "
                "are to stay as they are"
            )
        if check != "off" and not self.world.rank:
            if plan.stages > 1:
                warn_of_graphs(module for layer in layers for module in layer.modules())
            self._worker.audit = Audit(
                model,
                layers,
                self._model.bounds,
                recomputes=plan.recompute != "never",
                keeps_modes=options.keeps_modes,
                autocast=autocast,
                device=self._device,
                check=check,
                batch_dims=options.batch_dims,
                cuts=plan.micro_batches > 1,
                copies=plan.pipelines > 1
                or plan.replication is not None
                or (plan.weights or "flush") != "flush",
            )
        if check != "off":
            outside = outside_of(model, layers)
            self._worker.outside = outside if outside.reads else None
        self._memory_limit_bytes = memory_limit_bytes
        self.advance: AdvanceChoice | None = None  # what advance="auto" has chosen
        self._choose_at = _MEASURED_BATCHES * plan.batches_per_round if plan.advance == "auto" else None
        self._loader = Prefetch(self._copy_ahead, accumulate)
        self._feed: Feed | TurnFeed = self._make_feed()
        atexit.register(_close, weakref.ref(self))
        if self._copies is not None and generation():
            with self._worker.running():
                self._go_back(self._copies, math.inf)

    def _copy_ahead(self, batches: Sequence[tuple[Any, Any]]) -> ReadyOnEvent | None:
        return self._worker.copy_ahead(batches)

    def _make_feed(self) -> Feed | TurnFeed:
        if self._worker.exchange is None:
            return Feed(self._worker, self._running_plan, self._loader, self._options, self._verification)
        return TurnFeed(
            self._worker, self._running_plan, self._loader, self._options, self._enter, self._verification
        )

    def _connect(self) -> None:
        """Meet the other ranks, and make this one's part."""
        self.world = World(self._timeout_s, self._members)
        try:
            self._make_part()
        except Exception as error:  # the other ranks may have nothing to refuse
            self.world.report(error)
            raise

    def _make_part(self) -> None:
        options, plan, layers, initial = self._options, self.plan, self._layers, self._initial
        if options.prepare is not None:
            check_prepared(options, plan, self.world.size)
        self.world.require_same("plan", plan.to_json())
        isolated = _isolated(plan)
        placement = Placement.of(plan, self.world.size, isolated)
        self.world.describe([placement.describe(rank) for rank in range(self.world.size)])
        self.world.require_same(*options.shared_text())
        self.world.require_same("compile", described(self._compiling))
        self.world.require_same("model", json.dumps(self._model.signature()))
        self.world.require_same(
            "cut of the model, which follows from the shapes of example_inputs,",
            json.dumps(self._model.bounds),
        )
        # stages step their copies of a tied parameter alike, so the copies must be equal from the beginning
        if initial is None:
            self.world.require_same(
                "initial value of shared parameters", json.dumps(self._model.shared_values(layers))
            )
            if options.check != "off":
                check_weights(self.world, placement, self._model, layers)
        if options.check != "off":
            groups = json.dumps(options.groups, default=str)
            self.world.require_same("optimizer, by the groups of its parameters,", groups)
            self.world.require_same("evaluation mode of modules", json.dumps(evaluated_in(layers)))
        check_correction(plan, self._model.shared)
        if not self.world.rank:
            warn_of_waits(options, plan, any(self._model.shared))
            if self._copies is not None and not is_replaceable():
                _log.warning("nobody will use the copies of copies_every_s: start with avgpipe run --spares")
        if self.world.size == 1 and not has_streams(self._device):
            warn_of_threads(torch.get_num_threads())
        # What is trained on as one batch has the micro-batches of all the loader's batches that it is made of.
        self._running_plan = running = replace(plan, micro_batches=plan.micro_batches * options.accumulate)
        give = None if isolated is None else self._give
        self._worker = Worker(
            self._model,
            layers,
            running,
            placement,
            self.world,
            self._device,
            self._seed,
            options,
            initial,
            give,
        )
        if initial is not None:
            self._check_shared()
        self._verification = None
        if options.verify_every is not None:
            # A turn of isolated pipelines has as many batches as there are just now.
            per_round = plan.batches_per_round if isolated is None else 1
            self._verification = Verification(self._worker, options.verify_every, per_round)
        if self._copies is not None:
            self._copies.attach(self._worker)
        self._writer = Writer(self._model, self._worker)

    def _check_shared(self) -> None:
        """Refuse stages that each have filled their own copy of a tied parameter, and not alike."""
        try:
            found = [row for rows in self.world.gather(self._worker.shared_values()) for row in rows]
            known = dict(found)
            different = sorted({name for name, digest in found if known[name] != digest})
            if different:
                raise ValueError(
                    f"stages have filled their copies of {different[0]!r} with different values: the function of "
                    "weights_from must give it the same on every stage"
                )
        except BaseException:
            self._worker.close(_FAILED_PATIENCE_S)
            raise

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, loader: Iterable[Any]) -> Iterator[BatchResult]:
        """Train on the batches of ``loader`` and yield their results in order.

        A batch is a pair (inputs, targets), or a mapping with the targets as "labels", as collators of transformers
        make it, and all else as inputs.

        The pipelines share each batch, or take turns: see ``Plan.batch``. They stream: when the result of batch j is
        yielded, the next one is in flight, of batches taken in turn the next N - 1, and on an accelerator one at
        least. Whatever is called then (``evaluate``, ``save``) finishes them first.

        The loader is a batch ahead: the one after batch j is fetched before the result of j is yielded. So what the
        loop's body tells the loader then, as how hard batches shall be, reaches it a batch later than in a plain loop,
        and where both draw from one generator, the loader draws first.
        """
        self.drain()
        self._forget_results()  # of batches that an abandoned loop left in flight
        self._loader.open(loader)
        self._worker.alike.begin_anew()
        while True:
            try:
                ended = self._train_on()
            except _LOST as loss:
                self._recover(loss)
                continue
            if ended:
                return
            if self._feed.results:  # else what was trained on is lost, and is trained on again
                result, _ = self._feed.results.popleft()
                yield result

    def _train_on(self) -> bool:
        """Train until there are results; whether there is nothing more to train on."""
        feed = self._feed
        self._choose_advance()
        while not self._is_due and feed.takes_more():
            if self._copies is None or self._loader.has_more:
                self._copy_if_due()
            if not feed.fetch():
                break
        if feed.results:
            self._loader.fetch()  # as where the batch ends only now: see Prefetch
            return False
        if self._is_due:
            feed.drain(prefetch=True)  # so that the loader and the caller draw in turn as ever
            self._verify()
            return False
        if feed.is_empty:
            return True
        feed.finish_oldest(prefetch=True)
        return False

    def step(self, inputs: Any, targets: Any) -> float:
        """Train on a batch for a round: every pipeline on its share of the samples. Wait, and return the mean loss.

        It makes an update by itself, whatever ``accumulate`` is. The loss is NaN where nothing counts, as where all
        targets are ignored.
        """
        n = self.plan.batches_per_round if self._worker.exchange is None else 1
        self.drain()
        self._forget_results()
        self._choose_advance()
        inputs, targets = plain(inputs), plain(targets)
        dims = self._options.batch_dims
        samples = sample_count(inputs, targets, n == self.plan.micro_batches == 1, dims)
        if samples < n:
            raise ValueError(
                f"{samples} samples are too few for {n} pipelines, each of which trains on a share of them"
            )
        shares = split(inputs, n, samples, dims.inputs), split(targets, n, samples, dims.targets)
        self._loader.give([[share] for share in zip(*shares)])
        self._stepped += 1
        with self._worker.alike.loop("step", seen=self._stepped - 1):
            self._until_done(self._train_on_given)
        counted = [(result.loss, weight) for result, weight in self._feed.results if weight]
        self._forget_results()
        if self._is_due:
            self._verify()
        weight = sum(weight for _, weight in counted)
        return sum(loss * weight for loss, weight in counted) / weight if counted else math.nan

    def _train_on_given(self) -> None:
        self._copy_if_due()
        while (batch := self._loader.next()) is not None:
            self._feed.begin(*batch)
        self._feed.drain()

    def _forget_results(self) -> None:
        self._feed.results.clear()

    def drain(self) -> None:
        """Finish the batches that are in flight."""
        self._until_done(lambda: self._feed.drain(), in_call=True)

    def _until_done(self, act: Callable[[], None], in_call: bool = False) -> None:
        """Do it, once more after each rank that was replaced meanwhile. ``in_call``: as of :meth:`_recover`."""
        while True:
            try:
                act()
                return
            except _LOST as loss:
                self._recover(loss, in_call)

    def _idle(self, harmless: type[Exception] | tuple[()] = ()) -> AbstractContextManager[CallerModes]:
        """Finish the batches that are in flight. What fails inside ends the pipeline, but for what is ``harmless``."""
        self._feed.drain()
        return self._settling(harmless)

    @contextmanager
    def _settling(self, harmless: type[Exception] | tuple[()] = ()) -> Iterator[CallerModes]:
        """As of :meth:`_idle`, where batches may be in flight. Without any, what is being copied is whole before."""
        with self._worker.running(harmless) as modes:
            self._settle()
            yield modes

    def _settle(self) -> None:
        if self._feed.is_empty:
            self._writer.settle()
            if self._copies is not None:
                self._copies.settle()

    @property
    def _is_due(self) -> bool:
        """Whether copies are to be compared before another batch begins."""
        return self._verification is not None and self._verification.is_due(self._feed.next_batch)

    def _verify(self) -> None:
        assert self._verification is not None
        with self._worker.running():
            self._verification.verify(self._feed.next_batch)

    def _choose_advance(self) -> None:
        """Choose the advance once, after the first batches, where the plan says "auto": all ranks choose alike."""
        if self._choose_at is None or self._feed.begun < self._choose_at:
            return
        self._choose_at = None
        plan = self._running_plan
        with self._idle():
            costs = measured_costs(self._worker)
        chosen = choose_advance(
            plan.stages,
            plan.micro_batches_each,
            costs,
            pipelines=plan.pipelines,
            memory_limit_bytes=self._memory_limit_bytes,
        )
        self.advance = chosen
        self._worker.follow(replace(plan, advance=chosen.advance).build_schedule())
        if self.world.rank == 0:
            print(f"avgpipe: {chosen}", file=sys.stderr)

    # ---- ranks that are replaced ---------------------------------------------------------------------------------

    def _copy_if_due(self) -> None:
        """Take a copy of the state before the next batch, if all are to take one."""
        if self._copies is not None and self.world.size > 1:
            self._take_copy(self._copies)

    def _take_copy(self, copies: StateCopies) -> None:
        feed = self._feed
        assert isinstance(feed, Feed)
        copies.collect()
        plan = self._running_plan
        # Not in the midst of a round, which step() makes of one batch of the caller.
        if not copies.is_due(feed.next_batch) or feed.next_batch % plan.batches_per_round:
            return
        if copies.must_wait(plan.batches_in_flight) or not may_run(plan, feed.next_batch):
            self._feed.drain()
        with self._settling():
            copies.begin(self._model, self._worker, feed.next_batch, plan.batches_in_flight)
            self._settle()
        assert feed.kept is not None
        del feed.kept[: len(feed.kept) - (feed.next_batch - copies.oldest)]

    def _recover(self, loss: PeerLost | PipelineTimeout, in_call: bool = False) -> None:
        """Come to the result that the caller has last once more, from a copy of the state that all have.

        The rank that replaces a lost one comes there by itself, with as many batches begun. One that stands still is
        lost, too. Raises ``loss`` where none is replaced, or what was lost is in nobody's memory.

        Args:
            in_call: whether the caller has called something after that result, which a new rank is to call, too.
        """
        copies, feed = self._copies, self._feed
        if copies is None or not is_replaceable() or not self.world.made_group:
            raise loss
        assert isinstance(feed, Feed)
        told, has_waited = feed.told, isinstance(loss, PipelineTimeout)
        while True:
            notice_s = _STOPPED_NOTICE_S if isinstance(loss, PipelineTimeout) else _LOST_NOTICE_S
            if has_waited:
                private_store().set(waited_for(generation()), "")
            copies.collect()
            try:
                self._writer.close(_FAILED_PATIENCE_S)
            except PipelineError as unsaved:
                _log.warning("a checkpoint was not written: %s", unsaved)
            self._worker.close(_LOST_PATIENCE_S)
            if dist.is_initialized():
                dist.destroy_process_group()
            try:
                next_generation(private_store(), notice_s)
            except PeerLost as nobody:
                raise loss from nobody
            before = self._worker.preemption
            self._worker.forget()  # the next one may find no memory beside it
            traceback.clear_frames(loss.__traceback__)
            gc.collect()
            try:
                # Functions that make initial weights may draw from the caller's generators.
                with CallerGenerators(self._device), CallerModes():
                    self._connect()
                    if before.is_known:
                        self._worker.preemption.notice()
                    with self._worker.running():
                        self._go_back(copies, told - in_call)
                self._train_again(told)
                return
            except _LOST as another:  # one more, or who stands still while all meet
                loss, has_waited = another, True

    def _go_back(self, copies: StateCopies, latest: float) -> None:
        """Restore a copy of before ``latest`` batches or fewer, and begin there."""
        before = self._feed
        assert isinstance(before, Feed)
        assert before.kept is not None
        # A new rank has made none of these calls, all of which were before the copy.
        self._set_flags = max(self.world.gather(self._set_flags), key=len)
        for names, flag in self._set_flags:
            set_requires_grad(self._worker, find_parameters(self._model, names), flag)
        batches = copies.go_back(self.world, self._model, self._worker, self._called, latest)
        private_store().set(restored(generation()), "")
        count = max(0, before.next_batch - batches)  # none where this rank is new
        self._loader.give_back(before.kept[len(before.kept) - count :])
        feed = self._feed = Feed(self._worker, self._running_plan, self._loader, self._options)
        feed.next_batch = batches
        self._resume()

    def _note_call(self) -> None:
        """Note that all ranks have made a call, which one that begins at an earlier batch would make again."""
        if self._copies is not None and isinstance(self._feed, Feed):
            self._called = self._feed.next_batch
            self._copies.ask_for_one()

    def _train_again(self, told: int) -> None:
        """Train as :meth:`train` does, and so as a rank that is new, until the caller has the results that it had."""
        assert isinstance(self._feed, Feed)
        while self._feed.told < told:
            self._train_on()
            if self._feed.results:
                self._feed.results.popleft()

    # ---- pipelines that come and go ----------------------------------------------------------------------------------

    def enter(self) -> int:
        """Come into a run of isolated pipelines before the first batch, with which train() else does it.

        Where others train already, it returns once this pipeline has their state; they then wait for its first batch,
        which is number ``batches``.

        Returns:
            How many results they have had, each of a batch or of what was left of it; 0 at the beginning of a run.
        """
        if not isinstance(self._feed, TurnFeed):
            return 0
        self._feed.enter()
        self._feed.resume()
        return self._feed.ended

    @_recovering
    def once(self, what: str, find: Callable[[], Any]) -> Any:
        """Return, on every rank of all pipelines, what ``find()`` returns on one of them, as JSON carries it.

        For what decides how training goes on, and may differ between ranks, as what a clock or a file says. Batches in
        flight are finished first. Every rank calls it, after the same batch; ``what`` names it to all of them.
        """
        self.drain()

        def find_here() -> Any:
            return self.world.gather(find())[0]

        with self._worker.running():
            return self._once(what, find_here)

    def _once(self, what: str, find: Callable[[], Any]) -> Any:
        """Return what ``find()`` returns, here or in another one of isolated pipelines.

        One that comes later, and so far does what the others have done long ago, is told what they have found then.
        """
        feed, exchange = self._feed, self._worker.exchange
        if exchange is None or not isinstance(feed, TurnFeed):
            return find()
        if feed.is_behind:
            found = exchange.found_before(what, feed.place)
            if found:
                return found[0]
            feed.enter()
            what += ", of one that has come"  # the others ask for something else before this turn
        return exchange.once(what, feed.next_batch, find)

    @property
    def _is_new(self) -> bool:
        """Whether this pipeline has come to isolated ones that train, and has begun no turn yet."""
        return isinstance(self._feed, TurnFeed) and self._feed.is_new

    def _come_in(self) -> None:
        """Have the run's state, before it is used, where others train already."""
        if isinstance(self._feed, TurnFeed) and self._feed.is_new:
            self._feed.enter()

    def _enter(self) -> Counts | None:
        """Become a member of a run of isolated pipelines; return what it has come to, if it goes on already."""
        worker, exchange = self._worker, self._worker.exchange
        assert exchange is not None
        with worker.running():
            turn, counts = exchange.enter(self._digests(exchange.membership.has_begun)), None
            if not exchange.membership.is_late:
                for number in worker.held:
                    check_state(worker, number)
            else:
                probe.at("join", **worker.place)
                for number in worker.held:
                    counts = take_state(exchange.received(number), worker, number)
                if counts is not None and self._verification is not None:
                    self._verification.resume(counts.batches)
            for row in worker.rows:
                row.resume(turn)
        return counts

    def _digests(self, has_begun: bool) -> list[str]:
        """Return a digest of what all pipelines must have alike, and one of the weights with which all begin."""
        made = self.plan.to_json(), *self._options.shared_text(), self._model.bounds, self._model.signature()
        digest = hashlib.sha256(f"{self._feed.next_batch}".encode())
        for number in () if has_begun else self._worker.held:
            for flat in self._worker.weights(number, "reference"):
                digest.update(flat.detach().cpu().view(torch.uint8).numpy().data)
        return [hashlib.sha256(json.dumps(made).encode()).hexdigest(), digest.hexdigest()]

    def _give(self, number: int, turn: int) -> bytes:
        assert isinstance(self._feed, TurnFeed)
        return give_state(self._worker, number, self._feed.before(turn))

    # ---- using the model -----------------------------------------------------------------------------------------

    @_recovering
    def evaluate(
        self,
        loader: Iterable[Any],
        metric_fn: MetricFn | None = None,
        *,
        weights: str | int = "reference",
    ) -> EvaluationResult:
        """Return the mean loss, and mean of ``metric_fn(output, target)`` per sample; batches may have any size.

        ``metric_fn`` is the mean over the samples it is given, a number or a dict of numbers by name. ``weights``:
        "reference", "ema" (see ``ema_decay``), or the index of a pipeline. Training goes on afterwards as if nothing
        had happened.
        """
        self.drain()
        which = self._which(weights)
        batches = map(pair, _not_empty(loader))
        loss_modes = self._options.loss_modes
        evaluating: AbstractContextManager[None] = (
            nullcontext() if loss_modes is None else loss_modes.evaluating()
        )

        def evaluate(modes: CallerModes) -> dict[str, Any]:
            sums, given = partial(MetricSums, self._options, metric_fn), modes.made_outside(batches)
            with self._worker.alike.loop(f"evaluation {self._worker.evaluated}"):
                parts = list(run_evaluation(self._worker, self.plan.micro_batches, which, given, sums))
                self._worker.alike.end(self._worker.evaluated)
            return asdict(result_of(parts, self._options.sums_loss, metric_fn is not None))

        if isinstance(which, int):
            self._come_in()
            with evaluating, self._settling() as modes:
                return EvaluationResult(**evaluate(modes))
        with evaluating, self._settling() as modes:
            found = self._once(f"evaluation of {which}", partial(evaluate, modes))
            # What has drawn from it goes on alike in all pipelines.
            deque(modes.made_outside(batches), maxlen=0)
        return EvaluationResult(**found)

    @_recovering
    def predict(self, inputs: Any, *, weights: str | int = "reference") -> Any:
        """Return the model's output for a batch of any size, in evaluation mode, on every rank.

        ``inputs`` are those of a pair, so of a collator's mapping all but its "labels". ``weights``: as in
        :meth:`evaluate`.
        """
        which, inputs = self._which(weights), plain(inputs)
        # Raises what is wrong with them before the pipeline is at it.
        dims = self._options.batch_dims
        sample_count(inputs, is_whole=self.plan.micro_batches == 1, dims=dims)
        self._come_in()
        self._predicted += 1
        with self._idle(), self._worker.alike.loop("predict", seen=self._predicted - 1):
            ((output, refusal),) = run_evaluation(
                self._worker,
                self.plan.micro_batches,
                which,
                [(inputs, None)],
                partial(OutputCollector, dims.outputs),
            )
        if refusal is not None:
            raise ValueError(refusal)
        return output

    @_recovering
    def state_dict(self, weights: str | int = "reference") -> dict[str, torch.Tensor]:
        """Return weights and buffers under the unsplit model's names; they load into it with ``strict=True``.

        ``weights``: as in :meth:`evaluate`. Buffers are not averaged over time: with "ema" they are the reference's.
        """
        which = self._which(weights)
        self._come_in()
        with self._idle():
            return gather_state(self._model, self._worker, which)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadedKeys:
        """Set weights and buffers, of all pipelines and the reference, from the next batch on; every rank calls it.

        Optimizers, learning-rate schedules, and what layers carry from batch to batch stay as they are; the average of
        ``ema_decay`` begins anew. A plan without a flush fills its pipeline again.

        Args:
            state_dict: by the unsplit model's names, on any device. A rank reads the tensors of its own stages only,
                so the mapping may read its files when it is asked.
            strict: whether missing and unexpected names are refused. Else what is missing stays as it is.

        Returns:
            The names that are missing, and those that are unexpected.

        Raises:
            ValueError: on every rank, with nothing changed, for names or shapes that are not the model's, and for
                optimizers that keep weights in their state.
        """
        self._come_in()
        with self._idle(ValueError):
            found = load_state(self._model, self._worker, state_dict, strict, sets=not self._is_new)
        if not self._is_new:
            self._go_on_with_others()
        return found

    @_recovering
    def distances(self) -> Distances:
        """Return how far the replicas are from the reference and from each other, over the whole model.

        It reads the weights of all replicas once or twice and copies none. With one pipeline all distances are 0.
        """
        self._refuse_sharded("distances", "they have one replica, whose distances are 0")
        self._come_in()
        with self._idle():
            return gather_distances(self._model, self._worker)

    @_recovering
    def save(self, directory: str | Path, *, wait: bool = True, also: Sequence[str | Path] = ()) -> None:
        """Write a checkpoint that loads under any plan. The folder appears, or replaces the one there, all at once.

        Args:
            directory: of the checkpoint.
            wait: False: the state is copied in main memory, which is kept for the next time, and a thread writes it
                while training goes on; batches in flight go on, too, each stage copying its state between two. Why it
                could not be written is told by :meth:`wait_for_save`; else by the next save, which has then saved
                nothing, or by :meth:`close`. A save waits for the one before. Isolated pipelines always wait.
            also: other folders that get the same checkpoint, by links to its files where the file system has them.

        Raises:
            CheckpointError: on every rank, where it cannot be written, where another run saves, and for weights with
                infinities or NaN: what was there stays, and training may go on.
            ValueError: for sharded stages: see :meth:`sharded_state_dict`.
        """
        self._refuse_sharded(
            "save",
            "use torch.distributed.checkpoint.save(pipeline.sharded_state_dict(), checkpoint_id=folder)",
        )
        folders = [Path(folder) for folder in (directory, *also)]
        if self._worker.exchange is None and not wait:
            self._begin_to_save(folders)
            return
        with self._idle(CheckpointError):
            if self._worker.exchange is None:
                self._writer.save(folders[0], self.plan, self._feed.next_batch, folders[1:])
                return
            alone = replace(self.plan, pipelines=1, isolate=False, rule=None, alpha=None)
            found = self._once(f"checkpoint {directory}", partial(self._try_to_save, folders, alone))
            if found is not None:
                raise (NotFinite if found["is_not_finite"] else CheckpointError)(found["why"])

    def _begin_to_save(self, folders: Sequence[Path]) -> None:
        writer, batches = self._writer, self._feed.next_batch
        if not (writer.has_begun and writer.is_done and may_run(self._running_plan, batches)):
            self._feed.drain()
        with self._settling(CheckpointError):
            writer.begin(folders[0], self.plan, batches, folders[1:])
            self._settle()

    def _try_to_save(self, folders: Sequence[Path], plan: Plan) -> dict[str, Any] | None:
        try:
            self._writer.save(folders[0], plan, self._feed.next_batch, folders[1:])
        except CheckpointError as error:
            return {"why": str(error), "is_not_finite": isinstance(error, NotFinite)}
        finally:
            self._writer.release()  # the next time another pipeline may do it
        return None

    @_recovering
    def wait_for_save(self) -> None:
        """Wait until what ``save(folder, wait=False)`` has begun to write is a checkpoint.

        CheckpointError, on every rank, where it could not be written. Where a rank is replaced meanwhile, it may not be
        there: a warning says so.
        """
        if not self._writer.is_done:
            self._feed.drain()
        with self._settling(CheckpointError):
            self._writer.wait()

    def load(self, directory: str | Path) -> None:
        """Go on from a checkpoint: bit for bit under the same plan, else from its weights and optimizer states.

        An isolated pipeline that comes when others train has what they have, and loads nothing before its first batch.

        CheckpointError, on every rank, for one that is missing, damaged or another model's: nothing has changed then.
        ValueError for sharded stages: see :meth:`sharded_state_dict`.
        """
        self._refuse_sharded(
            "load",
            "have torch.distributed.checkpoint.load fill sharded_state_dict(); load_sharded_state_dict() takes it",
        )
        if self._is_new:
            return
        place = self._worker.place
        with self._idle(CheckpointError):
            probe.at("load", action="begin", **place)
            self._writer.finish(self.world.timeout_s)
            found = read_checkpoint(Path(directory), self._model, self._worker, self.plan)
        with self._worker.running():
            probe.at("load", action="restore", **place)
            self._feed.next_batch = restore_checkpoint(found, self._model, self._worker)
            self._go_on_with_others()

    @_recovering
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state for ``torch.distributed.checkpoint``, under any sharding.

        ``dcp.save(pipeline.sharded_state_dict(), checkpoint_id=folder)`` on all ranks of the mesh writes weights,
        buffers, optimizer states, learning-rate schedule and loss scale. To go on, also under other numbers of stages,
        shards or replicas: have ``dcp.load`` fill what this returns, then call :meth:`load_sharded_state_dict`. Tensors
        are not copied; the names below "model" are those of ``state_dict()``. An average of ``ema_decay`` begins anew.

        Raises:
            ValueError: for several pipelines: use :meth:`save`.
            CheckpointError: for optimizers with ``train()`` and ``eval()`` modes: use :meth:`save`.
        """
        self._refuse_several("sharded_state_dict")
        with self._idle(CheckpointError):
            return sharded_state(self._model, self._worker, self._feed.next_batch)

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``torch.distributed.checkpoint`` has loaded into :meth:`sharded_state_dict`, on every rank.

        CheckpointError for what is no such state; the pipeline may have a part of it then.
        """
        self._refuse_several("load_sharded_state_dict")
        with self._idle():
            self._feed.next_batch = load_sharded_state(state, self._model, self._worker)
            self.world.barrier()
            self._go_on_with_others()

    def _go_on_with_others(self) -> None:
        """Go on with weights that were loaded; nobody is to go back to what there was before."""
        self._resume()
        if self._copies is not None and isinstance(feed := self._feed, Feed) and feed.kept is not None:
            self._copies.forget()
            feed.kept.clear()
            self._called = feed.next_batch

    def _resume(self) -> None:
        self._worker.alike.begin_anew()
        if self._verification is not None:
            self._verification.resume(self._feed.next_batch)
        for row in self._worker.rows:
            row.resume(self._feed.next_turn)
        self._feed.resume()

    def _refuse_several(self, method: str) -> None:
        if self.plan.pipelines > 1:
            raise ValueError(
                f"{method}() is for one pipeline, and the plan has {self.plan.pipelines}, with a reference beside "
                "their weights: use save(folder) and load(folder)"
            )

    def _refuse_sharded(self, method: str, instead: str) -> None:
        if self._worker.is_sharded:
            raise ValueError(
                f"{method}() needs whole weights, and prepare_stage has sharded stages: {instead}"
            )

    @_recovering
    def requires_grad_(self, names: str | Sequence[str], flag: bool = True) -> None:
        """Freeze parameters (``flag`` False), or let them train again, from the next batch on; on every rank alike.

        With several pipelines all of them get the reference's values of what is frozen. A checkpoint does not say what
        is.

        Args:
            names: of parameters, or of modules that hold them, as in ``state_dict()``.
            flag: whether they train.

        Raises:
            ValueError: for what did not require a gradient when the Pipeline was made.
        """
        names = [names] if isinstance(names, str) else list(names)
        if self._options.prepare is not None:
            raise ValueError(
                "prepare_stage has set up which gradients are averaged: freeze parameters before the Pipeline is made"
            )
        if self._options.cuda_graphs:
            raise ValueError(
                "cuda_graphs=True has captured which gradients are wanted: leave cuda_graphs out"
            )
        indices = find_parameters(self._model, names)
        with self._idle():
            self.world.require_same("argument of requires_grad_", json.dumps([names, flag]))
            set_requires_grad(self._worker, indices, flag)
        self._set_flags.append((names, flag))

    @property
    def launcher(self) -> Membership | None:
        """The connection to the launcher of isolated pipelines; None elsewhere."""
        return None if self._worker.exchange is None else self._worker.exchange.membership

    @property
    def device(self) -> torch.device:
        """The device where this rank computes; of CUDA with its number."""
        return self._device

    @property
    def bounds(self) -> list[int]:
        """The first layer of each stage, then the number of layers."""
        return list(self._model.bounds)

    @property
    def has_copies(self) -> bool:
        """Whether a process that is lost may be replaced from a copy of its state: see ``copies_every_s``."""
        return self._copies is not None

    @property
    def batches(self) -> int:
        """Batches begun so far, over all pipelines; of batches taken in turn the next is pipeline ``batches % N``'s."""
        return self._feed.tell_batches()

    def loader_state(self, loader: Any) -> Any:
        """Return ``loader.state_dict()`` after the batches that were trained on, to be saved beside :meth:`save`.

        The loader itself may be a batch ahead. ``loader`` is what was given to :meth:`train`, and has a ``state_dict``,
        as torchdata's StatefulDataLoader. Batches that are in flight are finished first.
        """
        self.drain()
        return self._loader.state(loader)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank: one per pipeline and stage that has trainable parameters.

        Their groups' options and their states may be changed between two batches. Weights may not: of several pipelines
        the reference has them, too, and :meth:`load_state_dict` changes all.
        """
        return [r.optimizer for r in self._worker.trained.values() if r.optimizer is not None]

    @property
    def skipped_updates(self) -> int:
        """Updates that ``skip_nonfinite`` or ``loss_scale`` has left out, of pipelines that this rank has a part in.

        Pipelines that share a batch leave it out together, which counts once.
        """
        found = {i: lane.update.skipped for (_, i), lane in self._worker.lanes.items()}
        are_one = self.plan.shares > 1 and not self._worker.placement.is_dedicated
        return max(found.values(), default=0) if are_one else sum(found.values())

    @_recovering
    def timeline(self) -> Timeline:
        """Return what ran when in the last steps, on all ranks; times in seconds from the first of them."""
        with self._idle():
            return gather_timeline(self._worker)

    @_recovering
    def busy_fractions(self, first_batch: int = 0) -> list[float]:
        """Return each worker's computing share of the time, 0..1, from ``first_batch`` on, as far as it is recorded.

        Cheaper than :meth:`timeline`: a number of each worker travels.
        """
        with self._idle():
            return gather_busy(self._worker, first_batch)

    @_recovering
    def measured_costs(self) -> Costs:
        """Return what forwards, backwards, updates and messages of each stage have taken so far: medians, in seconds.

        ``simulate`` takes them, for another plan. Memory is in it after ``advance="auto"`` alone.

        Raises:
            ValueError: for stages with replicas, and pipelines with workers of their own.
        """
        if self.plan.replication or self.plan.spread:
            raise ValueError(
                "measured_costs() is of stages with a worker each, and the plan has "
                f"replication={self.plan.replication} and spread={self.plan.spread}: see timeline()"
            )
        with self._idle():
            return measured_costs(self._worker)

    def preempt(self) -> None:
        """Say that this process will be ended soon; in a signal handler, or any thread. See :attr:`preempted`."""
        if self.launcher is not None:
            self.launcher.stop()
        self._worker.preemption.notice()

    @property
    def preempted(self) -> bool:
        """Whether a rank has called :meth:`preempt`: True on all ranks from the same batch on, within seconds.

        Every rank must ask after every batch, or at the same ones, and not in the middle of an evaluation::

            signal.signal(signal.SIGTERM, lambda *_: pipeline.preempt())
            for result in pipeline.train(loader):
                if pipeline.preempted:
                    break
            pipeline.save(folder)

        Isolated pipelines all stop after the same step.
        """
        if self.launcher is not None:
            return self.launcher.has_stopped
        with self._worker.running():
            return self._worker.preemption.is_due(self._feed.next_batch)

    def doing(self) -> str:
        """Say what this rank is at, in words; in any thread."""
        return f"{self.world.name(self.world.rank)}: {self._worker.scheduler.doing()}"

    # ---- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the other workers have what was sent last, and end the threads. The process group stays.

        CheckpointError where ``save(folder, wait=False)`` could not be written and nobody was told yet.
        """
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        """``error``: why, which says more than what could not be written."""
        failed, limit_s = self._worker.failure is not None, self.world.timeout_s
        patience_s = _FAILED_PATIENCE_S if failed else min(limit_s, _PATIENCE_S)
        try:
            if self._writer.is_under_way and not failed and error is None:
                with self._idle():  # copies it
                    pass
            self._writer.close(patience_s if failed or error is not None else limit_s)
        except PipelineError as unsaved:
            if error is None and not failed:
                raise
            _log.warning("%s", unsaved)
        finally:
            self._worker.close(patience_s)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._close(error)

    def __repr__(self) -> str:
        bounds = self._model.bounds
        cut = ", ".join(f"{a}..{b - 1}" for a, b in pairwise(bounds))
        return f"Pipeline({asdict(self.plan)}, layers of the stages: {cut}, device={self._device})"

    def _repr_html_(self) -> str:
        """Show the plan, the layers of each stage and the device as a table in a notebook."""
        cut = [f"{a}..{b - 1}" for a, b in pairwise(self._model.bounds)]
        facts = {**asdict(self.plan), "layers of the stages": ", ".join(cut), "device": self._device}
        chosen = {name: value for name, value in facts.items() if value is not None and value is not False}
        cells = (f"<tr><th>{escape(n)}</th><td>{escape(str(value))}</td></tr>" for n, value in chosen.items())
        return f"<table><caption>Pipeline</caption>{''.join(cells)}</table>"

    def __str__(self) -> str:
        """Return the cut as a table: layers by name, parameters, estimated cost, and what stages send on.

        A line beneath says what kind of estimate the cost is.
        """
        cut = self._seen_cut()
        how = f"{self.plan.pipelines} pipeline{'s' * (self.plan.pipelines > 1)}, {self.plan.schedule}"
        return f"Pipeline: {len(cut.bounds) - 1} stages of {len(cut.names)} layers, {how}, on {self._device}\n{cut}"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the cut, as ``print(pipeline)`` tells it; a matplotlib figure, written to ``path`` if given."""
        return plot_cut(self._seen_cut(), path)

    def _seen_cut(self) -> Cut:
        """Return the cut with what the stages of this process have been seen to send."""
        found = dict(self._cut.traffic)
        for trained in self._worker.trained.values():
            k, output = trained.stage.index, trained.stage.inputs.output
            if output is not None and k < self.plan.stages - 1:
                found |= sent(k, output, self._model.skips[k])
        return replace(self._cut, traffic=found)

    def _which(self, weights: str | int) -> str | int:
        if weights == "ema" and self._options.ema_decay is None:
            raise ValueError("weights='ema' needs a Pipeline with ema_decay, such as ema_decay=0.999")
        here = self._worker.placement.pipelines
        if weights in ("reference", "ema") or (type(weights) is int and weights in here):
            return weights
        average = "" if self._options.ema_decay is None else ", 'ema'"
        whose = f"a pipeline from 0 to {self.plan.pipelines - 1}"
        if self.plan.isolate:
            whose = f"{here[0]}, the pipeline of this process"
        raise ValueError(f"weights must be 'reference'{average} or {whose}, not {weights!r}")


def _import_late() -> None:
    """Load what torch loads when the first optimizer is made."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _isolated(plan: Plan) -> int | None:
    """Return which pipeline this process is a part of, where each has processes of its own."""
    here = pipeline_here()
    if plan.isolate and here is None:
        raise ValueError(
            "the plan has isolate=True, and this process was not started as one of such a pipeline: start it with "
            "avgpipe run --isolate, or avgpipe train --isolate, or leave isolate out"
        )
    if here is not None and not plan.isolate:
        raise ValueError(
            f"this process was started as one of pipeline {here} of several isolated ones, and the plan has "
            "isolate=False: give it isolate=True"
        )
    return here


def _close(pipeline: weakref.ref[Pipeline]) -> None:
    """Close a Pipeline at the end of the program, for those who did not."""
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


def _device(device: torch.device | str | None, layers: Sequence[nn.Module]) -> torch.device:
    if device is None:
        tensor = next((p for layer in layers for p in layer.parameters() if not p.is_meta), torch.empty(0))
        return tensor.device
    return own_device(device)
