"""The options of the commands, each declared once: its name, type, default and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from avgpipe.cli.options import Options, Value, internal, parse_count, parse_positive
from avgpipe.links import NAMES as LINKS
from avgpipe.plan import BATCHES, Plan
from avgpipe.report.course import VALIDATIONS, parse_target
from avgpipe.report.loggers import LOGGERS
from avgpipe.rules import CORRECTIONS, RULES
from avgpipe.schedule import RECOMPUTE, WEIGHTS, schedule_names
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import LR_SCALINGS, OPTIMIZERS, BuildOptions, is_script, workload_names
from avgpipe.units import parse_bytes, parse_names, parse_numbers, parse_rate, parse_seconds

NO_SPARES = "isolated pipelines replace each other and go on at once: use --spare-pipelines for whole ones"
DEFAULT_STAGES, DEFAULT_PIPELINES, DEFAULT_MICRO_BATCHES = 2, 2, 4


# ---- values ----------------------------------------------------------------------------------------------------------


Parse = Callable[[str, str], Any]


def parse_advance(name: str, text: str) -> int | tuple[int, ...] | str:
    if text == "auto":
        return text
    numbers = parse_numbers(name, text, int, "2, as 3,2,1,0 for each stage, or auto")
    return numbers if len(numbers) > 1 else numbers[0]


def parse_staleness(name: str, text: str) -> int | str:
    return int(text) if text.isdigit() else text


def numbers(kind: type[int] | type[float], example: str, least: float | None = None) -> Parse:
    """Make the parser of numbers with commas between them."""
    return lambda name, text: parse_numbers(name, text, kind, example, least=least)


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    return tuple(sorted(set(parse_numbers(name, text, int, "1,2,4", least=1))))


def parse_count_or_none(name: str, text: str) -> int:
    return 0 if text.strip() == "0" else parse_count(name, text)


def parse_seed(name: str, text: str) -> int:
    if text.strip() == "none":
        return -1
    if not (text.strip().isdigit() and int(text) < 2**32):
        raise ValueError(f"{name} {text}: must be a whole number from 0 to {2**32 - 1}, or none")
    return int(text)


def parse_target_option(name: str, text: str) -> float | str:
    try:
        value, of_loss = parse_target(text)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {str(error).partition(': ')[2]}") from None
    return text if of_loss else value


def parse_picture(name: str, text: str) -> str:
    from avgpipe.timeline.plot import check_picture  # loads numpy, which help pages do without

    check_picture(text)
    return text


Folder = Annotated[str, Value("DIR")]
File = Annotated[str, Value("FILE")]
Picture = Annotated[str, Value("FILE", parse_picture)]
Names = Annotated[tuple[str, ...], Value("NAMES", lambda _, text: parse_names(text))]
Count = Annotated[int, Value("NUMBER", parse_count)]
Counts = Annotated[tuple[int, ...], Value("NUMBER,...", parse_counts)]
CountOrNone = Annotated[int, Value("NUMBER", parse_count_or_none)]
Positive = Annotated[float, Value("NUMBER", parse_positive)]
Amounts = Annotated[tuple[float, ...], Value("NUMBER,...", numbers(float, "10 or 10,12,9", 0))]
Size = Annotated[int, Value("SIZE", partial(parse_bytes, positive=True))]
Wait = Annotated[float, Value("SECONDS", lambda name, text: numbers(float, "60", 0)(name, text)[0])]
Milliseconds = Annotated[float, Value("NUMBER", lambda name, text: numbers(float, "10", 0)(name, text)[0])]
Schedule = Annotated[str, Value("NAME", choices=tuple(schedule_names()))]
ScheduleOrFile = Annotated[
    str, Value("NAME|FILE.csv", choices=tuple(schedule_names()), besides=lambda text: text.endswith(".csv"))
]
Advance = Annotated[int | tuple[int, ...] | str | None, Value("NUMBER,...|auto", parse_advance)]
Workload = Annotated[
    str, Value("WORKLOAD", choices=workload_names() or None, besides=is_script, positional=True)
]


# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Options):
    """The workload.

    Attributes:
        workload: Model and task, or a function that makes them, as path/to/script.py:make; the function gets
            those of the workload's options that are given and that it has arguments for.
        data: Data folder. A language model needs train.txt and valid.txt in it; without a folder it reads the
            source of Python's standard library. The documentation of the commands describes the other
            workloads.
        preset: Size of the model. Default: tiny.
        batch_size: Samples in a batch, which all pipelines share. Default: the preset's.
        optimizer: Optimizer; muon: Muon for hidden matrices, AdamW for the rest. Default: the preset's.
        device: Where to compute: cpu, or an accelerator that torch sees.
        autocast: Precision of matrix products; auto: lower where that is faster for the workload.
    """

    workload: Workload
    data: Folder | None = None
    preset: Annotated[str | None, Value("tiny|small|paper")] = None
    batch_size: Count | None = None
    optimizer: Annotated[str | None, Value("|".join(OPTIMIZERS), choices=OPTIMIZERS)] = None
    device: Annotated[str, Value("cpu|cuda|xpu")] = "cpu"
    autocast: Literal["auto", "none", "bfloat16", "float16"] = "auto"

    def build_options(self, plan: Plan | None = None) -> BuildOptions:
        """Return the options that the workload is built with; ``plan``: the plan that trains it."""
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
        pretrained: Folder of a transformers model to load the initial weights from (bert, gpt).
        loader_workers: Processes of each worker that prepare batches in advance.
        seed: Random seed (weights, dropout).
        lr: Peak learning rate of a single pipeline. Default: the preset's.
        lr_scaling: How the learning rate grows with the number of pipelines. Default: the preset's.
        epochs: Epochs, over all pipelines. Default: the preset's.
        max_batches: Stop after this many batches, over all pipelines; the learning rate schedule is stretched
            over them.
        validations: Validations in the run, with equal numbers of samples between them, the last one at the
            end.
        valid_batches: Validate on this many first batches of the validation data. Default: all of them.
        target: Stop when the metric of a validation reaches this value, or, as in loss=2.1, its loss.
        link: How tensors travel between workers.
        wire_dtype: Wire dtype for activations and gradients, and for updates between hosts; none keeps their
            dtype.
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
        system: Published system: sets schedule, weights and averaging. Default: avgpipe.
        stages: Number of pipeline stages, each on its own worker. Default: 2, or as many as torchrun started.
        pipelines: Number of pipelines that run side by side. Default: 2, if the system allows.
        micro_batches: Micro-batches per batch. Default: 4, if the system and the batch allow.
        schedule: Order of the work. Default: the system's.
        stages_per_worker: Stages on each worker, with the schedules interleaved-1f1b, interleaved-zero-bubble and
            looped-bfs. Default: 2.
        replication: Workers of each stage, which share its micro-batches, as in 2,1,1. Default: one for each
            stage.
        spread: Give each pipeline its own workers; updates then travel over the network.
        isolate: Give each pipeline its own processes, so that losing one pipeline does not stop the others.
        weights: Version of the weights that a batch runs on. Default: as published for the schedule.
        advance: Forward passes that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto to
            choose by the times of the first batches. Default: the number of later stages.
        rule: Averaging rule. Default: mean-gradient, one optimizer for all pipelines, where pipelines share
            each batch; for avgpipe with --alpha, --period or --staleness: asynchronous.
        staleness: Rounds by which averaging lags behind. Default: 1.
        alpha: Strength of the pull towards the reference, 0 to 1. Default: the rule's.
        period: Updates of a pipeline between two averagings. Default: 1.
        warmup_rounds: Batches at the beginning of training whose gradients are computed with the newest
            weights. Default: 100 where pipelines share an optimizer, else 0.
        recompute: Micro-batches that repeat their forward pass instead of saving activations. Default: never.
        batch: Whether pipelines share each batch, which then makes one step of the reference, or train on
            batches in turn. Default: global, or the system's.
        correction: Correction for late gradients, of schedules without a flush. Default: none.
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
    """Compare what a plan trains with what one device trains, before a long job or for a bug report.

    Trains WORKLOAD for some batches on one device without a pipeline, then by the plan: with all stages in
    one process, and on the plan's workers on this machine. In float64, losses, metrics, weights and buffers
    must be equal. Settings of the plan that change the result by design, such as late averages, are left out
    of that comparison and named. Exits with 1 if something else differs.

    Attributes:
        batches: Number of batches to train on.
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
        min_pipelines: With --isolate, the run ends once fewer pipelines remain.
        max_pipelines: With --isolate, the most pipelines that the run may have, including those of avgpipe
            join. Default: as many as it begins with.
        restarts: With --isolate, the number of times in a row that a pipeline is restarted if it is lost
            before it has made three steps; where the command has joined a run, as with --at, if it is lost
            within a minute of its start. 0: a lost pipeline is not restarted.
        spare_pipelines: With --isolate, pipelines whose processes wait, with imports done and data read, to
            replace a lost pipeline.
        listen: With --isolate, HOST:PORT where avgpipe join on other hosts finds the run; all hosts need the
            same secret in AVGPIPE_JOIN_TOKEN, or in a file that AVGPIPE_JOIN_TOKEN_FILE names.
        at: With --isolate, HOST:PORT for the same command on several hosts: the one on HOST begins the run, with
            one pipeline, and each other one adds a pipeline. Default: what Slurm, torchrun or Kubernetes say.
        wait_s: With --at, or on several hosts of a scheduler, seconds to wait for the command that begins the
            run, also where it has to begin again.
        shares: With --isolate, how a batch that pipelines share is divided: a faster pipeline gets more
            micro-batches, or all get equally many, which gives the same bits each time.
    """

    min_pipelines: Count = 1
    max_pipelines: Count | None = None
    restarts: int = 3
    spare_pipelines: CountOrNone = 0
    listen: str | None = None
    at: str | None = None
    wait_s: Wait = 300.0
    shares: Literal["pace", "equal"] = "pace"


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Options):
    """The queue.

    Attributes:
        requeue: In a job of Slurm, put the job back into the queue once SIGTERM has ended the run.
    """

    requeue: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LearningOptions, PlanOptions, IsolationOptions, QueueOptions):
    """Train WORKLOAD: start the plan's workers on this machine, or join those that torchrun started.

    Writes plan.json, metrics.jsonl, curves.png, timeline.json, timeline.png, checkpoints/ and summary.json to the run's
    folder.

    Attributes:
        out: Folder of the run. Default: runs/WORKLOAD-DATE-TIME.
        resume: Continue from the last checkpoint in --out; options that are not given stay as they were.
        verify_every: Batches between two checks for silent corruption, which compare values that must be equal.
            Default: none.
        verify_wire: Add checksums to messages between workers: a flipped bit ends the run with an error that
            names it.
        logger: Another place to log the content of metrics.jsonl; repeat the option for several.
        checkpoint_minutes: Minutes between two checkpoints within an epoch.
        keep: Number of newest checkpoints that are kept.
        wait_for_checkpoints: Pause training while a checkpoint is written. It then needs no copy in main
            memory.
        preemption_seconds: Seconds that the run has after SIGTERM to save and end, before it is killed.
        spares: Spare processes, each of which can replace a worker that is killed; with 0, a new process is
            started then. Workers keep copies of each other's state in main memory. Default: a worker that is killed
            ends the run.
        launch: Name that torchrun or Slurm gave the launch of the workers.
        is_restart: Whether one of them has restarted the workers of this run.
    """

    out: Folder = ""
    resume: bool = False
    verify_every: Count | None = None
    verify_wire: bool = False
    logger: Annotated[tuple[str, ...], Value("|".join(LOGGERS), choices=tuple(LOGGERS), repeated=True)] = ()
    checkpoint_minutes: Positive = 10.0
    keep: Count = 1
    wait_for_checkpoints: bool = False
    preemption_seconds: Positive = 30.0
    spares: CountOrNone | None = None
    launch: str | None = internal(None)
    is_restart: bool = internal(False)

    def to_plan(self) -> Plan:
        """Return the plan of a complete configuration, see ``resolve``."""
        return Plan(**{f.name: getattr(self, f.name) for f in fields(Plan)})

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options in a run.json; older files have the plan's options in an object of their own."""
        plan = values.get("plan")
        values = {**values, **plan, "plan": None} if isinstance(plan, dict) else values
        values = {name: value for name, value in values.items() if name != "restarts" or value is not False}
        return super().known({"batch": "per-pipeline", **values})  # the default of older runs

    @property
    def checkpoints(self) -> Path:
        return Path(self.out) / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(WorkloadOptions):
    """The measurement.

    Attributes:
        bandwidth: Bandwidth of the link between two workers, as 10Gbit; needs --latency. Default: measured
            between two processes.
        latency: Latency of that link, as 50us.
        threads: CPU threads of torch in each process.
        budget_s: Approximate seconds to measure for.
    """

    bandwidth: Annotated[float | None, Value("RATE", parse_rate)] = None
    latency: Annotated[float | None, Value("TIME", parse_seconds)] = None
    threads: Count = 1
    budget_s: Positive = 15.0


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(ProfilingOptions):
    """Time every layer of WORKLOAD, forward, backward and update, and count its bytes, to make plans.

    Writes the profile as JSON.

    Attributes:
        micro_batch_sizes: Sizes of the micro-batches to time, in samples.
        workers: Processes that profile at the same time, as the workers of this machine would compute.
        out: Where to write the profile.
    """

    micro_batch_sizes: Counts = (1, 2, 4, 8)
    workers: Count = 1
    out: File = "profile.json"


