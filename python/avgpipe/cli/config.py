"""The options of the commands, each declared once: its name, type, default and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from avgpipe.cli.options import Options, Value, internal
from avgpipe.cli.values import (
    Advance,
    Amounts,
    Count,
    CountOrNone,
    Counts,
    File,
    Folder,
    Methods,
    Picture,
    Positive,
    Schedule,
    ScheduleOrFile,
    Size,
    Workload,
    numbers,
    parse_seed,
    parse_staleness,
    parse_target_option,
)
from avgpipe.links import NAMES as LINKS
from avgpipe.plan import BATCHES, Plan
from avgpipe.report.course import VALIDATIONS
from avgpipe.report.loggers import LOGGERS
from avgpipe.rules import CORRECTIONS, RULES
from avgpipe.schedule import RECOMPUTE, WEIGHTS
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import LR_SCALINGS, OPTIMIZERS, BuildOptions
from avgpipe.units import parse_rate, parse_seconds

DEFAULT_STAGES, DEFAULT_PIPELINES, DEFAULT_MICRO_BATCHES = 2, 2, 4


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Options):
    """The workload.

    Attributes:
        workload: Model and task, or a function of yours that makes them, as path/to/script.py:make; it gets those of
            the workload's options that are given and that it has arguments for.
        data: Data folder. A language model needs train.txt and valid.txt in it; without a folder it reads the source
            of Python's standard library. The documentation of the commands has the other workloads.
        preset: Size of the model. Default: tiny.
        batch_size: Samples in a batch, which pipelines share. Default: the preset's.
        optimizer: What steps the weights; muon: Muon for hidden matrices, AdamW for the rest. Default: the preset's.
        device: Where to compute: cpu, or an accelerator that torch sees.
        autocast: Precision of matrix products; auto: lower where that makes the workload faster.
    """

    workload: Workload
    data: Folder | None = None
    preset: Annotated[str | None, Value("tiny|small|paper")] = None
    batch_size: Count | None = None
    optimizer: Annotated[str | None, Value("|".join(OPTIMIZERS), choices=OPTIMIZERS)] = None
    device: Annotated[str, Value("cpu|cuda|xpu")] = "cpu"
    autocast: Literal["auto", "none", "bfloat16", "float16"] = "auto"

    def build_options(self, plan: Plan | None = None) -> BuildOptions:
        """What is asked of the workload; ``plan``: whose pipelines train it."""
        asked = {f.name: getattr(self, f.name) for f in fields(BuildOptions) if hasattr(self, f.name)}
        for name in ("data", "pretrained"):
            if asked.get(name) is not None:
                asked[name] = Path(asked[name])
        asked |= {name: getattr(plan or Plan(), name) for name in ("pipelines", "batch", "rule")}
        return BuildOptions(**asked)


@dataclass(frozen=True, kw_only=True)
class LearningOptions(WorkloadOptions):
    """The training.

    Attributes:
        pretrained: Folder of a transformers model whose weights to start from (bert, gpt).
        loader_workers: Processes of each worker that prepare batches ahead.
        seed: Random seed (weights, dropout).
        lr: Learning rate of a single pipeline, at its highest. Default: the preset's.
        lr_scaling: How the learning rate grows with the number of pipelines. Default: the preset's.
        epochs: Epochs, over all pipelines. Default: the preset's.
        max_batches: Stop after this many batches, over all pipelines; the learning rate's course is stretched over
            them.
        validations: Validations in the run, at equal numbers of samples, the last one at its end.
        valid_batches: Validate on the first so many batches of the validation data. Default: all of them.
        target: Stop when the metric, or as in loss=2.1 the loss, of a validation reaches this value.
        link: How tensors travel between workers.
        wire_dtype: Wire dtype for activations and gradients; none keeps their dtype.
        skip_nonfinite: Skip updates whose gradients have infinities or NaN.
        timeout_s: Seconds to wait for another worker.
    """

    pretrained: Folder | None = None
    loader_workers: int = 0
    seed: int = 0
    lr: Positive | None = None
    lr_scaling: Annotated[str | None, Value("|".join(LR_SCALINGS), choices=LR_SCALINGS)] = None
    epochs: Count | None = None
    max_batches: Count | None = None
    validations: Count = VALIDATIONS
    valid_batches: Count | None = None
    target: Annotated[float | str | None, Value("NUMBER|loss=NUMBER", parse_target_option)] = None
    link: Annotated[str, Value("|".join(LINKS), choices=LINKS)] = "auto"
    wire_dtype: Literal["none", "bfloat16", "float16"] = "none"
    skip_nonfinite: bool = False
    timeout_s: Positive = 300.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The plan.

    Attributes:
        plan: A plan.json to start from; options given beside it take precedence.
        system: Published system whose schedule, weights and averaging to use. Default: avgpipe.
        stages: Number of pipeline stages, each on a worker of its own. Default: 2, or as many as torchrun started.
        pipelines: Number of pipelines that run side by side. Default: 2, if the system allows.
        micro_batches: Micro-batches per batch. Default: 4, if the system and the batch allow.
        schedule: Order of the work. Default: the system's.
        stages_per_worker: Stages on each worker, with the schedules interleaved-1f1b, interleaved-zero-bubble and
            looped-bfs. Default: 2.
        replication: Workers of each stage, which share its micro-batches, as in 2,1,1. Default: one each.
        spread: Give each pipeline workers of its own; updates then travel over the network.
        isolate: Give each pipeline processes of its own, so that one that is lost costs the others nothing.
        weights: Version of the weights that a batch runs on. Default: what the schedule was published with.
        advance: Forward passes that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto to choose by
            the times of the first batches. Default: the number of stages that follow.
        rule: Averaging rule. Default: mean-gradient, one optimizer for all pipelines, where they share each batch;
            avgpipe with --alpha, --period or --staleness asynchronous.
        staleness: Rounds by which averaging lags behind. Default: 1.
        alpha: Strength of the pull towards the average, 0 to 1. Default: the rule's.
        period: Updates of a pipeline between two averagings. Default: 1.
        warmup_rounds: Batches at the beginning of training whose gradients are of the newest weights. Default: 100
            where pipelines share an optimizer, else 0.
        recompute: Micro-batches that run their forward pass again instead of saving activations. Default: never.
        batch: Whether pipelines share each batch, which then makes one step of the reference, or take turns. Default:
            global, or the system's.
        correction: What is done about late gradients of schedules without a flush. Default: nothing.
    """

    plan: File | None = None
    system: Annotated[str | None, Value("NAME", choices=tuple(SYSTEMS))] = None
    stages: Count | None = None
    pipelines: Count | None = None
    micro_batches: Count | None = None
    schedule: Schedule | None = None
    stages_per_worker: int | None = None
    replication: Annotated[
        tuple[int, ...] | None, Value("NUMBER,...", numbers(int, "2,1,1 for each stage"))
    ] = None
    spread: bool = False
    isolate: bool = False
    weights: Annotated[str | None, Value("|".join(WEIGHTS), choices=WEIGHTS)] = None
    advance: Advance = None
    rule: Annotated[str | None, Value("|".join(RULES), choices=RULES)] = None
    staleness: Annotated[int | str | None, Value("0|1|asynchronous", parse_staleness)] = None
    alpha: float | None = None
    period: Count | None = None
    warmup_rounds: CountOrNone | None = None
    recompute: Annotated[str | None, Value("|".join(RECOMPUTE), choices=RECOMPUTE)] = None
    batch: Annotated[str | None, Value("|".join(BATCHES), choices=BATCHES)] = None
    correction: Annotated[str | None, Value("|".join(CORRECTIONS), choices=tuple(CORRECTIONS))] = None
    partition: tuple[int, ...] | tuple[str, ...] | None = internal(None)
    placement: tuple[tuple[int, ...], ...] | None = internal(None)


