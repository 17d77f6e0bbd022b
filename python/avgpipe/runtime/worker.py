"""The part of a pipeline that one process runs: its stage replicas, their lanes, and its links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.device import ReadyOnEvent, current_stream, has_streams
from avgpipe.elastic.flat import Arena, Layout
from avgpipe.elastic.reference import Reference
from avgpipe.errors import PeerLost, PipelineError, PipelineTimeout
from avgpipe.links.choose import Links
from avgpipe.links.link import Channel, Key
from avgpipe.model.batch import refuse_graphs
from avgpipe.model.context import CallerModes
from avgpipe.model.model import stage_layers, trainable_parameters
from avgpipe.model.outside import Outside
from avgpipe.ranks import environment as probe
from avgpipe.ranks.environment import generation, named
from avgpipe.ranks.world import Loops, Notice, World
from avgpipe.rules import RULES
from avgpipe.runtime.audit import StageAudit
from avgpipe.runtime.compute import Compute
from avgpipe.runtime.lane import Lane, PipelineRow
from avgpipe.runtime.loss import NonfiniteNotice
from avgpipe.runtime.optimizers import Maker, maker_of
from avgpipe.runtime.placement import Placement
from avgpipe.runtime.route import Port, Route, channels_into
from avgpipe.runtime.scheduler import Scheduler
from avgpipe.runtime.spec import Spec
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.update import Update
from avgpipe.schedule import Schedule

if TYPE_CHECKING:
    from avgpipe.elastic.versions import WeightAverage
    from avgpipe.ranks.met import Met, Watchdog
    from avgpipe.runtime.between import SharedBatches
    from avgpipe.runtime.graphs import RowGraphs
    from avgpipe.runtime.group_sum import SumGroup
    from avgpipe.runtime.loss_scale import LossScale
    from avgpipe.runtime.pace import Pace
    from avgpipe.runtime.policy import Others
    from avgpipe.runtime.streams import LaneStream, Streams

_PATIENCE_S = 0.5  # for other ranks to receive messages of a worker whose construction failed


class Running(AbstractContextManager[CallerModes]):
    """Context manager that :meth:`Worker.running` returns."""

    # Not a generator, which is slower: a batch enters several of these.

    def __init__(self, worker: Worker, harmless: type[Exception] | tuple[()]) -> None:
        self._worker, self._harmless, self._modes = worker, harmless, CallerModes()

    def __enter__(self) -> CallerModes:
        self._worker.check_runs()
        return self._modes.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._modes.__exit__()
        if isinstance(error, Exception) and not isinstance(error, self._harmless):
            self._worker.fail(error)


class Worker:
    """What one process holds and runs of a pipeline.

    Attributes:
        held: the numbers of its stage replicas.
        evaluated: number of batches evaluated so far.
        trained: by replica and pipeline.
        references: by replica; None if the only pipeline has no other to average with.
        emas: by replica, the average over time of the reference's weights, or of a lone pipeline's; empty
            without ``MovingAverage``.
        lanes: by replica and pipeline.
        others: the other pipelines; None unless they are isolated.
        preemption: whether the ranks must stop.
        alike: compares the batches of all ranks.
        audit: compares the stages with the model, on the first rank.
        outside: the values outside of the model that recorded layers treat as constants.
        rows: one for each pipeline on each worker of the plan that this process runs.
        pace: of this process; None if it is the only one.
        is_sharded: whether some stage, on any process, has parameters that are DTensors.
    """

    def __init__(
        self,
        spec: Spec,
        placement: Placement,
        world: World,
        join: Callable[[Worker], Others] | None = None,
    ) -> None:
        """``join``: for isolated pipelines, connects the worker, with its stages made, to the others."""
        options, device = spec.options, spec.device
        self.spec, self.world, self.placement = spec, world, placement
        self.device, self.model = device, spec.model
        self.held = placement.held_by(world.rank)
        self.failure: Exception | None = None
        self.preemption: Notice = (
            Notice() if world.size == 1 else named("avgpipe.ranks.met:Preemption")(world)
        )
        self.evaluated, self.batch_dims = 0, options.batch_dims
        self._closed = False
        self._plan, self._options = spec.running, options
        self.others: Others | None = None
        into = [self._channels_into(rank) for rank in range(world.size)]
        ranks = [placement.rank_of(n) for n in range(len(placement.replicas))]
        self._links = Links(world, ranks, into, device, options.link, options.wire_dtype, options.verify_wire)
        self.links, self.mailbox = self._links.by_replica, self._links.mailbox
        self.audit: StageAudit | None = None
        self.outside: Outside | None = None
        self.alike: Loops = Loops()
        if world.size > 1:
            alike = named("avgpipe.runtime.alike:Alike")
            self.alike = alike(world, self.mailbox.fail, options.check != "off", generation())
        self.streams: Streams | None = (
            named("avgpipe.runtime.streams:Streams")(device) if has_streams(device) else None
        )
        self.notice = NonfiniteNotice(world, placement, not options.skip_nonfinite)
        self.trained: dict[tuple[int, int], TrainedStage] = {}
        self.references: dict[int, Reference | None] = {}
        self.emas: dict[int, WeightAverage] = {}
        self.lanes: dict[tuple[int, int], Lane] = {}
        self._sum_groups: dict[tuple[int, ...], SumGroup] = {}  # by the replicas of a stage
        self._shared: dict[int, SharedBatches] = {}  # by replica
        self._graphs: dict[tuple[int, int], RowGraphs] = {}  # by pipeline and worker
        groups = self._replica_groups()
        try:
            self._build_all(spec.layers)
            if join is not None:
                self.others = join(self)
            for replica, i in self.trained:
                self.lanes[replica, i] = self._lane(self._route(replica, i), groups)
            self.is_sharded = False
            if options.prepare is not None:
                self.is_sharded = named("avgpipe.runtime.prepared:agree_on_forms")(self)
        except BaseException:  # also from the caller's functions
            # threads inside gloo would abort the process at its end
            self._links.close(_PATIENCE_S)
            if self.others is not None:
                self.others.close()
            raise
        self._schedule()

    def _schedule(self) -> None:
        """Make the scheduler of this process's rows, and what watches it."""
        self.rows = self._rows(self._plan.build_schedule())
        queues = [queue for row in self.rows for queue in row.queues]
        clock = self.streams.clock if self.streams is not None else None
        make: Callable[..., Scheduler] = Scheduler
        if self._options.on_device is not None and clock is not None:
            make = partial(named("avgpipe.runtime.in_turn:InTurnScheduler"), self._options.on_device)
        self.scheduler = make(
            list(self.lanes.values()), queues, self.mailbox, self.world, self.placement, clock
        )
        if self.others is not None:
            self.others.serve(self.scheduler)
        self.pace: Pace | None = None
        self._watchdog: Watchdog | None = None
        if self.world.size > 1:
            self._watch(cast("Met", self.world))

    def _watch(self, world: Met) -> None:
        """Watch the other ranks: whether they live, and how fast they are."""
        from avgpipe.ranks.met import Watchdog
        from avgpipe.runtime.pace import Pace

        self.pace = Pace(self.scheduler, world, self.placement)
        doing, looks = self.scheduler.doing, (self.preemption.look, self.alike.look)
        self._watchdog = Watchdog(world, self.mailbox, doing, self._links.processes, self.pace, looks)

    @property
    def place(self) -> dict[str, Any]:
        """Return what faults call this process: its rank, stages and pipelines."""
        stages, pipelines = {self.placement.stage_of(n) for n in self.held}, {i for _, i in self.lanes}
        return {"rank": self.world.rank, "stage": stages, "pipeline": pipelines}

    def look(self, batch: int, given: Sequence[tuple[Any, Any]]) -> None:
        """Check that all ranks have the same batch, and that the stages compute what the model does."""
        self.compare(batch, *zip(*given))
        self._check_outside()
        for inputs, _ in given:
            refuse_graphs(inputs)
        if self.audit is not None:
            self.scheduler.rest("comparing the stages with the model, for Audit")
            self.audit.look(batch, given[0][0])
            if self.audit.is_over:
                self.audit = None

    def compare(self, batch: int, inputs: Any, targets: Any) -> None:
        """Compare a batch that begins with that of other ranks, if it is due."""
        here = self.alike.here
        if batch < here.due:
            here.begun = batch + 1  # read by the watchdog, as another rank's loader may have ended before
        else:
            self.alike.batch(batch, inputs, targets)

    def _check_outside(self) -> None:
        if self.outside is not None and (name := self.outside.changed()) is not None:
            raise ValueError(
                f"{name!r}, which the model's forward reads, has changed since the forward was recorded, and stages "
                "keep using the old value. Pass a list of layers, whose forwards read it each time, or "
                'keep it in a buffer of the model. Audit("off") leaves this out'
            )

    def bell_place(self) -> list[Any]:
        """Return where other processes ring for this one: a path, bytes, and an offset."""
        return self._links.bell_place()

    def rows_of(self, pipeline: int) -> list[PipelineRow]:
        """Return this process's rows of a pipeline; none if a dedicated pipeline has other workers."""
        return [row for row in self.rows if row.pipeline == pipeline]

    def shared_values(self) -> list[tuple[str, str]]:
        """Return the SHA-256 of each tensor that this process's stages share with other stages, by name."""
        return [
            row
            for (replica, _), trained in self.trained.items()
            for row in self.model.shared_digests(
                self.placement.stage_of(replica), trained.arena.local_tensors()
            ).items()
        ]

    # ---- building ------------------------------------------------------------------------------------------------

    def _route(self, replica: int, pipeline: int) -> Route:
        stage, options = self.placement.stage_of(replica), self._options
        return Route(
            self.placement,
            replica,
            pipeline,
            shared=tuple(sorted(self.model.shared[stage])),
            norm=options.needs_norm,
            skips=self.model.skips[stage],
            scales_late=options.scales_late,
            publishes=self.others is not None and self.others.publishes_early,
        )

    def _channels_into(self, rank: int) -> list[Channel]:
        placement = self.placement
        routes = [self._route(n, i) for n in placement.held_by(rank) for i in placement.pipelines_of(n)]
        return channels_into(rank, placement, routes, self._options.copies)

    def _replica_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Make the group of the ranks that hold replicas of a stage, by these; every rank makes all."""
        placement = self.placement
        stages = [(k, i) for k in range(placement.stages) for i in placement.pipelines]
        lists = dict.fromkeys(tuple(placement.replicas_of(k, i)) for k, i in stages)
        return {
            replicas: self._group(replicas) for replicas in lists if placement.ranks > 1 and len(replicas) > 1
        }

    def _group(self, replicas: Sequence[int]) -> dist.ProcessGroup:
        ranks = [self.placement.rank_of(replica) for replica in replicas]
        backend = "nccl" if self._links.nccl_joins(ranks) else "gloo"
        from avgpipe.runtime.group_sum import sum_group

        return self.world.connect(lambda: sum_group(cast("Met", self.world), ranks, self.device, backend))

    def _build_all(self, layers: Sequence[nn.Module]) -> None:
        """Make this process's stages. An error on one rank, as of its optimizer, is raised on all ranks."""
        refusal = None
        try:
            for replica in self.held:
                self._build(replica, layers)
        except Exception as error:  # also from the caller's functions
            refusal = error
        texts: list[str | None] = []
        # A lost rank is also found in the first batch, in which a spare may replace it.
        with suppress(PeerLost, PipelineTimeout):
            texts = self.world.gather(None if refusal is None else str(refusal))
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # its traceback refers to this frame
        for rank, text in enumerate(texts):
            if text is not None:
                raise ValueError(f"{self.world.name(rank)} cannot make its part of the pipeline: {text}")

    def _build(self, replica: int, layers: Sequence[nn.Module]) -> None:
        """Make the reference of a stage replica, and its pipelines' copies. ``layers``: of the whole model."""
        plan, options, placement = self._plan, self._options, self.placement
        k, r, _ = placement.replicas[replica]
        pipelines = placement.pipelines_of(replica)
        first, end = self.model.bounds[k : k + 2]
        own = stage_layers(layers, first, end)
        fill = None
        if self.spec.initial is not None:
            fill = partial(self.spec.initial.materialise, entries=self.model.entries[k], device=self.device)
        stages = [
            Stage(
                own,
                first,
                k,
                self.spec.seed,
                self.device,
                self.spec.compiler,
                fill,
                options.keeps_modes,
                sends=k + 1 < self.model.stages,
            )
            for _ in pipelines
        ]
        prepare = options.prepare
        prepared = [None if prepare is None else prepare(stage) for stage in stages]
        arenas = [
            Arena(trainable_parameters(stage)) if inside is None else inside.arena()
            for stage, inside in zip(stages, prepared)
        ]
        given = trainable_parameters(nn.ModuleList(own))
        hooks = [list((p._backward_hooks or {}).values()) for p in given]
        first_here = placement.replicas_of(k)[r]
        same = self.references.get(first_here)  # if dedicated pipelines are all in this process
        ema = self.emas.get(first_here)
        if options.ema_decay is not None:
            from avgpipe.elastic.versions import WeightAverage

            ema = self.emas[replica] = ema or WeightAverage(arenas[0].weights, options.ema_decay)
        optimizer = maker_of(options.optimizer, self.model.trainable[k], options.groups)
        self.references[replica] = same or self._reference(arenas[0], pipelines, optimizer, ema)
        scale = options.loss_scale if k == self.model.stages - 1 else None
        for i, stage, arena, inside in zip(pipelines, stages, arenas, prepared):
            self.trained[replica, i] = TrainedStage(
                stage,
                i,
                optimizer,
                options.lr_scheduler,
                self.references[replica],
                arena,
                plan,
                loss_scale=self._loss_scale(scale),
                hooks=hooks,
                ema=ema if self.references[replica] is None else None,
                prepared=inside,
            )

    def _loss_scale(self, scale: float | str | None) -> LossScale | None:
        """Return what scales the losses of a last stage: on a device with streams, in its memory if it changes."""
        if scale is None:
            return None
        versioned = self._plan.weights != "flush"
        from avgpipe.runtime.loss_scale import DeviceLossScale, LossScale

        if self.streams is None or scale != "dynamic":
            return LossScale(scale, versioned)
        return DeviceLossScale(versioned, self.device)

    def _reference(
        self, arena: Arena, here: Sequence[int], optimizer: Maker, ema: WeightAverage | None
    ) -> Reference | None:
        """Make the reference of a stage replica that the pipelines ``here`` train."""
        plan = self._plan
        if plan.pipelines == 1 or not arena.parameters:
            return None  # a lone pipeline has none to average with
        rule = plan.rule or ""

        def steps(flats: list[torch.Tensor]) -> torch.optim.Optimizer:
            return optimizer([nn.Parameter(view) for view in arena.layout.tensors(flats)])

        return Reference(
            arena.weights,
            plan.pipelines,
            alpha=plan.alpha,
            rule=rule,
            staleness=plan.staleness,
            period=plan.period,
            warmup_rounds=plan.warmup_rounds or 0,
            outer=steps if RULES[rule].tries else None,
            remote=()
            if self.placement.ranks == 1 and not plan.isolate
            else set(range(plan.pipelines)) - set(here),
            ema=ema,
            open=plan.isolate,
        )

    def _lane(self, route: Route, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> Lane:
        options, plan = self._options, self._plan
        trained, reference = self.trained[route.replica, route.pipeline], self.references[route.replica]
        port = Port(route, self.mailbox, self.links)
        stream = self._stream(route)
        replicas = tuple(self.placement.replicas_of(route.stage, route.pipeline))
        group_sum = None
        if replicas in groups:
            from avgpipe.runtime.group_sum import GroupSum, SumGroup

            if replicas not in self._sum_groups:
                self._sum_groups[replicas] = SumGroup(groups[replicas], self.mailbox, self.device)
            sums = self._sum_groups[replicas]
            group_sum = GroupSum(trained.arena.parameters, sums, route.sums_key(-1), stream)
        isolated, remote = None, None
        if self.others is not None:
            isolated = self.others.peers(route, stream)
        elif reference is not None and route.remote:
            from avgpipe.runtime.between import RemoteUpdates

            remote = RemoteUpdates(reference, self.mailbox, route, plan.batches_per_round, stream)
        shared, placement = self.model.shared[route.stage], self.placement
        first = placement.pipelines[0]
        is_first = route.pipeline == first and route.replica in placement.first_replicas(first)
        is_shared = plan.shares > 1 and len(placement.pipelines_of(route.replica)) > 1
        names = self.model.trainable[route.stage]
        make_compute: Callable[..., Compute] = Compute
        graphs: RowGraphs | None = None
        if options.cuda_graphs:
            graphs = named("avgpipe.runtime.graphs:graphs_of")(self._graphs, route, self.spec, self.device)
            make_compute = graphs.compute
        update = Update(trained, route, shared, options, port, group_sum, self.notice, names, isolated)
        update.reports_unseen = is_first and options.check != "off"
        update.divides_alone = plan.shares > 1 and not is_shared and route.pipeline == first
        return Lane(
            trained,
            route,
            port,
            make_compute(trained, route, options, port, group_sum),
            update,
            # A batch on the newest version needs the update at once; and the sums of replicas reuse the same
            # memory.
            overlaps=plan.weights in ("vertical-sync", "double-buffer") and not route.peers,
            remote=isolated or remote,
            stream=stream,
            shared=self._shared_batches(route.replica) if is_shared else None,
            graphs=graphs,
        )

    def _shared_batches(self, replica: int) -> SharedBatches | None:
        """Return what pipelines exchange of batches that they share; None if no option needs it."""
        if not (self._options.needs_norm or self._options.scales_late):
            return None
        if replica not in self._shared:
            self._shared[replica] = named("avgpipe.runtime.between:SharedBatches")()
        return self._shared[replica]

    def _stream(self, route: Route) -> LaneStream | None:
        if self.streams is None:
            return None
        reference = self.references[route.replica]
        pulls = reference is not None and reference.elasticity.pulls_at_the_end(0)
        k, r, _ = self.placement.replicas[route.replica]
        # Dedicated pipelines in one process have their own replicas, but share the first one's reference.
        return self.streams.lane(self.placement.replicas_of(k)[r], pulls)

    def _rows(self, schedule: Schedule) -> list[PipelineRow]:
        """Make the rows of this process's workers."""
        return [
            PipelineRow(
                [self.lanes[n, i] for n in self.placement.workers[worker]],
                schedule.rows[worker % schedule.workers],
                self._plan.weights or "flush",
                schedule.rows[schedule.worker_of(0)],
                self._plan.warmup_rounds or 0,
            )
            for worker in sorted({self.placement.worker_of(replica) for replica in self.held})
            for i in self.placement.pipelines_of(self.placement.workers[worker][0])
        ]

    def follow(self, schedule: Schedule) -> None:
        """Switch to another schedule of the same stages; no batch is in flight."""
        for row in self.rows:
            worker = self.placement.worker_of(next(iter(row.lanes.values())).route.replica)
            row.follow(schedule.rows[worker % schedule.workers], schedule.rows[schedule.worker_of(0)])

    # ---- running -------------------------------------------------------------------------------------------------

    def copy_ahead(self, batches: Sequence[tuple[Any, Any]]) -> ReadyOnEvent | None:
        """Begin to copy this worker's inputs and targets to its device; return None on the CPU."""
        if self.streams is None:
            return None
        stages = {self.placement.stage_of(n) for n in self.held}
        first, last = 0 in stages, self.placement.stages - 1 in stages
        return self.streams.copies.start([(x if first else None, y if last else None) for x, y in batches])

    def weights(self, replica: int, which: str | int) -> Sequence[torch.Tensor]:
        """Return the flat weights of a stage replica: the reference's, their average "ema", or a pipeline's."""
        if which == "ema":
            return self.emas[replica].weights
        reference = self.references[replica]
        if which == "reference" and reference is not None:
            return reference.parameters
        pipeline = self.placement.pipelines_of(replica)[0] if which == "reference" else int(which)
        return self.trained[replica, pipeline].arena.weights

    def whole_weights(self, replica: int, which: str | int, layout: Layout) -> Sequence[torch.Tensor]:
        """Return :meth:`weights`, laid out by ``layout``, also if other processes hold parts of them."""
        if which == "ema" or self.references[replica] is not None:
            return self.weights(replica, which)
        return self.trained[replica, self.placement.pipelines_of(replica)[0]].arena.gathered(layout)

    def settle(self, batches: int) -> None:
        """Wait until this process has all updates of the references from the first ``batches``."""
        remotes = [lane.remote for lane in self.lanes.values() if lane.remote is not None]
        streams = [lane.stream for lane in self.lanes.values() if lane.remote and lane.stream]
        for stream in streams:
            stream.begin(None)  # after the caller's changes to the reference, such as loading it

        def missing() -> list[Key]:
            for remote in remotes:
                remote.collect()
            return [key for remote in remotes for key in remote.missing(batches)]

        if remotes and (keys := missing()):
            self.scheduler.wait_for(keys, lambda: not missing(), missing)
        for stream in streams:
            stream.end()

    def wait_for_device(self) -> None:
        """Wait until the device has completed all work of the caller's stream; run other steps meanwhile."""
        if self.streams is not None:
            self.scheduler.run_until_done(current_stream(self.device).record_event())

    def running(self, harmless: type[Exception] | tuple[()] = ()) -> Running:
        """Report failures inside to the other ranks, and end this worker, except for ``harmless`` exceptions.

        A harmless exception is one that all ranks raise. The caller's modes are suspended inside.
        """
        return Running(self, harmless)

    def check_runs(self) -> None:
        """Refuse to run after a close or a failure."""
        if self._closed:
            raise PipelineError("this Pipeline is closed")
        if self.failure is not None:
            raise PipelineError(f"this Pipeline has failed before: {self.failure}") from self.failure

    def fail(self, error: Exception) -> None:
        """Report a failure to the other ranks; if another exception explains it, raise that."""
        self.failure = error
        if self._options.prepare is not None:
            self.failure = named("avgpipe.runtime.prepared:explained")(error, self.world)
        self.world.report(self.failure)
        if self.failure is not error:
            raise self.failure from error

    def forget(self) -> None:
        """Free what has trained here; the worker is closed, and another one will use its memory."""
        for held in (self.trained, self.references, self.emas, self.lanes):
            held.clear()
        self.rows.clear()
        self.scheduler.forget()

    def close(self, patience_s: float) -> None:
        """End the threads and links, once. ``patience_s``: timeout for peers to receive the last messages."""
        if self._closed:
            return
        self._closed = True
        probe.at("shutdown", **self.place)
        if self._watchdog is not None:
            self._watchdog.close()
        if self.others is not None:
            self.others.close()
        self._links.close(patience_s)
        for sums in self._sum_groups.values():
            sums.close()
        for lane in self.lanes.values():
            if lane.stream is not None:
                lane.stream.end()  # after a failure, its pending work still uses memory that is now freed
        if self.streams is not None:
            self.streams.close()