@dataclass(frozen=True, kw_only=True)
class TuneConfig(ProfilingOptions):
    """Find a good plan for WORKLOAD on a number of workers, without trying all plans.

    Profiles the layers, simulates plans of many sizes, drops those that do not fit into the memory, and times
    the best few if the devices are on this machine. Prints predicted and measured times and memory; writes
    the plan.

    Attributes:
        workload: Model and task, or a function that makes them; without it give --profile and --batch-size.
        workers: Number of devices, or of processes on the CPU.
        memory_limit_bytes: Memory of a worker, as 2GiB; on the CPU, of its whole process. Default: no limit.
        pipelines: Numbers of pipelines to try.
        micro_batches: Numbers of micro-batches to try. Default: up to one per sample.
        profile: Profile written by `avgpipe profile`. Default: the workload is profiled first.
        cluster: TOML file with the devices and links to plan for, instead of --workers. Plans are then not timed.
        bandwidth: Bandwidth of the link between two workers, as 10Gbit; needs --latency. Plans are then not timed.
        trials: Number of best plans to time.
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
    out: File = "plan.json"


@dataclass(frozen=True, kw_only=True)
class PartitionConfig(ProfilingOptions):
    """Cut WORKLOAD, or the layers of a profile, into stages by several methods, side by side.

    Prints for each method the cut, the replicas of stages, the workers they are placed on, and the simulated
    time of the system that the method is for: pipedream, dapple and 2bw each for the system of that name,
    balance and simulated for avgpipe.

    Attributes:
        workload: Model and task to profile, a function that makes them, or a profile written by `avgpipe
            profile`.
        method: Methods, as in pipedream,dapple: balance, simulated, pipedream, dapple, 2bw. Default: all.
        workers: Number of workers.
        cluster: TOML file with the devices and links to plan for, instead of --workers.
        stages: Number of stages. Default: the best that a method finds, or as many as workers.
        micro_batches: Micro-batches per batch; 2bw chooses its own.
        pipelines: Number of pipelines that share the workers (balance, simulated).
        schedule: Order of the work (balance, simulated).
        batch_size: Samples in a batch. Default: the preset's; of a profile, --micro-batches times its largest
            micro-batch.
        memory_limit_bytes: Memory of a worker, as 2GiB. Default: no limit.
        out: Where to write the plan that trains most samples per second.
    """

    workload: Annotated[str, Value("WORKLOAD|PROFILE", positional=True)]
    method: Names | None = None
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
    """Simulate a schedule: when it finishes, the time of a batch in steady state, and the memory it needs.

    A device runs one action at a time; with several pipelines, backwards first, then the oldest batch.
    Transfers occupy links, one tensor at a time in each direction.

    Attributes:
        stages: Number of stages, in most schedules with a device each; required unless the schedule is a
            file.
        micro_batches: Micro-batches per batch; required unless the schedule is a file.
        forward_ms: Forward time of a micro-batch in milliseconds; one value, or one per stage as in 10,12,9.
        backward_ms: Backward time of a micro-batch in milliseconds; one value, or one per stage.
        transfer_ms: Transfer time of one tensor in milliseconds; one value, or one per boundary.
        update_ms: Time of a batch's update in milliseconds; one value, or one per stage.
        activation_mib: MiB of activations saved for a micro-batch; one value, or one per stage.
        weight_mib: MiB of weights and optimizer state of a pipeline; one value, or one per stage.
        schedule: Order of the work, or a CSV file with the schedule, as Schedule.to_csv or
            torch.distributed.pipelining write it.
        advance: Forward passes that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto for
            the least memory within 1 % of the best time. Default: the number of later stages.
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
    """Print what was built, what this machine has, what will be used, and what is missing.

    The exit code is 1 if training cannot work.
    """