@dataclass(frozen=True, kw_only=True)
class CheckConfig(WorkloadOptions, PlanOptions):
    """Compare what a plan trains with what one device trains: before a long job, or for a report of a bug.

    Trains WORKLOAD for some batches on one device without a pipeline, then by the plan: with all stages in one process,
    and on the plan's workers on this machine. In float64, losses, metrics, weights and buffers must be equal. Parts of
    the plan that change the result by design, such as late averages, are left out of that comparison and named. Exits
    with 1 if something else differs.

    Attributes:
        batches: How many batches to train on.
        seed: Random seed (weights, batches).
        alone: Do not start the plan's workers.
    """

    batches: Count = 20
    seed: int = 0
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class IsolationOptions(Options):
    """Isolated pipelines.

    Attributes:
        min_pipelines: With --isolate, the run ends once fewer pipelines are left.
        max_pipelines: With --isolate, how many pipelines the run has at most, with those of avgpipe join. Default: as
            many as it begins with.
        restarts: With --isolate, how many times in a row a pipeline is started again that is lost before it has made
            three steps.
        spare_pipelines: With --isolate, pipelines whose processes wait, with all imported and read, to take the place
            of one that is lost.
        listen: With --isolate, HOST:PORT where avgpipe join on other hosts finds the run; the secret that both know is
            in AVGPIPE_JOIN_TOKEN.
    """

    min_pipelines: Count = 1
    max_pipelines: Count | None = None
    restarts: int = 3
    spare_pipelines: CountOrNone = 0
    listen: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LearningOptions, PlanOptions, IsolationOptions):
    """Train WORKLOAD: start the plan's workers on this machine, or join those that torchrun started.

    Writes plan.json, metrics.jsonl, curves.png, timeline.json, timeline.png, checkpoints/ and summary.json to the run's
    folder.

    Attributes:
        out: Folder of the run. Default: runs/WORKLOAD-DATE-TIME.
        resume: Continue from the last checkpoint in --out; options that are not given stay as they were.
        rebalance: After an epoch, move layers between stages if batches will take at least 5 % less time by it, by what
            the stages have been measured to take.
        verify_every: Batches between two looks for silent corruption: whether what must be equal is. Default: none.
        verify_wire: Give messages between workers checksums: a flipped bit ends the run, and is named.
        logger: Where to log what metrics.jsonl has, too; once for each.
        checkpoint_minutes: Minutes between checkpoints within an epoch.
        keep: How many of the newest checkpoints stay.
        wait_for_checkpoints: Let training wait while a checkpoint is written. It then needs no copy in main memory.
        preemption_seconds: How long the run may take to save and end after SIGTERM, before it is ended.
        launch: torchrun's name for what started the workers.
        is_restart: Whether torchrun has started the workers before, and they began this run.
    """

    out: Folder = ""
    resume: bool = False
    rebalance: bool = False
    verify_every: Count | None = None
    verify_wire: bool = False
    logger: Annotated[tuple[str, ...], Value("|".join(LOGGERS), choices=tuple(LOGGERS), repeated=True)] = ()
    checkpoint_minutes: Positive = 10.0
    keep: Count = 1
    wait_for_checkpoints: bool = False
    preemption_seconds: Positive = 30.0
    launch: str | None = internal(None)
    is_restart: bool = internal(False)

    def to_plan(self) -> Plan:
        """The plan of a complete configuration, see ``resolve``."""
        return Plan(**{f.name: getattr(self, f.name) for f in fields(Plan)})

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options in a run.json; older ones had the plan's in an object of their own."""
        plan = values.get("plan")
        values = {**values, **plan, "plan": None} if isinstance(plan, dict) else values
        values = {name: value for name, value in values.items() if name != "restarts" or value is not False}
        return super().known({"batch": "per-pipeline", **values})  # which older runs had

    @property
    def checkpoints(self) -> Path:
        return Path(self.out) / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(WorkloadOptions):
    """The measurement.

    Attributes:
        bandwidth: Bandwidth of the link between two workers, as 10Gbit; goes with --latency. Default: measured between
            two processes.
        latency: Latency of that link, as 50us.
        threads: Threads of torch in each process, on the CPU.
        budget_s: About how many seconds to measure.
    """

    bandwidth: Annotated[float | None, Value("RATE", parse_rate)] = None
    latency: Annotated[float | None, Value("TIME", parse_seconds)] = None
    threads: Count = 1
    budget_s: Positive = 15.0


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ProfilingOptions):
    """Time every layer of WORKLOAD, forward, backward and update, and count its bytes: what plans are made from.

    Writes the profile as JSON.

    Attributes:
        micro_batch_sizes: Sizes of the micro-batches that are timed, in samples.
        workers: Processes that profile at the same time, as workers of this machine would compute.
        out: Where to write the profile.
        plot: Draw a picture.
    """

    micro_batch_sizes: Counts = (1, 2, 4, 8)
    workers: Count = 1
    out: File = "profile.json"
    plot: Picture | None = None


@dataclass(frozen=True, kw_only=True)
class TuneConfig(ProfilingOptions):
    """Find a good plan for WORKLOAD on a number of workers, without trying them all.

    Profiles the layers, simulates plans of many sizes, leaves out what does not fit into the memory, and times the best
    few where the devices are here. Prints predicted and measured times and memory; writes the plan.

    Attributes:
        workload: Model and task, or a function of yours that makes them; without it give --profile and --batch-size.
        workers: Number of devices, or on the CPU of processes.
        memory_limit_bytes: Memory of a worker, as 2GiB; on the CPU of its whole process. Default: no limit.
        pipelines: Numbers of pipelines to try.
        micro_batches: Numbers of micro-batches to try. Default: up to one for each sample.
        profile: Profile written by `avgpipe profile`. Default: the workload is profiled first.
        cluster: TOML file with the devices and links to plan for, instead of --workers. Plans are then not timed.
        bandwidth: Bandwidth of the link between two workers, as 10Gbit; goes with --latency. Plans are then not timed.
        trials: How many of the best plans to time.
        baselines: Also time max-num and max-size of the AvgPipe paper.
        traversal: Also time every setting: this takes very long.
        out: Where to write the plan.
    """

    workload: Workload = ""
    workers: Count | None = None
    memory_limit_bytes: Size | None = None
    pipelines: Counts = (1, 2, 3)
    micro_batches: Counts | None = None
    profile: File | None = None
    cluster: File | None = None
    trials: int = 3
    baselines: bool = False
    traversal: bool = False
    out: File = "plan.json"


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(ProfilingOptions):
    """Cut WORKLOAD, or a profile of its layers, into stages by several methods, side by side.

    Prints for each method the cut, the replicas of stages, the workers they are placed on, and the simulated time of
    the system that the method is for: pipedream, dapple and 2bw each for its own, balance and simulated for avgpipe.

    Attributes:
        workload: Model and task to profile, a function of yours that makes them, or a profile written by
            `avgpipe profile`.
        method: Methods, as in pipedream,dapple: balance, simulated, pipedream, dapple, 2bw. Default: all.
        workers: Number of workers.
        cluster: TOML file with the devices and links to plan for, instead of --workers.
        stages: Number of stages. Default: what a method finds best, or as many as workers.
        micro_batches: Micro-batches per batch; 2bw finds its own.
        pipelines: Number of pipelines that share the workers (balance, simulated).
        schedule: Order of the work (balance, simulated).
        batch_size: Samples in a batch. Default: the preset's, or as many of the profile's largest micro-batches.
        memory_limit_bytes: Memory of a worker, as 2GiB. Default: no limit.
        out: Write the plan that trains most samples per second.
    """

    workload: Annotated[str, Value("WORKLOAD|PROFILE", positional=True)]
    method: Methods | None = None
    workers: Count | None = None
    cluster: File | None = None
    stages: Count | None = None
    micro_batches: Count = 8
    pipelines: Count = 1
    schedule: Schedule = "advance-forward"
    memory_limit_bytes: Size | None = None
    out: File | None = None


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Options):
    """Say when a schedule would finish, how long a batch takes in steady state, and what memory it needs.

    A device runs one action at a time, with several pipelines backwards first, then the oldest batch; transfers occupy
    links, one tensor at a time in each direction.

    Attributes:
        stages: Number of stages, in most schedules with a device each; needed unless a file has the schedule.
        micro_batches: Micro-batches per batch; needed unless a file has the schedule.
        forward_ms: Forward time of a micro-batch in milliseconds; one value, or one per stage as in 10,12,9.
        backward_ms: Backward time of a micro-batch in milliseconds; one value, or one per stage.
        transfer_ms: Transfer time of one tensor in milliseconds; one value, or one per boundary.
        update_ms: Time of a batch's update in milliseconds; one value, or one per stage.
        activation_mib: MiB of activations saved for a micro-batch; one value, or one per stage.
        weight_mib: MiB of weights and optimizer state of a pipeline; one value, or one per stage.
        schedule: Order of the work, or a CSV file that has it, as Schedule.to_csv or torch.distributed.pipelining
            write it.
        advance: Forward passes that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto for the least
            memory within 1 % of the best time. Default: the number of stages that follow.
        stages_per_worker: Stages on each device, with the schedules interleaved-1f1b, interleaved-zero-bubble and
            looped-bfs. Default: 2.
        pipelines: Number of pipelines on the same devices.
        batches: Batches, over all pipelines. Default: one per pipeline.
        plot: Draw a picture.
    """

    stages: Count | None = None
    micro_batches: Count | None = None
    forward_ms: Amounts
    backward_ms: Amounts
    transfer_ms: Amounts = (0.0,)
    update_ms: Amounts = (0.0,)
    activation_mib: Amounts | None = None
    weight_mib: Amounts | None = None
    schedule: ScheduleOrFile = "advance-forward"
    advance: Advance = None
    stages_per_worker: int | None = None
    pipelines: Count = 1
    batches: Count | None = None
    plot: Picture | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Options):
    """Say what was built, what this machine has, what will be used, and what is missing.

    The exit code is 1 if training cannot work.
    """