@dataclass(frozen=True, kw_only=True)
class RunConfig(IsolationOptions, QueueOptions):
    """Start SCRIPT on local workers through torch's launcher, with torchrun's environment variables.

    Options first, then the script and its arguments. When a worker fails, the others are ended and the exit
    code is 1. As one of several tasks of srun, or in one of several pods, it runs SCRIPT as one worker of all.

    With --isolate each pipeline has its own workers, and the script's plan needs isolate=True. When a worker
    fails, its pipeline is restarted and joins the other pipelines, which have kept training.

    Attributes:
        script: The Python file that every worker runs.
        args: Arguments of the script.
        stages: Number of workers to start, one per stage; with --isolate, of each pipeline.
        isolate: Start separate processes for each pipeline.
        pipelines: Number of pipelines, with --isolate.
        spares: Spare processes, each of which can replace a worker that is killed; with 0, a new process is
            started then. The script's Pipeline needs Copies. Default: a worker that is killed ends
            the run.
        seed: Seed of torch, random and numpy on every worker, so that all workers make the same model and
            draw the same batches; "none" leaves seeding to the script.
        json: Print one JSON object and nothing else; output of the script goes to standard error.
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
    """Start one more pipeline for a running run with --isolate, on the same host or on another.

    The pipeline joins the others while they train, or replaces a lost one. The command ends with the run; an
    interrupt ends only this pipeline.

    Attributes:
        run: On the same host, the folder of the run of avgpipe train, or the folder that avgpipe run prints;
            on another host, HOST:PORT of the run's --listen or --at, in a folder with the same script and
            files.
        restarts: Number of times in a row that the pipeline is restarted if it is lost within a minute of its
            start. 0: a lost pipeline is not restarted.
        wait_s: Seconds to wait for a run on another host that does not listen yet, or has no place free.
    """

    run: Annotated[str, Value("RUN", positional=True)]
    restarts: CountOrNone = 0
    wait_s: Wait = 300.0