@dataclass(frozen=True, kw_only=True)
class RunConfig(IsolationOptions):
    """Start SCRIPT on local workers through torch's launcher, with torchrun's environment variables.

    Options first, then the script and its arguments. When a worker fails the others are ended and the exit code is 1.

    With --isolate each pipeline has workers of its own, and the script's plan says isolate=True. When one fails, its
    pipeline is started again, and joins the others, which have gone on.

    Attributes:
        script: The Python file that every worker runs.
        args: Arguments of the script.
        stages: Number of workers to start, one per stage; with --isolate of each pipeline.
        isolate: Start processes for each pipeline.
        pipelines: How many pipelines, with --isolate.
        spares: Processes that wait to take the place of a worker that is killed; 0 starts a new one then. The script's
            Pipeline must have copies_every_s. Default: a worker that is killed ends the run.
        seed: What torch, random and numpy begin with on every worker, so that all of them make the same model and draw
            the same batches; "none" leaves that to the script.
        json: Print one JSON object and nothing else; what the script prints goes to standard error.
    """

    script: Annotated[str, Value("SCRIPT", positional=True)]
    args: Annotated[tuple[str, ...], Value("ARGS", positional=True, rest=True)] = ()
    stages: Count = 2
    isolate: bool = False
    pipelines: Count = 2
    spares: CountOrNone | None = None
    seed: Annotated[int, Value("NUMBER|none", parse_seed)] = 0


@dataclass(frozen=True, kw_only=True)
class JoinConfig(Options):
    """Start one more pipeline for a run with --isolate that goes on, on the same host or on another.

    It joins the others while they train, or takes the place of one that was lost. The command ends with the run; to
    interrupt it ends that pipeline alone.

    Attributes:
        run: On the same host the folder of the run of avgpipe train, or the one that avgpipe run has named; on another
            one HOST:PORT of the run's --listen, in a folder with the same script and files.
        restarts: How often it starts a pipeline again that was lost.
    """

    run: Annotated[str, Value("RUN", positional=True)]
    restarts: CountOrNone = 0
